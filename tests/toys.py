"""Toys: small models with awkward parts, and ways to compare an offloaded one with its twin."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.rawbytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AwkwardBlock",
    "Block",
    "OrderedToy",
    "Toy",
    "WideBlock",
    "assert_restored",
    "inputs",
    "make_toy",
    "snapshot",
    "twin",
]

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


def make_toy(n: int = 4, seed: int = 0, dtype: torch.dtype | None = None) -> Toy:
    """Return a toy of ``n`` blocks, every one different, all seeded; frozen."""
    torch.manual_seed(seed)
    model = Toy([Block() for _ in range(n)]).requires_grad_(False).eval()
    return model if dtype is None else model.to(dtype)


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
        assert (
            not {"__call__", "_apply", "compile", "forward", "_dlo_offload"} & vars(module).keys()
        )
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
