"""Public faults about order: rings that wrap, blocks that move, vanish, repeat or interleave.

Each docstring has the address of the thread; the fault told there must not be ours.
"""

from __future__ import annotations

import itertools
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch
from poison import PoisonBackend
from ranks import run_ranks
from torch import nn
from toys import Block, OrderedToy, Toy, WideBlock, inputs, make_toy, same_bits, twin

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Sequence

import torch.distributed as dist

Model = TypeVar("Model", bound=Toy)
LENGTHS = (1, 2, 3, 4, 5, 7)


class Witness:
    """Compares, as every block begins, the weights it computes with with those it should have."""

    def __init__(self, model: Toy, reference: nn.Module) -> None:
        assert isinstance(reference, Toy)
        self.calls: list[int] = []
        self.wrong: list[int] = []
        for number, block in enumerate(model.blocks):
            wanted = [p.clone() for p in reference.blocks[number].parameters()]
            block.register_forward_pre_hook(self._checker(number, wanted))

    def _checker(self, number: int, wanted: list[torch.Tensor]) -> Any:
        def check(module: nn.Module, args: Any) -> None:
            self.calls.append(number)
            if not all(map(same_bits, module.parameters(), wanted)):
                self.wrong.append(number)

        return check


def frozen(model: Model) -> Model:
    return model.requires_grad_(False)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
def test_a_number_of_blocks_that_depth_does_not_divide(depth: int, size: int) -> None:
    """At the start of its call, each block's slot holds that block's bytes, in every pass.

    B02, https://github.com/vllm-project/vllm/pull/54975
    """

    def job(rank: int) -> bool:
        for n in LENGTHS:
            model = make_toy(n)
            reference = twin(model)
            witness = Witness(model, reference)
            group = dist.group.WORLD if size > 1 else None
            offloaded = dlo.offload(model, device=PoisonBackend(0), group=group, depth=depth)
            for seed in range(3):
                assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            assert witness.calls == [*range(n)] * 3
            assert witness.wrong == []
            offloaded.disable()
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_the_witness_sees_a_wrong_block() -> None:
    """The check above can fail.

    B02, https://github.com/vllm-project/vllm/pull/54975
    """
    model = make_toy(3)
    witness = Witness(model, twin(model))
    model.blocks[1], model.blocks[2] = model.blocks[2], model.blocks[1]
    attrgetter("blocks.1.norm.weight")(model).add_(1)
    model(inputs())
    assert witness.wrong == [2]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("order", [(2, 0, 3, 1), (3, 2, 1, 0), (1, 0, 2, 3)])
def test_blocks_that_run_in_another_order_than_registered(
    order: tuple[int, ...], size: int
) -> None:
    """Right from the first forward on; later passes fill each block once.

    B15, https://github.com/huggingface/diffusers/pull/11375
    """

    def job(rank: int) -> int:
        torch.manual_seed(0)
        model = frozen(OrderedToy([Block(), WideBlock(), Block(), WideBlock()], order))
        reference = twin(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=group)
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        fills = offloaded.stats().fills
        assert torch.equal(model(inputs(9)), reference(inputs(9)))
        made = offloaded.stats().fills - fills
        offloaded.disable()
        return made

    made = run_ranks(job, size) if size > 1 else [job(0)]
    assert made == [4] * size


def test_an_order_that_changes_between_forwards() -> None:
    """B15, https://github.com/huggingface/diffusers/pull/11375"""
    model = frozen(OrderedToy([Block() for _ in range(4)], range(4)))
    reference: Any = twin(model)
    dlo.offload(model, device=PoisonBackend(0))
    for seed, order in enumerate(itertools.permutations(range(4))):
        reference.order = model.order = list(order)
        assert torch.equal(model(inputs(seed)), reference(inputs(seed))), order


def test_an_order_that_changes_between_forwards_on_two_ranks_alike() -> None:
    """B15, https://github.com/huggingface/diffusers/pull/11375"""

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = frozen(OrderedToy([Block() for _ in range(4)], range(4)))
        reference: Any = twin(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=dist.group.WORLD)
        for seed, order in enumerate([(0, 1, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0), (0, 1, 2, 3)]):
            reference.order = model.order = list(order)
            assert torch.equal(model(inputs(seed)), reference(inputs(seed))), order
        offloaded.disable()
        return True

    assert run_ranks(job, 2) == [True, True]


@pytest.mark.parametrize("first_on", [False, True])
@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_block_that_runs_only_sometimes(block: int, first_on: bool) -> None:
    """Off, on, off, on: equal each time, also when it is not part of the first pass.

    B16, https://github.com/huggingface/diffusers/pull/13211
    """
    model = make_toy(4)
    reference = twin(model)
    dlo.offload(model, device=PoisonBackend())
    for seed in range(6):
        skip = () if (seed % 2 == 0) == first_on else (block,)
        assert torch.equal(model(inputs(seed), skip=skip), reference(inputs(seed), skip=skip))


