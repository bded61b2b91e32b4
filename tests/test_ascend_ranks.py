"""Ranks on the Ascend backend: the collective's conformance, and the engine's bits over HCCL.

Run first: ranks are forked while this process has not touched a device.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

import ascend_stub
import pytest
import torch
import torch.distributed as dist
from ascend import VENDOR_WARNINGS, build, differences, inputs_of, needs_stub, npu
from ranks import run_ranks

import dlo_core as dlo
from dlo_core.testing.conformance import CollectiveConformance

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dlo_core.interface import Backend

pytestmark = VENDOR_WARNINGS
SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
PATHS: dict[str, dict[str, Any]] = {
    "staged": {"use_allgather": True, "stages": 2},
    "in place": {"use_allgather": True, "stages": 0},
    "local": {"use_allgather": False},
}


class TestAscendCollective(CollectiveConformance):
    limit_s = 55.0

    @pytest.fixture
    def make_backend(self, usable_backend: Callable[[str], Backend]) -> Callable[[int], Backend]:
        usable_backend("npu")
        self.start_method = ascend_stub.start_method()
        return npu


@pytest.fixture
def on_npus(usable_backend: Callable[[str], Backend]) -> Callable[..., list[Any]]:
    """Return what runs a function of a module on ranks with an NPU each."""
    usable_backend("npu")
    return partial(run_ranks, start_method=ascend_stub.start_method(), limit_s=55.0)


def bits_of_rank(rank: int, path: str) -> list[str]:
    """Run every model and depth of one path; say what differs."""
    found = []
    for num_blocks, depth, dtypes in itertools.product((1, 2, 5), (2, 3), ("mixed", "bf16")):
        cell = f"rank {rank}: {num_blocks} blocks, depth {depth}, {path}, {dtypes}"
        settings = {"depth": depth, **PATHS[path], **SHORT}
        model = build(num_blocks, dtypes)
        each = differences(npu(rank), model, dist.group.WORLD, **settings)
        found += [f"{cell}: {text}" for text in each]
    return found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_offloaded_model_computes_the_resident_bits(
    on_npus: Callable[..., list[Any]],
    usable_backend: Callable[[str], Backend],
    size: int,
    path: str,
) -> None:
    if size > 1:
        usable_backend(f"npu:{size - 1}")
    assert [*itertools.chain(*on_npus(bits_of_rank, size, path))] == []


# --- what the runtime is asked for ----------------------------------------------------------------

NUM_BLOCKS = 6
# Of each block and pass: the runtime's calls. docs/ascend.md has them with the reasons.
PER_BLOCK = {
    "local": {"MemcpyAsync": 1, "HcclAllGather": 0, "StreamWaitEvent": 2, "RecordEvent": 2},
    "staged": {"MemcpyAsync": 2, "HcclAllGather": 1, "StreamWaitEvent": 6, "RecordEvent": 7},
    "in place": {"MemcpyAsync": 2, "HcclAllGather": 1, "StreamWaitEvent": 6, "RecordEvent": 6},
}
# Besides, in a pass that keeps times.
RECORDS_FOR_TIMES = {"local": 3, "staged": 5, "in place": 5}
SWITCHES = {"local": 2, "staged": 4, "in place": 4}
NEVER = ("Malloc", "Free", "MallocHost", "FreeHost", "SyncStream", "SyncEvent", "Memcpy", "BadCopy")


def calls_of_rank(rank: int, path: str, timed: bool) -> dict[str, Any]:
    """Count the runtime's calls and the stream switches of one pass in the steady state."""
    backend = npu(rank)
    model = build(NUM_BLOCKS, "bf16")
    x = inputs_of(model, backend.device)
    settings = {"time_every": 1 if timed else 50, **PATHS[path], **SHORT}
    offloaded = dlo.offload(model, device=backend, group=dist.group.WORLD, **settings)
    switches = 0
    set_stream = torch.accelerator.set_stream

    def counted(stream: Any) -> None:
        nonlocal switches
        switches += 1
        set_stream(stream)

    with torch.inference_mode():
        for _ in range(3):
            model(x)
        backend.synchronize()
        dist.barrier()
        torch.accelerator.set_stream = counted
        with ascend_stub.tracing() as trace:
            out = model(x)
            backend.synchronize()
        torch.accelerator.set_stream = set_stream
        del out
    pageable = [line for line in trace.of("MemcpyAsync") if "pageable" in line]
    offloaded.disable()
    counts = {name: trace.count(name) for name in (*PER_BLOCK[path], *NEVER, "SyncDevice")}
    return counts | {"pageable": pageable, "switches": switches, "lines": repr(trace)}


@needs_stub
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("timed", [False, True])
def test_a_pass_asks_the_runtime_for_no_more_than_it_needs(
    on_npus: Callable[..., list[Any]], path: str, timed: bool
) -> None:
    for counts in on_npus(calls_of_rank, 2, path, timed):
        lines = counts.pop("lines")
        # Ours, at the end of the trace.
        assert counts.pop("SyncDevice") == 1, lines
        assert counts.pop("pageable") == []
        assert {name: counts.pop(name) for name in NEVER} == dict.fromkeys(NEVER, 0), lines
        assert counts.pop("switches") == NUM_BLOCKS * SWITCHES[path]
        # Where ranks gather, one byte says whether they gave up.
        counts["RecordEvent"] -= timed * (NUM_BLOCKS * RECORDS_FOR_TIMES[path] + 1)
        counts["MemcpyAsync"] -= PATHS[path]["use_allgather"]
        assert counts == {n: NUM_BLOCKS * count for n, count in PER_BLOCK[path].items()}, lines


# --- a user's own job -----------------------------------------------------------------------------

PROGRAM = """
import copy, torch, torch.distributed as dist, dlo_core as dlo
from ascend import build, inputs_of

dist.init_process_group("hccl")
rank = dist.get_rank() % torch.accelerator.device_count()
torch.accelerator.set_device_index(rank)
model = build(4, "bf16")
resident = copy.deepcopy(model).to(f"npu:{rank}")
x = inputs_of(model, torch.device("npu", rank), rank)
offloaded = dlo.offload(model, device=f"npu:{rank}", group=dist.group.WORLD)
assert offloaded.engine.transfer.gathers
with torch.inference_mode():
    for _ in range(3):
        assert torch.equal(model(x).cpu(), resident(x).cpu())
assert torch.accelerator.current_device_index() == rank
offloaded.disable()
dist.destroy_process_group()
"""


def test_a_job_of_torchrun_whose_own_group_is_hccl(
    usable_backend: Callable[[str], Backend], tmp_path: Path
) -> None:
    usable_backend("npu:1")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node", "2", str(program)),
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-4000:]
