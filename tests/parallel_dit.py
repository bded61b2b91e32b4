"""A small diffusion transformer that really is parallel: Ulysses, TP by DTensors, fully_shard.

Sequence parallelism is an all-to-all before and after each block's attention, from a part of the
sequence with all heads to the whole sequence with a part of the heads, and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn

# Imported here, with _dynamo that they need, and not in every forked rank: it takes two seconds.
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dlo_core as dlo

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

__all__ = [
    "HEADS",
    "NUM_BLOCKS",
    "TOKENS",
    "ParallelDiT",
    "made_topology",
    "make_dit",
    "make_latent",
    "tp_style",
]

WIDTH = 64
HEADS = 8
TOKENS = 16
NUM_BLOCKS = 5
_HEAD = WIDTH // HEADS


class _Swap:
    """The all-to-all of one sequence-parallel group; nothing where there is none."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)

    def heads_for_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Turn (batch, some tokens, heads, width) into (batch, tokens, some heads, width)."""
        if self.size == 1:
            return x
        batch, tokens, heads, width = x.shape
        parts = x.view(batch, tokens, self.size, heads // self.size, width)
        got = self._exchange(parts.permute(2, 0, 1, 3, 4).contiguous())
        return got.permute(1, 0, 2, 3, 4).reshape(batch, tokens * self.size, -1, width)

    def tokens_for_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Undo ``heads_for_tokens``."""
        if self.size == 1:
            return x
        batch, tokens, heads, width = x.shape
        parts = x.view(batch, self.size, tokens // self.size, heads, width)
        got = self._exchange(parts.permute(1, 0, 2, 3, 4).contiguous())
        return got.permute(1, 2, 0, 3, 4).reshape(batch, tokens // self.size, -1, width)

    def _exchange(self, parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self.group)
        return out


class DiTBlock(nn.Module):
    """Attention and MLP with a scale from the timestep."""

    def __init__(self, swap: _Swap) -> None:
        super().__init__()
        self.swap = swap
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mod = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return x plus attention plus MLP."""
        a, b = self.mod(t)[:, None].chunk(2, dim=-1)
        y = self.norm1(x) * (1 + a)
        q, k, v = (
            self.swap.heads_for_tokens(part.unflatten(-1, (-1, _HEAD)))
            for part in (self.q(y), self.k(y), self.v(y))
        )
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / _HEAD**0.5
        y = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
        x = x + self.proj(self.swap.tokens_for_heads(y).flatten(2))
        out: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm2(x) * (1 + b))))
        return out


class ParallelDiT(nn.Module):
    """Takes the whole latent on every rank of a sequence-parallel group, returns its part."""

    dlo_blocks = ("blocks",)

    def __init__(self, sp: ProcessGroup | None) -> None:
        super().__init__()
        self.swap = _Swap(sp)
        self.embed = nn.Linear(8, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.position = nn.Parameter(torch.randn(TOKENS, WIDTH))
        self.blocks = nn.ModuleList(DiTBlock(self.swap) for _ in range(NUM_BLOCKS))
        self.out = nn.Linear(WIDTH, 8)

    def forward(self, latent: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Return the prediction for this rank's tokens."""
        part = 0 if self.swap.group is None else dist.get_rank(self.swap.group)
        x = (self.embed(latent) + self.position).chunk(self.swap.size, dim=1)[part]
        t = self.time(t[:, None])
        for block in self.blocks:
            x = block(x, t)
        out: torch.Tensor = self.out(x)
        return out


def tp_style() -> dict[str, Any]:
    """Return how ``parallelize_module`` cuts a block."""
    rows: dict[str, Any] = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    return rows | {name: RowwiseParallel() for name in ("proj", "down")}


def make_dit(
    sp: ProcessGroup | None = None,
    tp: DeviceMesh | None = None,
    hsdp: DeviceMesh | None = None,
    *,
    seed: int = 0,
) -> ParallelDiT:
    """Return a seeded, frozen model that is parallel in these ways."""
    torch.manual_seed(seed)
    model = ParallelDiT(sp).requires_grad_(False).eval()
    if tp is not None:
        for block in model.blocks:
            parallelize_module(block, tp, tp_style())
    if hsdp is not None:
        for block in model.blocks:
            fully_shard(block, mesh=hsdp)
        fully_shard(model, mesh=hsdp)
    return model


def made_topology(**sizes: Any) -> dlo.Topology:
    """Return a topology of these sizes, once all ranks are connected.

    A rank that is done at once would close connections that a peer is still making.
    """
    topology = dlo.Topology.from_sizes(device_type="cpu", **sizes)
    dist.barrier()
    return topology


def make_latent(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch of two latents with their timesteps."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(2, TOKENS, 8, generator=gen), torch.rand(2, generator=gen)
