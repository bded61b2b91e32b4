"""A rank that fails, where the ranks gather over a device's own library: NCCL on one GPU.

The same over gloo shows that the tests themselves are right.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import RanksError, run_ranks
from torch import nn

import dlo_core as dlo
from dlo_core.registry import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WIDTH = 512
# A comm library that shares a device with its peer may take seconds for its first gather.
TIMEOUT_S = {"cpu": 2.0, "cuda": 8.0}
PATIENCE_S = 20.0
LIMIT_S = 60.0
FAULTS = ("killed", "stays away", "shut down", "raises")


class Deep(nn.Module):
    """Linear blocks."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks: Any = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


def join(rank: int, kind: str) -> torch.device:
    """Have the default group be the device's own; return the device."""
    if kind == "cpu":
        return torch.device("cpu")
    # Two ranks share one GPU: NCCL allows that to ranks that seem to be on two hosts.
    os.environ.update(NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group(
        "nccl",
        init_method=os.environ["DLO_TEST_STORE"],
        rank=rank,
        world_size=2,
        device_id=device,
    )
    return device


def held(device: torch.device) -> int:
    """Return the bytes of tensors on the device; of a CPU those that its backend gave."""
    if device.type == "cpu":
        return get_backend("cpu").memory().allocated
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def until(done: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < limit, what
        time.sleep(0.01)


def job(rank: int, kind: str, fault: str) -> None:
    """Rank 1 fails after a pass; rank 0 must end with the error, and lose nothing."""
    # A rank that hangs is killed, and would not say where; seen with pytest's -s.
    faulthandler.dump_traceback_later(LIMIT_S / 2, exit=False)
    device = join(rank, kind)
    say(rank, "joined")
    resident = Deep(6).to(device)
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(8, WIDTH, generator=gen).to(device)
    with torch.inference_mode():
        wanted = resident(x).cpu()
        before = held(device)
    (end if rank == 1 else survive)(fault, x, wanted)
    say(rank, "shut down")
    with torch.inference_mode():
        assert torch.equal(resident(x).cpu(), wanted)
    gc.collect()
    assert held(device) <= before
    leave()
    say(rank, "left")
    faulthandler.cancel_dump_traceback_later()


def begin(x: torch.Tensor, wanted: torch.Tensor) -> tuple[Deep, dlo.LayerwiseOffload]:
    before = held(x.device)
    model = Deep(6)
    offloaded = dlo.offload(
        model,
        device=str(x.device),
        group=dist.group.WORLD,
        timeout_s=TIMEOUT_S[x.device.type],
        load_timeout_s=60,
    )
    with torch.inference_mode():
        assert torch.equal(model(x).cpu(), wanted)
    say(dist.get_rank(), "made a pass")
    # Else it would say nothing at the end that no more is held than at the start.
    assert held(x.device) > before
    return model, offloaded


def end(fault: str, x: torch.Tensor, wanted: torch.Tensor) -> None:
    """Fail."""
    model, offloaded = begin(x, wanted)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "shut down":
        offloaded.shutdown()
        return
    if fault == "raises":
        model.blocks[2].register_forward_pre_hook(broken)
        with torch.inference_mode(), pytest.raises(ValueError, match="broken"):
            model(x)
    until(lambda: offloaded.failed, "this rank was not told")
    offloaded.shutdown()


def survive(fault: str, x: torch.Tensor, wanted: torch.Tensor) -> None:
    """Go on until the error comes."""
    model, offloaded = begin(x, wanted)
    began = time.monotonic()
    with torch.inference_mode():
        # The host may be ahead: what it was given by then is right, or no number.
        with suppress(dlo.FillError, dlo.UseError):
            for _ in range(8):
                got = model(x).cpu()
                assert torch.equal(got, wanted) or bool(got.isnan().all())
        until(lambda: offloaded.failed, "the offload did not fail")
        say(0, f"failed: {offloaded.failure}")
        assert time.monotonic() - began < TIMEOUT_S[x.device.type] + 8
        assert isinstance(offloaded.failure, dlo.FillError)
        assert offloaded.failure.culprit == 1, str(offloaded.failure)
        with pytest.raises(dlo.UseError, match="failed earlier"):
            model(x)
    began = time.monotonic()
    offloaded.shutdown()
    assert time.monotonic() - began < 5


def broken(*_: Any) -> None:
    raise ValueError("the block is broken")


def say(rank: int, what: str) -> None:
    """Print how far a rank is, for the machine where it hangs."""
    print(f"{time.monotonic():.1f} s, rank {rank}: {what}", file=sys.stderr, flush=True)


def leave() -> None:
    """End the default group, whose peer may be gone."""
    with suppress(AttributeError, RuntimeError):
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(pytest.param("cpu", fault, marks=pytest.mark.slow) for fault in FAULTS[:2]),
        *(("cuda", fault) for fault in FAULTS),
    ],
)
def test_a_failure_of_one_rank_ends_the_gathers_of_the_other(
    kind: str,
    fault: str,
    usable_backend: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usable_backend(kind)
    monkeypatch.setenv("DLO_TEST_STORE", f"file://{tmp_path}/store")
    if fault != "killed":
        run_ranks(job, 2, kind, fault, start_method="spawn", limit_s=LIMIT_S)
        return
    with pytest.raises(RanksError) as caught:
        run_ranks(job, 2, kind, fault, start_method="spawn", limit_s=LIMIT_S)
    assert set(caught.value.errors) == {1}
    assert "exit code -9" in caught.value.errors[1]
