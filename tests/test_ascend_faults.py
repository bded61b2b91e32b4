"""What goes wrong on an NPU: memory, pinning, copies, HCCL, formats; each with a clear error."""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
import torch.distributed as dist
from ascend import VENDOR_WARNINGS, build, differences, inputs_of, needs_stub, npu
from ranks import RanksError, run_ranks

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [needs_stub, *VENDOR_WARNINGS]
OUT_OF_MEMORY = 207001
FAILED = 507899
BIG = 200 << 20


@pytest.fixture
def one_rank() -> Callable[..., Any]:
    """Return what runs a function in a process of its own, which the fault may spoil."""
    return lambda fn: run_ranks(fn, 1, start_method=ascend_stub.start_method(), limit_s=40.0)[0]


# --- pinned memory --------------------------------------------------------------------------------


def pin_too_much(rank: int) -> tuple[str, list[int], int]:
    """Let the second of three pins fail."""
    allocator = npu(0).allocator
    kept = allocator.allocate(BIG)
    with ascend_stub.failing("MallocHost", code=OUT_OF_MEMORY):
        try:
            allocator.allocate(BIG)
        except dlo.HostMemoryError as error:
            text = str(error)
    again = allocator.allocate(BIG)
    again.tensor.fill_(1)
    used = [kept.locked_nbytes, again.locked_nbytes]
    with ascend_stub.tracing() as trace:
        kept.release()
        again.release()
    return text, used, trace.count("FreeHost")


def test_a_failed_pin_names_the_bytes_and_the_limit_and_the_next_one_works(
    one_rank: Callable[..., Any],
) -> None:
    """B28, https://github.com/LMCache/LMCache-Ascend/issues/5"""
    text, used, freed = one_rank(pin_too_much)
    for words in (f"{BIG:,} bytes", "ulimit -l", "host='pageable'", "aclrtMallocHost"):
        assert words in text
    assert all(BIG <= nbytes <= 1.01 * BIG for nbytes in used)
    # Not kept in torch_npu's cache: the system has it back.
    assert freed == 2


def offload_without_pins(rank: int) -> tuple[str, int, int, list[str]]:
    """Offload while nothing can be pinned, then again when it can."""
    backend = npu(0)
    model = build(4)
    before = backend.memory().allocated
    text = ""
    with ascend_stub.failing("MallocHost", code=OUT_OF_MEMORY, count=100):
        try:
            dlo.offload(model, device=backend, host="pinned")
        except dlo.HostMemoryError as error:
            text = str(error)
    gc.collect()
    backend.synchronize()
    after = backend.memory().allocated
    return text, before, after, differences(backend, model, None)


def test_an_offload_that_cannot_pin_leaves_nothing_behind(one_rank: Callable[..., Any]) -> None:
    """B28, https://github.com/LMCache/LMCache-Ascend/issues/5"""
    text, before, after, found = one_rank(offload_without_pins)
    assert "cannot page-lock" in text
    assert before == after
    assert found == []


def lock_rounded(rank: int) -> tuple[int, list[str]]:
    """Pin 150 MiB where torch_npu rounds."""
    import warnings

    torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1048576")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        buffer = npu(0).allocator.allocate(150 << 20)
    return buffer.locked_nbytes, [str(each.message) for each in seen]


def test_what_is_rounded_up_is_counted_and_warned_about(one_rank: Callable[..., Any]) -> None:
    locked_nbytes, seen = one_rank(lock_rounded)
    assert locked_nbytes == 256 << 20
    assert any("PYTORCH_NPU_ALLOC_CONF=pinned_max_round_threshold_mb:1" in text for text in seen)


# --- device memory and copies ---------------------------------------------------------------------


def offload_without_memory(rank: int) -> tuple[str, list[str]]:
    """Let the device have no memory for the slots, then have it."""
    backend = npu(0)
    model = build(4)
    text = ""
    torch.accelerator.empty_cache()
    with ascend_stub.failing("Malloc", code=OUT_OF_MEMORY, count=100):
        try:
            dlo.offload(model, device=backend)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return text, differences(backend, model, None)


