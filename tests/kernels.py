"""A model whose passes are programs: for the simulated device, whose host runs ahead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Program"]


class Kernel(nn.Module):
    """A block of one matrix and one vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.bias = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what no other block returns."""
        return torch.addmm(self.bias, x, self.weight).tanh()


class Program(nn.Module):
    """Blocks that run as each call says."""

    dlo_blocks = ("blocks",)

    def __init__(self, n: int, seed: int = 0, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Kernel(width) for _ in range(n))
        self.scale = nn.Parameter(torch.rand(width))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor, calls: Sequence[int] | None = None) -> torch.Tensor:
        """Run the blocks of ``calls``, all by default; a negative number raises."""
        for number in range(len(self.blocks)) if calls is None else calls:
            if number < 0:
                raise ArithmeticError("the program says so")
            x = self.blocks[number](x)
        return x * self.scale
