"""The public functions: ``offload()``, which makes and enables an offload, and ``offloaded()``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlo_core.config import OffloadConfig
from dlo_core.errors import ConfigError
from dlo_core.hooks import offload_of
from dlo_core.layerwise import LayerwiseOffload, agreement_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from dlo_core.interface import Backend
    from dlo_core.layerwise import Group
    from dlo_core.startup import (
        Blocks,
        Checkpoints,
        KeyMaps,
        PostLoads,
        Progress,
        TransformsEach,
    )

__all__ = ["offload", "offloaded"]


def offload(
    model: nn.Module | Sequence[nn.Module],
    *,
    device: str | torch.device | Backend,
    group: Group | None = None,
    checkpoint: Checkpoints = None,
    blocks: Blocks = None,
    key_map: KeyMaps = None,
    transforms: TransformsEach = None,
    post_load: PostLoads = None,
    progress: Progress = False,
    **settings: Any,
) -> LayerwiseOffload:
    """Offload a model, or several that share their slots; see ``LayerwiseOffload``.

    Args:
        model: The model, or a sequence of models.
        device: A device, or a backend.
        group: The ranks that shard the weights; None: this process alone.
        checkpoint: As in ``enable``.
        blocks: As in ``enable``.
        key_map: As in ``enable``.
        transforms: As in ``enable``.
        post_load: As in ``enable``.
        progress: As in ``enable``.
        **settings: Those of ``OffloadConfig``.

    Raises:
        DloError: As the constructor and ``enable`` do; on every rank, and the models are as they
            were.
    """
    try:
        config = OffloadConfig.of(settings)
    except ConfigError as error:
        _refuse_together(group, error)
        raise
    made = LayerwiseOffload(config, device=device, group=group)
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    try:
        return made.enable(
            *models,
            checkpoint=checkpoint,
            blocks=blocks,
            key_map=key_map,
            transforms=transforms,
            post_load=post_load,
            progress=progress,
        )
    except BaseException:
        made.shutdown()
        raise


def offloaded(model: nn.Module) -> LayerwiseOffload | None:
    """Return the offload that ``model`` is under, or None."""
    found = offload_of(model)
    return found if isinstance(found, LayerwiseOffload) else None


def _refuse_together(group: Group | None, error: ConfigError) -> None:
    """Tell the other ranks, which are on their way to the first vote, of a bad setting here."""
    agreement = agreement_of(group, OffloadConfig().load_timeout_s)
    try:
        agreement.vote(error, "offload()")
    finally:
        agreement.close()
