"""Public faults that need a device: they run where there is one, and skip elsewhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from toys import assert_restored, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend

WIDTH = 2048


class Deep(nn.Module):
    """Enough work a block that a missing wait has time to show."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(n))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks several times as wide as needed."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.fixture
def cuda(usable_backend: Callable[[str], Backend]) -> Backend:
    """Return the CUDA backend, or skip with its own reason."""
    return usable_backend("cuda")


def resident_on(model: nn.Module, backend: Backend) -> nn.Module:
    return twin(model).to(backend.device)


def batch(backend: Backend, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(2048, WIDTH, generator=gen).to(backend.device)


def test_a_forward_on_a_stream_of_the_users_own_gets_the_right_bits(cuda: Backend) -> None:
    """B03, https://github.com/huggingface/diffusers/pull/12721; true corruption."""
    model = Deep(7)
    resident = resident_on(model, cuda)
    dlo.offload(model, device=cuda)
    mine = cuda.new_stream()
    x = batch(cuda)
    with torch.inference_mode():
        wanted = resident(x)
        cuda.synchronize()
        with cuda.stream(mine):
            got = [model(x) for _ in range(50)]
        cuda.synchronize()
        assert all(torch.equal(one, wanted) for one in got)


def test_disable_right_after_a_forward_gives_the_right_bits_back(cuda: Backend) -> None:
    """B29, https://github.com/pytorch/pytorch/issues/127612. No wait of the host in between."""
    model = Deep(5)
    before = snapshot(model)
    resident = resident_on(model, cuda)
    x = batch(cuda)
    for _ in range(5):
        offloaded = dlo.offload(model, device=cuda)
        with torch.inference_mode():
            got = model(x)
        offloaded.disable()
        with torch.inference_mode():
            assert torch.equal(got, resident(x))
        assert_restored(model, before)


def listed(rank: int) -> list[bool]:
    import dlo_core.registry as registry  # noqa: PLR0402 - in a fresh process

    registry.installed()
    looked = torch.cuda.is_initialized()
    last = torch.cuda.device_count() - 1
    offloaded = dlo.offload(Deep(3), device=f"cuda:{last}")
    others = [torch.cuda.memory_allocated(n) for n in range(last)]
    return [looked, offloaded.device.index == last, not any(others)]


def test_a_look_starts_no_context_and_an_offload_only_that_of_its_device(cuda: Backend) -> None:
    """B43, https://github.com/pytorch/pytorch/pull/145752."""
    assert run_ranks(listed, 1, start_method="spawn") == [[False, True, True]]


class Exchanging(Deep):
    """Every block ends in an all-to-all of the model's own, as sequence parallelism has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks, exchanging rows after each."""
        for block in self.blocks:
            x = block(x).tanh()
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x)
            x = out
        return x


def exchange(rank: int) -> bool:
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
    model = Exchanging(6)
    resident = twin(model).cuda()
    dlo.offload(model, device="cuda", group=dist.group.WORLD)
    gen = torch.Generator().manual_seed(rank)
    x = torch.randn(64, WIDTH, generator=gen).cuda()
    with torch.inference_mode():
        wanted = resident(x)
        same = all(torch.equal(model(x), wanted) for _ in range(40))
    offloaded = dlo.offloaded(model)
    assert offloaded is not None
    offloaded.disable()
    dist.barrier()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return same


@pytest.mark.timeout(150)
def test_the_models_own_collectives_and_the_gathers_do_not_block_each_other(
    cuda: Backend, tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B40, https://github.com/NVIDIA/nccl/issues/592. Two communicators on two streams."""
    monkeypatch.setenv("DLO_TEST_STORE", f"file://{tmp_path}/nccl")
    assert run_ranks(exchange, 2, start_method="spawn", limit_s=140.0) == [True, True]
