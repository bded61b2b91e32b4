"""Bringing pages in by several threads."""

from __future__ import annotations

import errno
import mmap
import threading

import pytest
import torch

from dlo_core import touch as touch_module
from dlo_core.touch import Touching, touch

PAGE = mmap.PAGESIZE


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch_module, "_UNIT_NBYTES", 2 * PAGE)


def test_several_threads_work_at_once() -> None:
    both, seen = threading.Barrier(2, timeout=20), list[tuple[int, int]]()

    def advise(address: int, nbytes: int, advice: int) -> int:
        # Neither comes back before the other has begun.
        both.wait()
        seen.append((address, nbytes))
        return 0

    assert touch(8 * PAGE, 3 * PAGE, num_threads=2, madvise=advise) == 0
    assert sorted(seen) == [(8 * PAGE, 2 * PAGE), (10 * PAGE, PAGE)]


def test_no_byte_is_changed_and_the_pages_are_there() -> None:
    memory = torch.arange(64 * PAGE, dtype=torch.uint8).contiguous()
    before = memory.clone()
    start = -(-memory.data_ptr() // PAGE) * PAGE
    assert touch(start, 32 * PAGE, num_threads=3) in (0, errno.ENOMEM)
    assert torch.equal(memory, before)


@pytest.mark.parametrize("started", [0, 1])
def test_threads_that_cannot_start_are_done_without(
    started: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = threading.Thread.start, iter(range(started))

    def start(thread: threading.Thread) -> None:
        if next(count, None) is None:
            raise RuntimeError("can't start new thread")
        original(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    seen: list[int] = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        seen.append(address)
        return 0

    assert touch(0, 8 * PAGE, num_threads=3, madvise=advise) == 0
    assert seen == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]


def test_what_is_reached_is_there_and_the_rest_may_not_be() -> None:
    seen: list[int] = []
    go = threading.Semaphore(0)

    def advise(address: int, nbytes: int, advice: int) -> int:
        assert go.acquire(timeout=20)
        seen.append(address)
        return 0

    with Touching(0, 8 * PAGE, num_threads=1, madvise=advise) as touching:
        go.release()
        assert touching.reach(2 * PAGE) == 0
        assert seen == [0]
        go.release(3)
        assert touching.reach(8 * PAGE) == 0
        assert len(seen) == 4


def test_nothing_is_begun_after_the_end() -> None:
    seen: list[int] = []

    def advise(address: int, nbytes: int, advice: int) -> int:
        seen.append(address)
        closing.wait(0.05)
        return 0

    closing = threading.Event()
    with Touching(0, 200 * PAGE, num_threads=2, madvise=advise) as touching:
        touching.reach(PAGE)
    # Of a hundred; this thread may be stopped for a while before it closes.
    assert len(seen) < 100
    assert not any(thread.name.startswith("dlo-touch") for thread in threading.enumerate())


def test_a_system_without_the_advice_is_no_error_and_no_memory_is_one() -> None:
    codes = iter([errno.EINVAL, errno.ENOSYS, errno.ENOMEM])
    for expected in (0, 0, errno.ENOMEM):
        with Touching(0, PAGE, madvise=lambda *_: next(codes)) as touching:
            assert touching.reach(PAGE) == expected
            assert touching.supported == bool(expected)
