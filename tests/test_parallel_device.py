"""TP and HSDP over NCCL: they run where there is a CUDA device, and skip elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend

WIDTH = 2048
NUM_BLOCKS = 6


class Deep(nn.Module):
    """Blocks that are large enough for a missing wait to show."""

    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


def build(topology: dlo.Topology) -> Any:
    """Return the model of this rank, on the device, where torch wants it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = Deep().cuda()
    if topology.hsdp_mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=topology.hsdp_mesh)
        return fully_shard(model, mesh=topology.hsdp_mesh)
    assert topology.mesh is not None
    style = ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, Any] = {f"blocks.{number}": style for number in range(NUM_BLOCKS)}
    return parallelize_module(model, topology.mesh["tp"], plan)


def compare(rank: int, sizes: dict[str, Any]) -> bool:
    # Two ranks share one GPU: NCCL allows that to ranks that seem to be on two hosts.
    os.environ.update(
        NCCL_HOSTID=f"host{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        MASTER_ADDR="127.0.0.1",
    )
    dist.destroy_process_group()
    torch.cuda.set_device(0)
    dist.init_process_group(
        "nccl",
        init_method=os.environ["DLO_TEST_STORE"],
        rank=rank,
        world_size=2,
        device_id=torch.device("cuda", 0),
    )
    topology = dlo.Topology.from_sizes(**sizes, device_type="cuda")
    resident, model = build(topology), build(topology)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(64, WIDTH, generator=gen).cuda()
    with torch.no_grad():
        wanted = resident(x)
        offloaded = dlo.offload(model, device="cuda", topology=topology, use_allgather=False)
        same = [torch.equal(model(x), wanted) for _ in range(40)]
        offloaded.disable()
        same.append(torch.equal(model(x), wanted))
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return all(same)


@pytest.mark.timeout(150)
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"hsdp": (1, 2)}], ids=["TP2", "HSDP1x2"])
def test_weights_that_lie_on_the_device_stream_and_come_back_there(
    sizes: dict[str, Any],
    usable_backend: Callable[[str], Backend],
    tmp_path: os.PathLike[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """HSDP gathers on streams of its own, which must not read a slot before it is filled."""
    usable_backend("cuda")
    monkeypatch.setenv("DLO_TEST_STORE", f"file://{tmp_path}/nccl")
    assert run_ranks(compare, 2, sizes, start_method="spawn", limit_s=140.0) == [True, True]
