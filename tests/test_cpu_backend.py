"""The CPU backend: streams that really run beside the host, events, errors, fork and exit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.cpu import CpuBackend, dlo_backend
from dlo_core.cpu_stream import StreamError
from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import Capabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.cpu_stream import CpuStream


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend()


def gate(stream: CpuStream) -> Callable[[], None]:
    """Hold ``stream`` until the returned function is called."""
    opened = threading.Event()
    stream.run(lambda: opened.wait(20))
    return opened.set


def test_work_on_a_side_stream_runs_beside_the_host_and_in_order(backend: CpuBackend) -> None:
    stream, seen = backend.new_stream(), list[int]()
    release = gate(stream)
    for number in range(3):
        stream.run(lambda number=number: seen.append(number))  # type: ignore[misc]
    event = stream.record_event()
    assert not event.query()
    assert seen == []
    release()
    event.synchronize()
    assert seen == [0, 1, 2]


def test_an_event_that_was_never_recorded_counts_as_reached(backend: CpuBackend) -> None:
    event = backend.new_event()
    assert event.query()
    event.synchronize()
    backend.current_stream().wait_event(event)
    backend.new_stream().wait_event(event)


def test_a_wait_means_the_recording_at_the_time_of_the_wait(backend: CpuBackend) -> None:
    first, second = backend.new_stream(), backend.new_stream()
    event = backend.new_event()
    release_first = gate(first)
    first.record_event(event)
    second.wait_event(event)
    done = second.record_event()
    # Recorded anew elsewhere: the wait above still means the first stream.
    backend.current_stream().record_event(event)
    assert not done.query()
    release_first()
    done.synchronize()


def test_one_stream_waits_for_another(backend: CpuBackend) -> None:
    first, second, seen = backend.new_stream(), backend.new_stream(), list[str]()
    release = gate(first)
    first.run(lambda: seen.append("first"))
    second.wait_event(first.record_event())
    second.run(lambda: seen.append("second"))
    release()
    second.synchronize()
    assert seen == ["first", "second"]


def test_what_is_queued_in_a_context_is_handed_over_as_one_item(
    backend: CpuBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = backend.new_stream()
    items: list[int] = []
    put = stream._worker.put

    def count(work: list[Callable[[], object]]) -> None:
        items.append(len(work))
        put(work)

    monkeypatch.setattr(stream._worker, "put", count)
    dst, src = backend.empty(64), torch.ones(64, dtype=torch.uint8)
    with backend.stream(stream):
        assert backend.current_stream() is stream
        backend.copy(dst, src)
        event = stream.record_event()
    assert backend.current_stream() is not stream
    event.synchronize()
    assert items == [2]
    assert torch.equal(dst, src)


def test_an_error_in_a_worker_reaches_whoever_waits_and_stops_the_stream(
    backend: CpuBackend,
) -> None:
    first, second, seen = backend.new_stream(), backend.new_stream(), list[str]()
    with backend.stream(first):
        backend.copy(backend.empty(4), torch.ones(5, dtype=torch.uint8))
        bad = first.record_event()
    second.wait_event(bad)
    second.run(lambda: seen.append("never"))
    chained = second.record_event()
    for event in (bad, chained, first.record_event()):
        with pytest.raises(StreamError, match=r"ValueError: .*one size"):
            event.synchronize()
    assert seen == []


def test_times_between_events_are_measured(backend: CpuBackend) -> None:
    stream = backend.new_stream()
    start = stream.record_event(backend.new_event(timing=True))
    end = stream.record_event(backend.new_event(timing=True))
    end.synchronize()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(backend.new_event(timing=True))


def test_a_worker_is_in_neither_grad_nor_inference_mode(backend: CpuBackend) -> None:
    stream, modes = backend.new_stream(), list[tuple[bool, bool]]()
    with torch.inference_mode():
        stream.run(
            lambda: modes.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))
        )
        stream.synchronize()
    assert modes == [(False, False)]


def test_device_memory_is_counted_while_any_view_lives(backend: CpuBackend) -> None:
    before = backend.memory().allocated
    made = backend.empty(1000)
    view = made[10:20].view(torch.float16)
    assert backend.memory().allocated == before + 1000
    del made
    assert backend.memory().allocated == before + 1000
    del view
    assert backend.memory().allocated == before


def test_device_memory_made_in_inference_mode_can_be_written_outside(backend: CpuBackend) -> None:
    with torch.inference_mode():
        made = backend.empty(8)
    assert not made.is_inference()
    made.fill_(1)


def test_a_host_buffer_has_the_exact_size_and_is_pageable(backend: CpuBackend) -> None:
    buffer = backend.allocator.allocate(5001)
    assert buffer.tensor.nbytes == 5001
    assert not buffer.pinned
    assert buffer.locked_nbytes == 0
    assert int(buffer.tensor.sum()) == 0
    buffer.release()
    buffer.release()
    with pytest.raises(BackendError, match="released"):
        buffer.tensor.sum()


def test_an_impossible_host_buffer_names_the_bytes(backend: CpuBackend) -> None:
    with pytest.raises(HostMemoryError, match=f"{1 << 60:,} bytes"):
        backend.allocator.allocate(1 << 60)


def test_a_check_remembers_a_difference(backend: CpuBackend) -> None:
    check = backend.new_check()
    same = torch.arange(8, dtype=torch.uint8)
    check.compare(same, same.clone())
    assert not check.failed()
    check.compare(same, same + 1)
    check.compare(same, same.clone())
    assert check.failed()


def test_a_stream_that_is_dropped_ends_its_thread(backend: CpuBackend) -> None:
    stream = backend.new_stream()
    thread, alive = stream._worker.thread, weakref.ref(stream)
    del stream
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()


def test_a_forked_child_is_told_that_its_streams_are_dead(backend: CpuBackend) -> None:
    stream = backend.new_stream()
    stream.synchronize()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            stream.run(lambda: None)
            answer = b"worked"
        except BackendError as error:
            answer = b"forked" if "forked" in str(error) else b"other"
        os.write(write, answer)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 16) == b"forked"
    stream.synchronize()


@pytest.mark.parametrize("pending", ["copies", "a stuck stream"])
def test_the_interpreter_exits_cleanly_with_work_pending(pending: str) -> None:
    work = {
        "copies": "for _ in range(50): backend.copy(dst, src)",
        "a stuck stream": "stream.run(lambda: time.sleep(60))",
    }[pending]
    script = f"""
        import time, torch
        from dlo_core.cpu import CpuBackend
        backend = CpuBackend()
        stream = backend.new_stream()
        dst, src = backend.empty(1 << 24), torch.ones(1 << 24, dtype=torch.uint8)
        with backend.stream(stream):
            {work}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=40,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_there_is_one_cpu_device() -> None:
    assert dlo_backend("cpu").device == torch.device("cpu")
    assert dlo_backend("cpu:0").name == "cpu"
    with pytest.raises(BackendError, match="one CPU device"):
        dlo_backend("cpu:1")


@pytest.mark.parametrize("alignment", [0, 32, 100, 384])
def test_an_alignment_that_is_no_power_of_two_is_refused(alignment: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        Capabilities(alignment=alignment)
