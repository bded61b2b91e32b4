"""The public functions: ``offload()``, which makes and enables an offload, and ``offloaded()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlo_core.config import OffloadConfig
from dlo_core.errors import ConfigError
from dlo_core.hooks import offload_of
from dlo_core.layerwise import LayerwiseOffload
from dlo_core.shard_group import ShardGroup

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from dlo_core.interface import Backend
    from dlo_core.request import (
        Blocks,
        Checkpoints,
        KeyMaps,
        PostLoads,
        Progress,
        TransformsEach,
    )
    from dlo_core.shard_group import Group
    from dlo_core.slicing import TpPlan
    from dlo_core.topology import Topology

__all__ = ["offload", "offloaded"]


def offload(
    model: nn.Module | Sequence[nn.Module],
    *,
    device: str | torch.device | Backend,
    group: Group | None = None,
    topology: Topology | None = None,
    checkpoint: Checkpoints = None,
    blocks: Blocks = None,
    tp_plan: TpPlan | None = None,
    key_map: KeyMaps = None,
    transforms: TransformsEach = None,
    post_load: PostLoads = None,
    progress: Progress = False,
    reuse: LayerwiseOffload | None = None,
    **settings: Any,
) -> LayerwiseOffload:
    """Offload a model, or several that share their slots; see ``LayerwiseOffload``.

    Args:
        model: The model, or a sequence of models.
        device: A device, or a backend.
        group: The ranks that shard the weights; None: this process alone.
        topology: The parallel groups of the job, from which the shard group follows; instead of
            ``group``.
        checkpoint: As in ``enable``.
        blocks: As in ``enable``.
        tp_plan: As in ``enable``.
        key_map: As in ``enable``.
        transforms: As in ``enable``.
        post_load: As in ``enable``.
        progress: As in ``enable``.
        reuse: As in ``enable``.
        **settings: Those of ``OffloadConfig``.

    Raises:
        DloError: As the constructor and ``enable`` do; on every rank, and the models are as they
            were.
    """
    try:
        config = OffloadConfig.of(settings)
    except ConfigError as error:
        _refuse_together(group, topology, settings, error)
        raise
    made = LayerwiseOffload(config, device=device, group=group, topology=topology)
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    try:
        return made.enable(
            *models,
            checkpoint=checkpoint,
            blocks=blocks,
            tp_plan=tp_plan,
            key_map=key_map,
            transforms=transforms,
            post_load=post_load,
            progress=progress,
            reuse=reuse,
        )
    except BaseException:
        made.shutdown()
        raise


def offloaded(model: nn.Module) -> LayerwiseOffload | None:
    """Return the offload that ``model`` is under, or None."""
    found = offload_of(model)
    return found if isinstance(found, LayerwiseOffload) else None


def _refuse_together(
    group: Group | None,
    topology: Topology | None,
    settings: dict[str, Any],
    error: ConfigError,
) -> None:
    """Tell the other ranks, which are on their way to the first vote, of a bad setting here."""
    gathers = settings.get("use_allgather") is not False
    within = "node" if gathers and settings.get("shard_within") == "node" else None
    host = "shared" if not gathers and settings.get("host") == "shared" else None
    config = OffloadConfig(use_allgather=gathers, shard_within=within, host=host)
    try:
        shard_group = ShardGroup.of(config, group, topology)
    except ConfigError:
        # It is rejected on every rank, so nobody waits.
        return
    shard_group.compare(config.load_timeout_s)
    agreement = shard_group.meet(config.load_timeout_s)
    try:
        agreement.vote(error, "offload()")
    finally:
        agreement.close()
