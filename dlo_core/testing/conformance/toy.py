"""The toy: a small model with awkward weights, to run the whole engine on."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["ToyModel", "batch", "state_of"]

WIDTH = 16


class _Block(nn.Module):
    """Weights of several sizes, dtypes and strides; a tie, a 0-dim and an empty tensor."""

    mask: torch.Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        # Blocks of different sizes share the slots.
        inner = WIDTH * (1 + number % 3) + number
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.turned = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
        self.again = self.turned
        self.scale = nn.Parameter(torch.tensor(0.5 + number / 8))
        self.low = nn.Parameter(torch.rand(WIDTH).to(torch.bfloat16))
        self.shift = nn.Parameter(torch.randint(0, 9, (WIDTH,)).to(torch.int16), False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use every weight."""
        y = self.down(torch.relu(self.up(x))) * self.scale + x @ self.turned + x @ self.again.t()
        y = y * self.low.float() + self.shift * self.mask + self.empty.sum()
        out: torch.Tensor = x + y / WIDTH
        return out


class ToyModel(nn.Module):
    """Linear, blocks, Linear; frozen, the same for the same seed."""

    dlo_blocks = ("blocks",)

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        """Make it on the host.

        Args:
            num_blocks: Number of blocks.
            seed: Of the weights.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.pre = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(_Block(number) for number in range(num_blocks))
            self.post = nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        x = self.pre(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.post(x)
        return out


def batch(device: torch.device, seed: int = 0) -> torch.Tensor:
    """Return a batch of five on ``device``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, WIDTH, generator=generator).to(device)


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what must be as it was after ``disable()``: objects, forms and bits."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        name: (id(t), t.dtype, t.shape, t.stride(), t.device, t.flatten().tolist())
        for name, t in tensors
    }
