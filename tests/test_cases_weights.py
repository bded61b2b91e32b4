"""Public faults about weights and their layout: sizes, shapes, strides, dtypes, flags, ties.

Each docstring has the address of the thread; the fault told there must not be ours.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from poison import PoisonBackend
from ranks import run_ranks
from torch import nn
from toys import (
    WIDTH,
    AwkwardBlock,
    Block,
    Toy,
    WideBlock,
    assert_restored,
    inputs,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

import dlo_core as dlo

if TYPE_CHECKING:
    from collections.abc import Callable

import torch.distributed as dist
from safetensors.torch import save_model

FP8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
PLAIN = ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float64")
DTYPES = [getattr(torch, n) for n in (*FP8, *PLAIN, "uint16", "uint32", "uint64", "complex64")]


def streams_equal(make: Callable[[], nn.Module], rank: int, group: bool, **settings: Any) -> bool:
    """Offload what ``make`` returns, compare three forwards with its twin, and restore."""
    torch.manual_seed(3)
    model = make().requires_grad_(False).eval()
    reference, before = twin(model), snapshot(model)
    shard_group = dist.group.WORLD if group else None
    offloaded = dlo.offload(model, device=PoisonBackend(), group=shard_group, **settings)
    for seed in range(3):
        x = inputs(10 * rank + seed)
        assert torch.equal(model(x), reference(x)), f"forward {seed}"
    offloaded.disable()
    assert_restored(model, before)
    return True


def on_ranks(make: Callable[[], nn.Module], size: int, **settings: Any) -> None:
    """Do the same on ``size`` ranks in gather mode, staged and in place."""

    def job(rank: int) -> bool:
        return all(streams_equal(make, rank, True, stages=s, **settings) for s in (2, 0))

    assert run_ranks(job, size) == [True] * size


def unequal() -> Toy:
    return Toy([Block(), WideBlock(), Block()])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_of_unequal_size_share_slots(size: int) -> None:
    """A gather of a small block writes size × its shard, not the whole slot.

    B01, https://github.com/vllm-project/vllm-omni/pull/5802
    """
    if size == 1:
        assert streams_equal(unequal, 0, False)
    else:
        on_ranks(unequal, size)


def test_the_largest_block_may_stand_anywhere() -> None:
    """B01, https://github.com/vllm-project/vllm-omni/pull/5802"""
    for place in range(4):
        blocks = [WideBlock() if n == place else Block() for n in range(4)]
        assert streams_equal(partial(Toy, blocks), 0, False)


