"""The model of several ranks: whole requests, or one request whose tokens the ranks divide."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_core.bench.model import Block, SyntheticTransformer, inputs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from dlo_core.bench.launch import Member
    from dlo_core.bench.model import Shape

__all__ = ["arguments", "make_model"]


class _UlyssesBlock(Block):
    """Attention over the tokens of all ranks: each has all of them for some of the heads."""

    group: ProcessGroup | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Exchange, attend and exchange back."""
        heads = self._to_heads(torch.cat((q, k, v)))
        return self._to_tokens(super().attend(*heads.chunk(3)))

    def _to_heads(self, x: Tensor) -> Tensor:
        """Turn all heads of some tokens into some heads of all tokens."""
        size = dist.get_world_size(self.group)
        parts = x.unflatten(1, (size, -1)).transpose(0, 1).contiguous()
        return self._exchange(parts).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _to_tokens(self, x: Tensor) -> Tensor:
        """Undo ``_to_heads``."""
        size = dist.get_world_size(self.group)
        parts = x.unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        return self._exchange(parts).transpose(0, 1).flatten(1, 2)

    def _exchange(self, parts: Tensor) -> Tensor:
        out = torch.empty_like(parts)
        dist.all_to_all_single(out, parts, group=self.group)
        return out


class _UlyssesTransformer(SyntheticTransformer):
    """The same weights, sequence parallel."""

    block_class: ClassVar[type[Block]] = _UlyssesBlock


def make_model(shape: Shape, parallel: str, group: ProcessGroup | None) -> SyntheticTransformer:
    """Return a model on meta.

    Args:
        shape: Of the model.
        parallel: ``"dp"``: every rank has a request of its own; ``"sp"``: they divide the tokens of
            one.
        group: Of the exchanges of ``"sp"``.
    """
    kind = _UlyssesTransformer if parallel == "sp" else SyntheticTransformer
    with torch.device("meta"):
        model: nn.Module = kind(shape).to(getattr(torch, shape.dtype))
    assert isinstance(model, SyntheticTransformer)
    for block in model.blocks:
        if isinstance(block, _UlyssesBlock):
            block.group = group
    return model


def arguments(member: Member, shape: Shape, tokens: int, parallel: str) -> tuple[Tensor, Tensor]:
    """Return the arguments of this rank's forward over so many tokens of its own."""
    x, time = inputs(shape, tokens, member.backend.device, seed=member.rank)
    if parallel == "sp":
        # One request has one time.
        time = inputs(shape, tokens, member.backend.device)[1]
    return x, time
