"""Memory that ranks share, page-locked where it lies; how that fails, on the stand-in."""

from __future__ import annotations

import copy
import mmap
import os
import subprocess
import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
import torch.distributed as dist
from ascend import VENDOR_WARNINGS, build, inputs_of, needs_stub, npu
from pinning import machine_of
from ranks import run_ranks

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlo_core.interface import Backend

pytestmark = VENDOR_WARNINGS
SHARED: dict[str, Any] = {"use_allgather": False, "timeout_s": 20.0, "load_timeout_s": 20.0}
FAILED = 507899
NUM_BLOCKS = 4


@pytest.fixture
def on_npus(usable_backend: Callable[[str], Backend]) -> Callable[..., list[Any]]:
    """Return what runs a function of a module on ranks with an NPU each."""
    if not usable_backend("npu").capabilities.host_registration:
        pytest.skip("CANN or its driver registers no memory here; see dlo info")
    return partial(run_ranks, start_method=ascend_stub.start_method(), limit_s=55.0)


def share(rank: int, **settings: Any) -> dict[str, Any]:
    """Offload from memory that the ranks share; tell what it came to, and what a pass asked for."""
    backend = npu(rank)
    model = build(NUM_BLOCKS, "bf16")
    resident = copy.deepcopy(model).to(backend.device)
    x = inputs_of(model, backend.device, rank)
    backend.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always", dlo.DloWarning)
        offloaded = dlo.offload(model, device=backend, group=dist.group.WORLD, **SHARED, **settings)
    told: dict[str, Any] = {"warnings": [str(each.message) for each in seen]}
    with torch.inference_mode():
        outs = [model(x) for _ in range(3)]
        backend.synchronize()
        if ascend_stub.loaded():
            with ascend_stub.tracing() as trace:
                outs.append(model(x))
                backend.synchronize()
            copies = [line for line in trace.of("MemcpyAsync") if "kind=1" in line]
            told["sources"] = [line.partition("src=")[2].split()[0] for line in copies]
            told["syncs"] = trace.count("SyncStream")
        told["right"] = [torch.equal(out.cpu(), resident(x).cpu()) for out in outs]
    stats = offloaded.stats()
    told["bytes"] = stats.shared_bytes, stats.pinned_bytes
    offloaded.disable()
    assert offloaded.engine is None
    return told


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_copy_from_one_locked_memory_and_no_copy_holds_the_host(
    on_npus: Callable[..., list[Any]], size: int, usable_backend: Callable[[str], Backend]
) -> None:
    usable_backend(f"npu:{size - 1}")
    for told in on_npus(partial(share, host="shared"), size):
        assert told["right"] == [True] * len(told["right"])
        shared, pinned = told["bytes"]
        assert shared > 0
        assert shared <= pinned <= shared + mmap.PAGESIZE
        assert told["warnings"] == []
        if ascend_stub.loaded():
            assert told["sources"] == ["registered"] * NUM_BLOCKS
            assert told["syncs"] == 0


