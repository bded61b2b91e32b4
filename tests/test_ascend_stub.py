"""The CANN stand-in itself: it is asynchronous, it tells what it was asked, and it can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
from ascend import VENDOR_WARNINGS, needs_stub, npu
from ranks import RanksError, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs_stub, *VENDOR_WARNINGS]
FAILED = 507899


def alone(fn: Callable[[int], Any]) -> Any:
    """Run ``fn`` in a process of its own."""
    return run_ranks(fn, 1, start_method=ascend_stub.start_method(), limit_s=30.0)[0]


def copy_without_a_wait(rank: int) -> list[bool]:
    backend = npu(0)
    src = backend.allocator.allocate(1 << 16).tensor.fill_(7)
    dst = torch.zeros(1 << 16, dtype=torch.uint8, device=backend.device)
    backend.synchronize()
    stream, right = backend.new_stream(), []
    with ascend_stub.knobs(copy_us=50_000):
        for waits in (False, True):
            dst.zero_()
            backend.synchronize()
            with backend.stream(stream):
                backend.copy(dst, src)
            if waits:
                backend.current_stream().wait_event(stream.record_event())
            seen = dst.clone()
            backend.synchronize()
            right.append(torch.equal(seen.cpu(), src))
    return right


def test_a_wait_that_is_left_out_gives_wrong_bytes() -> None:
    assert alone(copy_without_a_wait) == [False, True]


def fresh_and_freed(rank: int) -> tuple[int, int]:
    fresh = npu(0).empty(64).cpu()
    return int(fresh.min()), int(fresh.max())


def test_fresh_device_memory_is_garbage() -> None:
    assert alone(fresh_and_freed) == (0xA5, 0xA5)


def traced(rank: int) -> list[str]:
    backend = npu(0)
    buffer, dst = backend.allocator.allocate(4096), backend.empty(4096)
    pageable = torch.zeros(4096, dtype=torch.uint8)
    backend.synchronize()
    with ascend_stub.tracing() as trace:
        backend.copy(dst, buffer.tensor)
        backend.copy(dst, pageable)
        backend.synchronize()
    return trace.lines


def test_the_trace_tells_pinned_copies_from_pageable_ones() -> None:
    lines = alone(traced)
    copies = [line for line in lines if line.startswith("MemcpyAsync")]
    assert ["src=pinned" in copies[0], "src=pageable" in copies[1]] == [True, True]
    assert any(line.startswith("SyncDevice") for line in lines)


def refuse(rank: int) -> tuple[str, bool]:
    backend = npu(0)
    src, dst = backend.allocator.allocate(4096), backend.empty(4096)
    text = ""
    with ascend_stub.failing("CopyOnDevice", code=FAILED):
        backend.copy(dst, src.tensor.fill_(3))
        try:
            backend.synchronize()
        except RuntimeError as error:
            text = str(error)
    return text, True


def test_a_fault_on_the_device_is_told_to_whoever_waits() -> None:
    text, _ = alone(refuse)
    assert text


def unknown_operator(rank: int) -> None:
    torch.linalg.svd(torch.zeros(4, 4, device=npu(0).device))
    npu(0).synchronize()


def test_an_operator_that_is_not_there_stops_the_process() -> None:
    with pytest.raises(RanksError):
        alone(unknown_operator)


def test_a_knob_that_is_not_there_is_refused() -> None:
    with (
        pytest.raises(AssertionError, match="no knob 'speed'"),
        ascend_stub.knobs(speed=1),
    ):
        pass