def test_a_device_without_memory_is_an_error_and_the_model_is_as_it_was(
    one_rank: Callable[..., Any],
) -> None:
    text, found = one_rank(offload_without_memory)
    assert "OutOfMemoryError" in text
    assert found == []


def copy_that_fails(rank: int, call: str) -> list[str]:
    """Let one copy of the second pass fail; then use the model again, and shut it down."""
    backend = npu(0)
    model = build(4)
    x = inputs_of(model, backend.device)
    offloaded = dlo.offload(model, device=backend)
    told = []
    with torch.inference_mode():
        model(x)
        backend.synchronize()
        with ascend_stub.failing(call, code=FAILED):
            for _ in range(2):
                try:
                    model(x)
                    backend.synchronize()
                except Exception as error:
                    told.append(type(error).__name__)
    try:
        offloaded.shutdown()
    except RuntimeError as error:
        told.append(f"shutdown {type(error).__name__}")
    return told


@pytest.mark.parametrize("call", ["MemcpyAsync", "CopyOnDevice"])
def test_a_failed_copy_is_an_error_and_no_wrong_number(
    one_rank: Callable[..., Any], call: str
) -> None:
    assert one_rank(partial(copy_that_fails, call=call))


# --- HCCL -----------------------------------------------------------------------------------------


def gather_that_fails(rank: int, folder: str) -> None:
    """Let the gathers of rank 1 be refused, so that rank 0 waits for a peer that does not come."""
    told = Path(folder, str(rank))
    told.write_text("started", encoding="utf-8")
    backend = npu(rank)
    model = build(4)
    x = inputs_of(model, backend.device)
    dlo.offload(model, device=backend, group=dist.group.WORLD, timeout_s=20, load_timeout_s=20)
    with torch.inference_mode():
        model(x)
        backend.synchronize()
        dist.barrier()
        ascend_stub.library().dlo_stub_set(b"hccl_timeout_s", 2)
        ascend_stub.library().dlo_stub_fail(b"HcclAllGather", 0, 100 if rank == 1 else 0, 1)
        told.write_text("a wrong number", encoding="utf-8")
        try:
            for _ in range(2):
                model(x)
                backend.synchronize()
            told.write_text("went through", encoding="utf-8")
        except Exception as error:
            told.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        # torch_npu's watchdog may end rank 0 in the middle of anything.
        time.sleep(3)
    os._exit(0)


def test_a_gather_that_hccl_refuses_is_an_error_here_and_a_timeout_there(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(
            gather_that_fails,
            2,
            str(tmp_path),
            start_method=ascend_stub.start_method(),
            limit_s=50.0,
        )
    refused, waiting = ((tmp_path / str(rank)).read_text(encoding="utf-8") for rank in (1, 0))
    # By the call that queued it, or, from torch_npu's own queue, by whoever waits next.
    assert refused.partition(":")[0] in ("FillError", "RuntimeError"), refused
    # Either it was told, or torch_npu's watchdog took the whole process down, as it says.
    assert "Error" in waiting or "exit code -6" in caught.value.errors[0]


# --- formats --------------------------------------------------------------------------------------


def offload_private_format(rank: int) -> str:
    """Offload a model that has one weight in the format FRACTAL_NZ."""
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True
    model = build(3, "bf16")
    private = torch_npu.empty_with_format(
        (64, 64), dtype=torch.float16, device="npu", acl_format=29
    )
    model.get_submodule("blocks.1.linear").weight = torch.nn.Parameter(private, False)
    try:
        dlo.offload(model, device=npu(0))
    except dlo.ConfigError as error:
        return str(error)
    return ""


def test_a_weight_in_a_private_format_is_refused_by_name(one_rank: Callable[..., Any]) -> None:
    """B42, https://github.com/vllm-project/vllm-omni/pull/1492 (vllm-ascend#10251)"""
    text = one_rank(offload_private_format)
    assert "'blocks.1.linear.weight'" in text
    assert "FRACTAL_NZ" in text
