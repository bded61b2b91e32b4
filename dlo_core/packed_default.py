"""The default of ``packed``: weights are packed where that is faster and costs nothing promised.

[Note: by default]
Packed weights compute in one block's memory more, and a change of form is a stop of seconds. So
without being asked dlo looks late, when a run has shown that it is a long one; and not at all where
the memory is counted, where ranks would have to stop together, or where the host memory is not this
rank's own. A pass that is captured ends the choice. Who wants more asks: ``packed="auto"``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dlo_core.config import MOST_AUTO

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlo_core.config import OffloadConfig
    from dlo_core.interface import Backend
    from dlo_core.layout import BlockLayout

__all__ = ["OWN_TIERS", "has_bf16", "settle_packed"]

OWN_TIERS = ("pinned", "pageable")
"""Kinds of host memory in which weights can change their form."""


def settle_packed(config: OffloadConfig, backend: Backend, *, gathers: bool) -> OffloadConfig:
    """Return the settings with ``packed=None`` made ``"auto"`` or False.

    Args:
        config: The settings.
        backend: Of the device.
        gathers: Whether the weights are sharded over a group.
    """
    if config.packed is not None:
        return config
    may = (
        not gathers
        and backend.has_codec()
        and config.device_budget_bytes is None
        and config.host in (None, *OWN_TIERS)
        and 0 < config.time_every <= MOST_AUTO
    )
    return replace(config, packed="auto" if may else False)


def has_bf16(layouts: Iterable[BlockLayout]) -> bool:
    """Return whether any weight is of the dtype that packing is for."""
    return any(spec.dtype is torch.bfloat16 for layout in layouts for spec in layout.tensors)
