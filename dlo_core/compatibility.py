"""Compatibility: whether a model that others made parallel can be offloaded as it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.dtensor import check_apart, is_dtensor
from dlo_core.errors import ConfigError
from dlo_core.fsdp import check_prefetch, find_managed
from dlo_core.slicing import Slicing

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from dlo_core.slicing import TpPlan

__all__ = ["check_parallel"]


def check_parallel(
    model: nn.Module,
    *,
    members: Collection[int],
    stored: bool,
    tp_plan: TpPlan | None,
    tp: tuple[int, int],
) -> Slicing | None:
    """Return how the checkpoint is cut for this rank; None: not at all.

    Args:
        model: May hold DTensors of tensor parallelism, or be managed by ``fully_shard``.
        members: Global ranks of the shard group in gather mode; none in rank-local mode.
        stored: Whether its weights come from a checkpoint.
        tp_plan: What the caller says about the cuts.
        tp: Rank in the TP group, and its size.

    Raises:
        ConfigError: The combination is rejected; holds the reason and the remedy.
    """
    name = type(model).__name__
    managed = find_managed(model)
    if managed:
        if len(members) > 1:
            raise ConfigError(
                f"{name} is managed by fully_shard: HSDP has sharded its parameters already, and "
                "dlo's all-gather would shard them a second time; pass use_allgather=False, or "
                "leave fully_shard() out"
            )
        if stored:
            raise ConfigError(
                f"{name} is managed by fully_shard, and checkpoint= would bypass the loader that "
                "knows its shards; load it the ordinary way and call offload() without checkpoint="
            )
        check_prefetch(model)
    else:
        check_apart(model, members)
    if tp_plan is not None and not stored:
        raise ConfigError("tp_plan= says how checkpoint= is cut, and there is no checkpoint=")
    if not stored:
        return None
    if tp_plan is not None:
        return Slicing(tp_plan, rank=tp[0], size=tp[1])
    cut = any(is_dtensor(parameter) for parameter in model.parameters())
    if cut or tp[1] > 1:
        raise ConfigError(
            f"{name} is tensor-parallel, and checkpoint= would bypass its TP-aware loader: which "
            "part of each tensor a rank needs is not in the checkpoint. Load the model the "
            "ordinary way and call offload() without checkpoint=, or say how to cut with tp_plan="
        )
    return None