@pytest.mark.parametrize("stages", [2, 0])
def test_ranks_that_skip_different_blocks(stages: int) -> None:
    """Every set of skipped blocks against every other; nobody is left waiting.

    B16, https://github.com/huggingface/diffusers/pull/13211
    """

    def job(rank: int) -> list[bool]:
        model = make_toy(3)
        reference = twin(model)
        offloaded = dlo.offload(
            model, device=PoisonBackend(0), group=dist.group.WORLD, stages=stages
        )
        equal = []
        subsets = [s for k in range(4) for s in itertools.combinations(range(3), k)]
        for mine, other in itertools.product(subsets, subsets[::3]):
            skip = mine if rank == 0 else other
            equal.append(
                torch.equal(model(inputs(rank), skip=skip), reference(inputs(rank), skip=skip))
            )
        offloaded.disable()
        return equal

    for equal in run_ranks(job, 2):
        assert all(equal)


@pytest.mark.parametrize("size", [1, 2])
def test_one_block_only(size: int) -> None:
    """One block is loaded once and stays (no public report)."""

    def job(rank: int) -> int:
        model = make_toy(1)
        reference = twin(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(), group=group, depth=2)
        for seed in range(4):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        fills = offloaded.stats().fills
        offloaded.disable()
        return fills

    assert (run_ranks(job, size) if size > 1 else [job(0)]) == [1] * size


def test_no_block_is_refused() -> None:
    """An empty list is an error that says so (no public report)."""
    model = Toy([])
    with pytest.raises(dlo.ConfigError, match=r"'blocks'.*empty"):
        dlo.offload(model, device=PoisonBackend())
    assert dlo.offloaded(model) is None
    model(inputs())


class TwiceToy(Toy):
    """Calls some blocks twice in one forward: at once, later, or inside of another's result."""

    program: Sequence[int] = ()

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run ``program``."""
        x = self.pre(x)
        for number in self.program:
            x = self.blocks[number](x)
        out: torch.Tensor = self.post(x)
        return out


PROGRAMS = [
    (0, 0, 1, 2, 3),
    (0, 1, 2, 0, 3),
    (0, 1, 2, 3, 0),
    (0, 1, 2, 3, 3),
    (0, 1, 2, 3, 0, 1, 2, 3),
    (0, 3, 0, 3, 0, 3),
    (0,),
    (),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: "".join(map(str, p)) or "none")
def test_a_block_that_is_called_twice_in_a_forward(
    program: tuple[int, ...], depth: int, size: int
) -> None:
    """At once, with others between, or a whole second turn (no public report)."""

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = TwiceToy([Block() for _ in range(4)])
        frozen(model).program = program
        reference = twin(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=group, depth=depth)
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
        offloaded.disable()
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


@pytest.mark.parametrize("size", [1, 2])
def test_guidance_as_two_whole_passes_a_step(size: int) -> None:
    """CFG: the model runs twice a step, its state between the two untouched (no public report)."""

    def job(rank: int) -> bool:
        model = make_toy(5)
        reference = twin(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=group)
        results = []
        for net in (reference, model):
            x = inputs(rank)
            for step in range(3):
                with_prompt, without = net(x + step), net(x - step)
                x = without + 4.0 * (with_prompt - without)
            results.append(x)
        assert torch.equal(*results)
        assert offloaded.stats().passes == 6
        offloaded.disable()
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("shared", [True, False])
def test_two_models_interleaved(shared: bool, size: int) -> None:
    """A B A B, with one pool of slots and with two (no public report of a fault)."""

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        a = frozen(Toy([Block() for _ in range(3)]))
        b = frozen(OrderedToy([WideBlock(), Block(), WideBlock(), Block()], (3, 0, 1, 2)))
        twins = twin(a), twin(b)
        group = dist.group.WORLD if size > 1 else None
        backend = PoisonBackend(0)
        if shared:
            offloads = [dlo.offload([a, b], device=backend, group=group)]
        else:
            offloads = [dlo.offload(m, device=backend, group=group) for m in (a, b)]
        for seed in range(4):
            x = y = inputs(seed + rank)
            for model, reference in zip((a, b), twins, strict=True):
                x, y = model(x), reference(y)
                assert torch.equal(x, y)
        for offloaded in offloads:
            offloaded.disable()
        return torch.equal(a(inputs()), twins[0](inputs()))

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_a_model_that_another_one_runs_inside_its_own_forward() -> None:
    """Outside of the blocks this is allowed when each has slots of its own (no public report)."""

    class Outer(Toy):
        def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
            """Run the other model first."""
            return super().forward(vars(self)["other"](x), skip)

    torch.manual_seed(0)
    outer, inner = frozen(Outer([Block() for _ in range(3)])), make_toy(3, seed=1)
    references = twin(outer), twin(inner)
    vars(outer)["other"], vars(references[0])["other"] = inner, references[1]
    dlo.offload(outer, device=PoisonBackend())
    dlo.offload(inner, device=PoisonBackend())
    for seed in range(3):
        assert torch.equal(outer(inputs(seed)), references[0](inputs(seed)))