class StridedBlock(nn.Module):
    """A column-major matrix, a channels-last kernel, an expanded and a gapped one."""

    def __init__(self) -> None:
        super().__init__()
        self.column = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
        self.six = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        kernel = torch.rand(2, 3, 2, 2).to(memory_format=torch.channels_last)
        self.kernel = nn.Parameter(kernel)
        self.gapped = nn.Parameter(torch.rand(WIDTH, 2 * WIDTH)[:, ::2])
        self.offset = nn.Parameter(torch.rand(3, WIDTH)[1])
        self.expanded = nn.Parameter(torch.rand(1, WIDTH).expand(4, WIDTH))
        self.seen: list[tuple[int, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every tensor and note the strides."""
        self.seen = [p.stride() for p in self.parameters()]
        y = x @ self.column + self.six.sum() + self.kernel.sum() + self.offset
        return x + (y @ self.gapped + self.expanded.sum(0)) / 9


@pytest.mark.parametrize("size", [1, 2])
def test_strides_are_kept_in_the_forward_and_after_it(size: int) -> None:
    """Values alone would not show it: a kernel that wants column-major weights asserts.

    B05, https://github.com/vllm-project/vllm-omni/pull/5988
    """

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = Toy([StridedBlock() for _ in range(3)]).requires_grad_(False)
        wanted = [p.stride() for p in model.blocks[0].parameters()]
        assert wanted[1] == (1, 3)
        reference, before = twin(model), snapshot(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(), group=group)
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            assert all(b.seen == wanted for b in model.blocks)
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


class ScalarBlock(nn.Module):
    """A learnt factor without dimensions, in fp32 and bf16, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.low = nn.Parameter(torch.tensor(0.5, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0))
        self.hollow = nn.Parameter(torch.empty(4, 0, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every tensor."""
        assert self.scale.shape == self.low.shape == ()
        out: torch.Tensor = x * self.scale / 4 + self.low + self.empty.sum() + self.hollow.sum()
        return out


@pytest.mark.parametrize("size", [1, 2, 3])
def test_scalar_and_empty_parameters_travel(size: int) -> None:
    """B07, https://github.com/pytorch/pytorch/pull/132934"""

    def make() -> Toy:
        return Toy([ScalarBlock(), Block(), ScalarBlock()])

    if size == 1:
        assert streams_equal(make, 0, False)
    else:
        on_ranks(make, size)


class SmallBlock(nn.Module):
    """One parameter of so many elements."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.rand(count).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add them up."""
        return x + self.values.float().cumsum(0).sum() / 7


@pytest.mark.parametrize(("size", "counts"), [(3, (10, 1, 100)), (4, (2, 1, 333))])
def test_sizes_that_the_group_does_not_divide_are_padded_alike(
    size: int, counts: tuple[int, ...]
) -> None:
    """Also blocks of fewer elements than ranks, where a rank holds padding only.

    B08, https://github.com/pytorch/pytorch/pull/137005
    """
    on_ranks(lambda: Toy([SmallBlock(c) for c in counts]), size)
    on_ranks(lambda: Toy([SmallBlock(c, torch.bfloat16) for c in counts]), size)


class CountingBlock(nn.Module):
    """Integer weights and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(-9, 9, (WIDTH,)).to(torch.int8), False)
        self.bytes = nn.Parameter(torch.randint(0, 9, (WIDTH,)).to(torch.uint8), False)
        self.frozen = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.free = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every tensor."""
        return x + self.codes.float() * self.frozen + self.bytes.float() * self.free


def test_requires_grad_and_integer_parameters_are_kept() -> None:
    """Flags stay on every parameter: enabled, in the forward's eyes, and after disable.

    B09, https://github.com/pytorch/pytorch/issues/177844
    """
    model = Toy([CountingBlock() for _ in range(3)])
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    assert set(flags.values()) == {True, False}
    reference, before = twin(model), snapshot(model)
    offloaded = dlo.offload(model, device=PoisonBackend())
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    offloaded.disable()
    assert_restored(model, before)


def test_requires_grad_set_while_offloaded_is_kept() -> None:
    """Freezing an offloaded model is allowed, and what was set last is what comes back.

    B09, https://github.com/pytorch/pytorch/issues/177844
    """
    model = Toy([Block() for _ in range(3)])
    offloaded = dlo.offload(model, device=PoisonBackend())
    model.requires_grad_(False)
    attrgetter("blocks.1.norm.weight")(model).requires_grad_(True)
    with torch.no_grad():
        model(inputs())
    offloaded.disable()
    free = [name for name, p in model.named_parameters() if p.requires_grad]
    assert free == ["blocks.1.norm.weight"]


def tied() -> Toy:
    model = Toy([Block() for _ in range(3)])
    first, last = model.blocks[0], model.blocks[2]
    assert isinstance(first, Block)
    assert isinstance(last, Block)
    last.linear.weight = first.linear.weight
    return model


def is_tied(model: nn.Module) -> bool:
    first, last = (attrgetter(f"blocks.{n}.linear.weight")(model) for n in (0, 2))
    return first is last


@pytest.mark.parametrize("size", [1, 2])
def test_a_parameter_tied_across_blocks_is_one_object_again(size: int) -> None:
    """B10, https://github.com/vipshop/cache-dit/pull/1111"""

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = tied().requires_grad_(False)
        reference, before = twin(model), snapshot(model)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(), group=group)
        for seed in range(3):
            assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            assert is_tied(model)
        offloaded.disable()
        assert_restored(model, before)
        assert is_tied(model)
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_a_tie_is_counted_once() -> None:
    """B10, https://github.com/vipshop/cache-dit/pull/1111"""
    untied = dlo.offload(make_toy(3), device=PoisonBackend()).footprint
    once = dlo.offload(tied(), device=PoisonBackend()).footprint
    weight = WIDTH * WIDTH * 4
    assert untied.blocks_nbytes - once.blocks_nbytes == 2 * weight
    assert once.remainder_nbytes - untied.remainder_nbytes == weight
    assert untied.host_nbytes - once.host_nbytes == 2 * weight


class TiedInside(nn.Module):
    """Two names for one weight inside of one block, and one shared with the outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use both."""
        out: torch.Tensor = x + self.b(self.a(x)) / 5
        return out


def test_a_tie_inside_a_block_streams_and_one_with_the_outside_stays() -> None:
    """B10, https://github.com/vipshop/cache-dit/pull/1111"""

    def make() -> Toy:
        model = Toy([TiedInside() for _ in range(4)])
        model.post.weight = attrgetter("blocks.3.a.weight")(model)
        return model

    assert streams_equal(make, 0, False)
    model = make()
    offloaded = dlo.offload(model, device=PoisonBackend())
    block = attrgetter("blocks.1")(model)
    assert block.a.weight is block.b.weight
    # Block 3 streams its two biases only.
    assert offloaded.stats().blocks[3].nbytes < offloaded.stats().blocks[1].nbytes


@pytest.mark.parametrize("on_meta", [False, True])
def test_a_checkpoint_that_stores_a_tie_once_is_accepted(tmp_path: Any, on_meta: bool) -> None:
    """B10, https://github.com/huggingface/accelerate/pull/2875"""
    torch.manual_seed(0)
    reference = tied().requires_grad_(False)
    save_model(reference, str(tmp_path / "tied.safetensors"))
    if on_meta:
        with torch.device("meta"):
            model = tied().requires_grad_(False)
        model.position = reference.position.clone()
    else:
        model = tied().requires_grad_(False)
    offloaded = dlo.offload(model, device=PoisonBackend(), checkpoint=tmp_path / "tied.safetensors")
    for seed in range(3):
        assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
    offloaded.disable()
    assert is_tied(model)
    assert torch.equal(model(inputs()), reference(inputs()))


class Outside(nn.Module):
    """Parameters and buffers on the top module itself, and two lists of blocks."""

    steps: torch.Tensor
    hidden: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("steps", torch.rand(WIDTH))
        self.register_buffer("hidden", torch.rand(WIDTH), persistent=False)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.single_blocks = nn.ModuleList([WideBlock() for _ in range(4)])
        self.post = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both lists."""
        x = x + self.table + self.steps + self.hidden
        for block in (*self.blocks, *self.single_blocks):
            x = block(x)
        out: torch.Tensor = self.post(x)
        return out


@pytest.mark.parametrize("size", [1, 2])
def test_two_lists_stream_and_what_hangs_on_the_top_module_stays(size: int) -> None:
    """B12, https://github.com/vllm-project/vllm-omni/pull/1486"""
    if size > 1:
        on_ranks(Outside, size, blocks=("blocks", "single_blocks"))
        return
    assert streams_equal(Outside, 0, False)  # found by the rule
    model = Outside().requires_grad_(False)
    offloaded = dlo.offload(model, device=PoisonBackend(), blocks=("blocks", "single_blocks"))
    names = [f"blocks.{n}" for n in range(3)] + [f"single_blocks.{n}" for n in range(4)]
    assert list(offloaded.blocks) == names
    assert offloaded.stats().device_bytes == offloaded.footprint.device_nbytes
    model(inputs())
    # Outside of the forward the resident ones have their values, the streamed ones do not.
    for name in ("table", "steps", "hidden", "post.weight"):
        assert torch.isfinite(attrgetter(name)(model)).all()
    with pytest.raises(dlo.UseError):
        attrgetter("single_blocks.0.up.weight")(model).sum()


class EveryDtype(nn.Module):
    """One parameter a dtype, of odd lengths, so that offsets are unlike each other."""

    def __init__(self) -> None:
        super().__init__()
        for number, dtype in enumerate(DTYPES):
            raw = torch.randint(0, 2, (dtype.itemsize * (number + 3),), dtype=torch.uint8)
            if dtype is not torch.bool:
                raw = raw * 61
            self.register_parameter(f"t{number}", nn.Parameter(raw.view(dtype), False))
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Note the bits."""
        self.seen = [p.detach().clone() for p in self.parameters()]
        return x


@pytest.mark.parametrize("size", [1, 2])
def test_every_dtype_travels_bit_for_bit(size: int) -> None:
    """One run of bytes needs no comm library that knows the dtype.

    B34, https://github.com/nvidia-cosmos/cosmos-rl/pull/722
    """

    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = Toy([EveryDtype(), Block(), EveryDtype()]).requires_grad_(False)
        reference, before = twin(model), snapshot(model)
        assert isinstance(reference, Toy)
        group = dist.group.WORLD if size > 1 else None
        offloaded = dlo.offload(model, device=PoisonBackend(), group=group)
        for _ in range(3):
            model(inputs())
            for number in (0, 2):
                seen = attrgetter(f"blocks.{number}.seen")(model)
                wanted = list(reference.blocks[number].parameters())
                assert len(seen) == len(wanted) == len(DTYPES)
                assert all(map(same_bits, seen, wanted))
        offloaded.disable()
        assert_restored(model, before)
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_awkward_blocks_mix_all_of_it_on_three_ranks() -> None:
    """B34, https://github.com/nvidia-cosmos/cosmos-rl/pull/722"""
    on_ranks(lambda: Toy([AwkwardBlock(seed=s) for s in range(3)]), 3)