def locked_twice(rank: int) -> list[str]:
    """Let every registration go again: by release, by disable, and by forgetting."""
    share(0, host="shared")
    allocator = npu(0).allocator
    pages = torch.frombuffer(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    with ascend_stub.tracing() as trace:
        allocator.register(pages).release()
        del pages
        forgotten = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
        made = allocator.register(forgotten)
        del made, forgotten
    return [line.split()[0] for line in trace.of("HostRegister", "HostUnregister", "SyncDevice")]


@needs_stub
def test_what_is_forgotten_is_unlocked_once_the_device_rests(
    on_npus: Callable[..., list[Any]],
) -> None:
    once = ["HostRegister", "HostUnregister"]
    assert on_npus(locked_twice, 1) == [[*once, "HostRegister", "SyncDevice", "HostUnregister"]]


# --- what is refused ------------------------------------------------------------------------------


def refused(rank: int) -> dict[str, str]:
    """Register what cannot be registered; tell the errors."""
    allocator = npu(0).allocator
    pages = torch.frombuffer(mmap.mmap(-1, 1 << 16, flags=mmap.MAP_SHARED), dtype=torch.uint8)
    told = {}

    def attempt(name: str, memory: torch.Tensor, **how: bool) -> None:
        try:
            allocator.register(memory, **how)
        except dlo.HostMemoryError as error:
            told[name] = str(error)

    attempt("a file", pages, readonly=True)
    attempt("between pages", pages[64:])
    attempt("strided", pages[::2])
    with ascend_stub.failing("HostRegister", code=FAILED):
        attempt("the driver", pages)
    with ascend_stub.failing("PointerGetAttributes", code=FAILED, count=100):
        attempt("not told", pages)
    # Of all these nothing stayed locked.
    allocator.register(pages).release()
    return told


@needs_stub
def test_memory_that_cannot_be_locked_is_refused_with_the_bytes_and_the_limit(
    on_npus: Callable[..., list[Any]],
) -> None:
    (told,) = on_npus(refused, 1)
    wanted = {
        "a file": "pages of a file",
        "between pages": "does not begin at a page",
        "strided": "contiguous",
        "the driver": "error 507899, ACL_ERROR_RT_DRV_INTERNAL_ERROR",
        "not told": "cannot tell what it is",
    }
    assert told.keys() == wanted.keys()
    for name, words in wanted.items():
        assert words in told[name]
    for words in ("65,536 bytes", "ulimit -l", "host='pinned'"):
        assert words in told["the driver"]


def share_with_a_fault(rank: int, host: str | None, root: str) -> Any:
    """Let the registration fail on rank 1; return what was told, or the error."""
    if rank == 1:
        ascend_stub.library().dlo_stub_fail(b"HostRegister", 0, 1, FAILED)
    with machine_of(root):
        try:
            return share(rank, host=host)
        except dlo.DloError as error:
            return f"{type(error).__name__}: {error}"


@needs_stub
def test_a_failed_registration_raises_on_all_ranks_where_sharing_was_asked_for_by_name(
    on_npus: Callable[..., list[Any]],
) -> None:
    for text in on_npus(partial(share_with_a_fault, host="shared", root="/"), 2):
        assert "npuHostRegister: error 507899" in text
        assert "ulimit -l" in text


@needs_stub
def test_a_failed_registration_falls_back_where_the_tier_was_left_open(
    on_npus: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """There is no room for a copy each, so one copy is shared; rank 1's stays pageable."""
    (tmp_path / "proc").mkdir()
    # A copy has four blocks of 2 KiB.
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 12 kB\n", encoding="utf-8")
    run = partial(share_with_a_fault, host=None, root=str(tmp_path))
    first, second = on_npus(run, 2)
    assert first["right"] == second["right"] == [True] * 4
    assert first["bytes"][0] == second["bytes"][0] > 0
    assert (first["sources"], second["sources"]) == (["registered"] * 4, ["pageable"] * 4)
    assert (first["bytes"][1] > 0, second["bytes"][1]) == (True, 0)
    assert not any("stays pageable" in text for text in first["warnings"])
    assert any("the shared memory stays pageable" in text for text in second["warnings"])


OLD_DRIVER = """
import mmap, torch, dlo_core as dlo
from dlo_core import registry
from dlo_ascend.memory import AscendAllocator, RegisteringAllocator
from dlo_ascend.npurt import why_no_registration

backend = registry.get_backend("npu")
assert not backend.capabilities.host_registration
assert type(backend.allocator) is AscendAllocator
print(backend.settings()["host registration"])
pages = torch.frombuffer(mmap.mmap(-1, 8192, flags=mmap.MAP_SHARED), dtype=torch.uint8)
for attempt in (
    lambda: RegisteringAllocator(torch.npu, backend.device).register(pages),
    lambda: dlo.offload(torch.nn.Linear(2, 2), device=backend, host="shared", blocks=["0"]),
):
    try:
        attempt()
    except (dlo.HostMemoryError, dlo.ConfigError) as error:
        print(error)
"""


@needs_stub
def test_an_older_driver_whose_copies_would_hold_the_host_registers_nothing(
    usable_backend: Callable[[str], Backend],
) -> None:
    usable_backend("npu")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OLD_DRIVER],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, "DLO_STUB_DRIVER": "25.2.0"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    shown, registered, shared = done.stdout.splitlines()[-3:]
    assert "copies would hold the host: the driver is 25.2.0, and 25.5.0 is needed" in shown
    assert "torch_npu does not take it for pinned" in registered
    assert "host='shared' cannot be had" in shared
