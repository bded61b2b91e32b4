"""Streams: order within one, current streams, contexts, threads."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.conformance.lab import ATTEMPTS, SIZES, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["StreamConformance"]


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a thread of its own; raise what it raises."""
    results: list[Any] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        # Raised again below, in the test's own thread.
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "work in a second thread did not end within 30 s"
    if errors:
        raise errors[0]
    return results[0]


class StreamConformance(BackendSuite):
    """What the interface promises of streams."""

    @pytest.mark.parametrize("nbytes", [n for n in SIZES if n])
    def test_work_of_one_stream_runs_in_order(self, lab: Lab, nbytes: int) -> None:
        stream, middle = lab.stream(), lab.device(nbytes)
        sources = [lab.host(nbytes, seed) for seed in range(12)]
        seen = [lab.host(nbytes) for _ in sources]
        for src, out in zip(sources, seen, strict=True):
            lab.copy(stream, middle, src)
            lab.copy(stream, out, middle)
        stream.synchronize()
        for number, (src, out) in enumerate(zip(sources, seen, strict=True)):
            assert torch.equal(out, src), f"copy {number} did not run in its turn"

    def test_synchronize_of_a_stream_waits_for_all_of_its_work(self, lab: Lab) -> None:
        stream, dst, src = lab.stream(), lab.device(64), lab.host(64, 1)
        lab.busy(stream)
        lab.copy(stream, dst, src)
        done = stream.record_event()
        stream.synchronize()
        assert done.query()
        assert torch.equal(lab.read(dst), src)

    def test_synchronize_of_the_backend_waits_for_every_stream(self, lab: Lab) -> None:
        streams = [lab.stream() for _ in range(3)]
        events = [lab.pending_event(stream) for stream in streams]
        lab.backend.synchronize()
        assert all(event.query() for event in events)

    def test_queued_work_does_not_hold_the_host(self, lab: Lab) -> None:
        """Compare the time to queue work with the time to wait for it, over several attempts."""
        lab.busy(lab.stream(), 1)
        lab.settle()
        queueing = waiting = 0.0
        for _ in range(ATTEMPTS):
            began = time.perf_counter()
            event = lab.pending_event(lab.stream())
            queued = time.perf_counter()
            event.synchronize()
            queueing += queued - began
            waiting += time.perf_counter() - queued
        assert waiting > queueing / 4, (
            f"queueing took {queueing * 1e3:.1f} ms, and the wait for the work {waiting * 1e3:.1f} "
            "ms: it was done while it was queued"
        )

    def test_a_context_makes_a_stream_current(self, backend: Backend) -> None:
        outside, stream = backend.current_stream(), backend.new_stream()
        assert outside != stream
        with backend.stream(stream):
            assert backend.current_stream() == stream
        assert backend.current_stream() == outside

    def test_contexts_nest_and_may_be_entered_again(self, backend: Backend) -> None:
        outside = backend.current_stream()
        first, second = backend.new_stream(), backend.new_stream()
        with backend.stream(first):
            with backend.stream(second):
                assert backend.current_stream() == second
                with backend.stream(first):
                    assert backend.current_stream() == first
                with backend.stream(outside):
                    assert backend.current_stream() == outside
                assert backend.current_stream() == second
            assert backend.current_stream() == first
        assert backend.current_stream() == outside

    def test_a_context_restores_after_an_exception(self, backend: Backend) -> None:
        outside, stream = backend.current_stream(), backend.new_stream()
        with pytest.raises(KeyError, match="inside"), backend.stream(stream):
            raise KeyError("inside")
        assert backend.current_stream() == outside

    def test_work_queued_before_an_exception_is_not_lost(self, lab: Lab) -> None:
        stream, dst, src = lab.stream(), lab.device(64), lab.host(64, 2)

        def fail_inside() -> None:
            with lab.backend.stream(stream):
                lab.backend.copy(dst, src)
                raise KeyError("inside")

        with pytest.raises(KeyError, match="inside"):
            fail_inside()
        stream.synchronize()
        assert torch.equal(lab.read(dst), src)

    def test_the_current_stream_is_per_thread(self, backend: Backend) -> None:
        outside, stream = backend.current_stream(), backend.new_stream()
        with backend.stream(stream):
            elsewhere = in_thread(backend.current_stream)
            assert backend.current_stream() == stream
        assert elsewhere != stream, "a context reached into another thread"

        def enter() -> bool:
            with backend.stream(stream):
                return bool(backend.current_stream() == stream)

        assert in_thread(enter)
        assert backend.current_stream() == outside

    def test_threads_use_streams_of_their_own_at_once(self, lab: Lab) -> None:
        outs = [lab.host(4097) for _ in range(4)]
        gate = threading.Barrier(len(outs))

        def work(number: int) -> None:
            stream, middle = lab.stream(), lab.backend.empty(4097)
            src = pattern(4097, number)
            gate.wait(20)
            for _ in range(8):
                with lab.backend.stream(stream):
                    lab.backend.copy(middle, src)
                    lab.backend.copy(outs[number], middle)
            stream.synchronize()

        threads = [
            threading.Thread(target=work, args=(number,), daemon=True)
            for number in range(len(outs))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        for number, out in enumerate(outs):
            assert torch.equal(out, pattern(4097, number))

    def test_a_stream_takes_work_from_another_thread(self, lab: Lab) -> None:
        stream, dst, src = lab.stream(), lab.device(64), lab.host(64, 3)
        in_thread(lambda: lab.copy(stream, dst, src))
        stream.synchronize()
        assert torch.equal(lab.read(dst), src)

    @pytest.mark.parametrize("priority", [-1, 0, 1])
    def test_a_priority_is_accepted(self, lab: Lab, priority: int) -> None:
        stream, dst, src = lab.backend.new_stream(priority), lab.device(8), lab.host(8, 4)
        lab.copy(stream, dst, src)
        stream.synchronize()
        assert torch.equal(lab.read(dst), src)

    def test_what_the_backend_makes_can_be_shown(self, backend: Backend) -> None:
        assert str(backend.device) in repr(backend)
        stream, event = backend.new_stream(), backend.new_event()
        for thing in (stream, event, backend.current_stream(), backend.allocator):
            assert repr(thing)
        stream.record_event(event)
        assert repr(event)
        backend.synchronize()
