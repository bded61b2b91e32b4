"""Public faults between ranks: who shards with whom, who differs, who fails.

Each docstring has the address of the thread; the fault told there must not be ours.
"""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from toys import Block, Toy, WideBlock, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N = 3


def on_meta(make: Callable[[], Toy]) -> Toy:
    """Return a model whose parameters are on meta, buffers real."""
    model = make()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to("meta")
    for name, buffer in buffers.items():
        setattr(model, name, buffer)
    return model


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("use_allgather", [True, False])
@pytest.mark.parametrize("source", ["module", "checkpoint", "meta"])
def test_nothing_stays_on_meta_in_any_mode(
    tmp_path: Path, source: str, use_allgather: bool, size: int
) -> None:
    """One rank with gather mode on is a plain local path.

    B33, https://github.com/vllm-project/vllm-omni/pull/6213
    """
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)

    def job(rank: int) -> int:
        reference = make_toy(N)
        model = on_meta(lambda: make_toy(N)) if source == "meta" else make_toy(N)
        offloaded = dlo.offload(
            model,
            device=PoisonBackend(),
            group=dist.group.WORLD if dist.is_initialized() else None,
            use_allgather=use_allgather,
            checkpoint=None if source == "module" else path,
        )
        tensors = [*model.parameters(), *model.buffers()]
        assert not any(t.is_meta or t.device.type == "meta" for t in tensors)
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        gathered = offloaded.stats().gathered_bytes
        assert (offloaded.footprint.stages_nbytes > 0) == (gathered > 0)
        offloaded.disable()
        assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
        assert torch.equal(model(inputs()), reference(inputs()))
        return gathered

    # A group of one rank is a group, too.
    gathered = [job(0), *run_ranks(job, 1)] if size == 1 else run_ranks(job, size)
    assert all(bool(nbytes) == (use_allgather and size > 1) for nbytes in gathered)


def equal_in(group: Any, rank: int, seed: int = 0) -> bool:
    """Offload the toy of this seed in ``group`` and compare, then restore."""
    torch.manual_seed(seed)
    model = Toy([Block(), WideBlock(), Block()]).requires_grad_(False)
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend(), group=group)
    assert (offloaded.rank, offloaded.size) == (dist.get_rank(group), dist.get_world_size(group))
    for number in range(3):
        x = inputs(10 * rank + number)
        assert torch.equal(model(x), reference(x))
    offloaded.disable()
    assert_restored(model, before)
    return True


def test_groups_that_are_not_the_world_shard_by_group_rank() -> None:
    """[0, 2] and [1, 3] at once, each with weights of its own.

    B35, https://github.com/meta-pytorch/torchrec/pull/4601
    """

    def job(rank: int) -> bool:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        return equal_in(groups[rank % 2], rank, seed=rank % 2)

    assert run_ranks(job, 4) == [True] * 4


def test_a_group_whose_ranks_were_given_backwards() -> None:
    """new_group sorts them: group ranks are 1 → 0 and 3 → 1.

    B35, https://github.com/meta-pytorch/torchrec/pull/4601
    """

    def job(rank: int) -> bool:
        group = dist.new_group([3, 1])
        return equal_in(group, rank) if rank in (1, 3) else True

    assert run_ranks(job, 4) == [True] * 4


@pytest.mark.skipif(
    "sort_ranks" not in inspect.signature(dist.new_group).parameters,
    reason="this torch sorts the ranks of every group",
)
def test_a_group_that_keeps_its_own_order_of_ranks() -> None:
    """Group rank 0 is global rank 2; what is told by rank is told by group rank.

    B35, https://github.com/meta-pytorch/torchrec/pull/4601
    """

    def job(rank: int) -> str:
        group = dist.new_group([2, 0, 1], sort_ranks=False)
        assert dist.get_rank(group) == [1, 2, 0][rank]
        assert equal_in(group, rank)
        with pytest.raises(dlo.AgreementError) as caught:
            dlo.offload(
                make_toy(4 if rank == 2 else 3),
                device=PoisonBackend(),
                group=group,
                load_timeout_s=20,
            )
        return str(caught.value)

    texts = run_ranks(job, 3)
    assert texts[0] == texts[1] == texts[2]
    assert "rank 0 has 4, rank 1 has 3, rank 2 has 3" in texts[0]


