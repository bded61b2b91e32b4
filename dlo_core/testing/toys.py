"""Toys: small models with awkward parts, and ways to compare an offloaded one with its twin.

``TOYS`` has one of each kind: blocks of several sizes and dtypes (fp8, bool, uint16, complex,
0-dim, empty), transposed and channels-last strides, ties, buffers above 1 MiB, a run order of its
own, blocks that are called twice or inside of each other. Each may skip blocks. Making one seeds
torch's generator.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from dlo_core.rawbytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "TOYS",
    "WIDTH",
    "AwkwardBlock",
    "Block",
    "NestedToy",
    "OrderedToy",
    "OuterBlock",
    "PortableBlock",
    "Toy",
    "WideBlock",
    "assert_restored",
    "inputs",
    "make_mixed_toy",
    "make_portable_toy",
    "make_toy",
    "same_bits",
    "snapshot",
    "twin",
]

M = TypeVar("M", bound=nn.Module)
WIDTH = 8


class Block(nn.Module):
    """LayerNorm, Linear, residual."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return x plus its transform."""
        out: torch.Tensor = x + self.linear(self.norm(x)) * scale
        return out


class WideBlock(nn.Module):
    """A block five times as large."""

    def __init__(self, width: int = WIDTH, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(width, 5 * width, dtype=dtype)
        self.down = nn.Linear(5 * width, width, dtype=dtype)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return x plus its transform."""
        out: torch.Tensor = x + self.down(self.up(x).relu()) * scale
        return out


class AwkwardBlock(nn.Module):
    """Odd dtypes, 0-dim and empty tensors, transposed strides, a tie, small and large buffers."""

    mask: torch.Tensor
    table: torch.Tensor
    steps: torch.Tensor

    def __init__(self, width: int = WIDTH, seed: int = 0, large: int = 270_000) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        rand = torch.rand(width, width, generator=gen)
        frozen = {"requires_grad": False}
        self.weight = nn.Parameter(rand.t())
        self.again = self.weight
        self.scale = nn.Parameter(torch.tensor(1.0 + seed / 7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.low = nn.Parameter(rand.to(torch.float8_e4m3fn), **frozen)
        self.brain = nn.Parameter(rand[0].bfloat16(), **frozen)
        self.keep = nn.Parameter(rand[1] > 0.3, **frozen)
        self.shift = nn.Parameter((rand[2] * 9).to(torch.uint16), **frozen)
        self.wave = nn.Parameter(torch.complex(rand[3], rand[4]), **frozen)
        self.conv = nn.Parameter(
            torch.rand(2, 3, 2, 2, generator=gen).to(memory_format=torch.channels_last)
        )
        self.register_buffer("mask", rand[5] > 0.1)
        self.register_buffer("table", torch.rand(large, generator=gen))
        self.register_buffer("steps", torch.tensor(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every tensor."""
        y = x @ self.weight + x @ self.again.t() * self.scale
        y = y + self.low.float().mean(0) + self.brain.float() * self.keep
        y = y + self.shift.to(torch.int32) * self.mask + self.wave.real * self.conv.sum()
        y = y + self.table[:: len(self.table) // WIDTH][:WIDTH] + self.steps + self.empty.sum()
        return x + y / 50


class PortableBlock(nn.Module):
    """Awkward as far as every device computes with it: sizes that differ, a tie, odd dtypes."""

    mask: torch.Tensor

    def __init__(self, number: int = 0, width: int = WIDTH) -> None:
        """Draw the weights from torch's generator.

        Args:
            number: The sizes follow from it, so that blocks of different sizes share the slots.
            width: Of the activations.
        """
        super().__init__()
        inner = width * (1 + number % 3) + number
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)
        self.turned = nn.Parameter(torch.rand(width, width).t())
        self.again = self.turned
        self.scale = nn.Parameter(torch.tensor(0.5 + number / 8))
        self.low = nn.Parameter(torch.rand(width).to(torch.bfloat16))
        self.shift = nn.Parameter(torch.randint(0, 9, (width,)).to(torch.int16), False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.rand(width) > 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every weight."""
        y = self.down(torch.relu(self.up(x))) * self.scale + x @ self.turned + x @ self.again.t()
        y = y * self.low.float() + self.shift * self.mask + self.empty.sum()
        out: torch.Tensor = x + y / x.shape[-1]
        return out


class OuterBlock(nn.Module):
    """A block inside of which another one may be called; its weights are used before and after."""

    def __init__(self, width: int = WIDTH) -> None:
        """Draw the weights from torch's generator."""
        super().__init__()
        self.down = nn.Linear(width, width)
        self.up = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, inner: nn.Module | None = None) -> torch.Tensor:
        """Return x plus its transform."""
        y = self.down(x)
        if inner is not None:
            y = inner(y)
        out: torch.Tensor = x + self.up(y)
        return out


class Toy(nn.Module):
    """Linear, blocks in order, Linear; some blocks may be skipped by number."""

    dlo_blocks = ("blocks",)
    position: torch.Tensor

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.pre = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.post = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(WIDTH))
        self.register_buffer("position", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks that are not skipped."""
        x = self.pre(x) + self.table + self.position
        for number, block in enumerate(self.blocks):
            if number not in skip:
                x = block(x)
        out: torch.Tensor = self.post(x)
        return out


class OrderedToy(Toy):
    """Runs its blocks in an order of its own."""

    def __init__(self, blocks: Sequence[nn.Module], order: Sequence[int]) -> None:
        super().__init__(blocks)
        self.order = list(order)

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run the blocks in ``self.order``."""
        x = self.pre(x) + self.table + self.position
        for number in self.order:
            if number not in skip:
                x = self.blocks[number](x)
        out: torch.Tensor = self.post(x)
        return out


class NestedToy(Toy):
    """Calls every second block from inside of the one before it."""

    def __init__(self, num_pairs: int) -> None:
        """Make ``2 * num_pairs`` blocks."""
        super().__init__([OuterBlock() for _ in range(2 * num_pairs)])

    def forward(self, x: torch.Tensor, skip: Sequence[int] = ()) -> torch.Tensor:
        """Run the pairs whose outer block is not skipped."""
        x = self.pre(x) + self.table + self.position
        for number in range(0, len(self.blocks), 2):
            if number not in skip:
                inner = None if number + 1 in skip else self.blocks[number + 1]
                x = self.blocks[number](x, inner)
        out: torch.Tensor = self.post(x)
        return out


def make_toy(n: int = 4, seed: int = 0, dtype: torch.dtype | None = None) -> Toy:
    """Return a toy of ``n`` plain blocks, every one different; frozen, the same for one seed."""
    model = _seeded(lambda: Toy([Block() for _ in range(n)]), seed)
    return model if dtype is None else model.to(dtype)


def make_portable_toy(n: int = 4, seed: int = 0) -> Toy:
    """Return a toy of ``n`` blocks that are awkward, and that every device computes with."""
    return _seeded(lambda: Toy([PortableBlock(number) for number in range(n)]), seed)


def make_mixed_toy(n: int = 4, seed: int = 0) -> Toy:
    """Return a toy of ``n`` blocks of three kinds, one of them with all that is awkward."""

    def block(number: int) -> nn.Module:
        return (AwkwardBlock(seed=seed + number), WideBlock(), Block())[number % 3]

    return _seeded(lambda: Toy([block(number) for number in range(n)]), seed)


def _seeded(make: Callable[[], M], seed: int) -> M:
    torch.manual_seed(seed)
    return make().requires_grad_(False).eval()


def _ordered(order: Sequence[int]) -> OrderedToy:
    blocks = [Block() if number % 2 else WideBlock() for number in range(1 + max(order))]
    return OrderedToy(blocks, order)


# One of each kind; all are called with (x, skip=()), where skip has numbers of blocks.
TOYS: dict[str, Callable[[], Toy]] = {
    "plain": lambda: make_toy(5),
    "portable": lambda: make_portable_toy(5),
    "mixed": lambda: make_mixed_toy(5),
    "one block": lambda: make_toy(1),
    "run order of its own": lambda: _seeded(lambda: _ordered((2, 0, 4, 1, 3)), 0),
    "called twice at once": lambda: _seeded(lambda: _ordered((0, 1, 1, 2, 3)), 0),
    "called twice": lambda: _seeded(lambda: _ordered((0, 1, 2, 0, 3)), 0),
    "called inside another": lambda: _seeded(lambda: NestedToy(2), 0),
}


def twin(model: nn.Module) -> nn.Module:
    """Return an untouched copy to compare with."""
    return copy.deepcopy(model)


def inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a batch of three."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(3, WIDTH, generator=gen).to(dtype)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return what ``assert_restored`` compares."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (id(t), t.dtype, t.stride(), t.requires_grad, t.detach().clone())
        for name, t in tensors
    }


def assert_restored(model: nn.Module, before: dict[str, Any]) -> None:
    """Check objects, dtypes, strides, flags and bits against a snapshot; no hook may stay."""
    after = snapshot(model)
    assert after.keys() == before.keys()
    for name, (identity, dtype, stride, grad, value) in before.items():
        got = after[name]
        assert got[:4] == (identity, dtype, stride, grad), name
        assert same_bits(got[4], value), name
    for module in model.modules():
        assert module._compiled_call_impl is None
        ours = {"__call__", "_apply", "compile", "forward", "_dlo_offload"}
        assert not ours & vars(module).keys()
        assert not module._load_state_dict_pre_hooks
        assert not module._state_dict_pre_hooks


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have equal bytes (NaN equals NaN; every dtype)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.numel() == 0:
        return True
    a, b = (t.detach().clone(memory_format=torch.contiguous_format) for t in (a, b))
    return torch.equal(*(bytes_of(t, t.nbytes) for t in (a, b)))