def test_groups_of_the_caller_that_not_every_rank_is_in() -> None:
    """A rank in more groups than its peers meets them all the same, again and again.

    B35, https://github.com/meta-pytorch/torchrec/pull/4601
    """

    def job(rank: int) -> bool:
        made = [dist.new_group([0, other]) for other in (1, 2)]
        mine = [group for group in made if isinstance(group, dist.ProcessGroup)]
        assert len(mine) == (2 if rank == 0 else 1)
        return all(equal_in(dist.group.WORLD, rank, seed) for seed in range(2))

    assert run_ranks(job, 3) == [True] * 3


def odd_one_out() -> dict[str, Callable[[], Toy]]:
    """Models that differ from ``make_toy(3)`` in one thing."""

    def wide() -> Toy:
        model = make_toy(3)
        model.blocks[1] = WideBlock()
        return model.requires_grad_(False)

    def swapped() -> Toy:
        torch.manual_seed(0)
        return Toy([Block(), WideBlock(), Block()]).requires_grad_(False)

    def turned() -> Toy:
        model = make_toy(3)
        weight: Any = model.get_parameter("blocks.1.linear.weight")
        weight.data = weight.t().contiguous().t()
        return model

    def outside() -> Toy:
        model = make_toy(3)
        model.post = torch.nn.Linear(8, 9)
        return model.requires_grad_(False)

    return {
        "a block fewer": lambda: make_toy(2),
        "a block more": lambda: make_toy(4),
        "another shape": wide,
        "another class": swapped,
        "another dtype": lambda: make_toy(3, dtype=torch.bfloat16),
        "another stride": turned,
        "another remainder": outside,
    }


@pytest.mark.parametrize("odd", odd_one_out())
def test_ranks_with_different_models_are_refused_alike(odd: str) -> None:
    """All raise at enable, say the same, and are as they were; then they can agree.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> str:
        model = odd_one_out()[odd]() if rank == 1 else make_toy(3)
        before = snapshot(model)
        with pytest.raises(dlo.AgreementError, match="differ in") as caught:
            dlo.offload(model, device=PoisonBackend(), group=dist.group.WORLD, load_timeout_s=20)
        assert_restored(model, before)
        assert equal_in(dist.group.WORLD, rank)
        return str(caught.value)

    texts = run_ranks(job, 2)
    assert texts[0] == texts[1]
    assert "rank 0 has" in texts[0]
    assert "rank 1 has" in texts[0]


def several(model: Toy) -> None:
    for _ in range(3):
        model(inputs())


def test_a_rank_that_stays_in_a_block_is_an_error_on_the_other() -> None:
    """Within the timeout, and every later call says that the offload is closed.

    B37, https://github.com/tier4/Diffusion-Planner/pull/336
    """

    def job(rank: int) -> Any:
        model = make_toy(6)
        offloaded = dlo.offload(
            model, device=PoisonBackend(), group=dist.group.WORLD, timeout_s=2.0
        )
        model(inputs())
        dist.barrier()
        if rank == 1:
            model.blocks[1].register_forward_pre_hook(lambda module, args: time.sleep(6))
            start = time.monotonic()
            with pytest.raises(dlo.DloError):
                model(inputs())
            offloaded.shutdown()
            return time.monotonic() - start
        start = time.monotonic()
        with pytest.raises(dlo.FillError, match=r"'blocks\.\d' could not be loaded") as caught:
            several(model)
        waited = time.monotonic() - start
        with pytest.raises(dlo.UseError, match="closed"):
            model(inputs())
        offloaded.shutdown()
        error = caught.value
        assert error.rank == rank
        assert error.block in str(error)
        assert error.culprit == 1
        assert "rank 1 (global rank 1, process " in str(error)
        assert "computing block 'blocks.1'" in str(error)
        return waited

    waited = run_ranks(job, 2)
    assert waited[0] < 5.5
