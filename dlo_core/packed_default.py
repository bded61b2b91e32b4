"""The default of ``packed``: weights are packed where that is faster and costs nothing promised.

[Note: by default]
Packed weights compute in one block's memory more, and a change of form is a stop of seconds. So
without being asked dlo looks late, when a run has shown that it is a long one; and not at all where
the memory is counted, where ranks would have to stop together, or where the host memory is not this
rank's own. The block's memory is taken only where a tenth of the device is left beside it, and
given back when a pass runs out of memory. A pass that is captured ends the choice. What packed
shards cannot do is done raw: see [Note: making way] in packed_choice.py.

Packed, every tensor begins at a chunk. So the shards are laid out like that from the beginning, but
only where this adds next to nothing.

Who wants more asks: ``packed="auto"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dlo_core.config import MOST_AUTO
from dlo_core.layout import BlockLayout
from dlo_core.packed_format import CHUNK_NBYTES
from dlo_core.plan import with_layouts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.config import OffloadConfig
    from dlo_core.interface import Backend
    from dlo_core.plan import ModelPlan

__all__ = ["OWN_TIERS", "may_choose", "ready_to_pack"]

# Of so many bytes chunks may add one.
_LEAST_ADDED = 1000

OWN_TIERS = ("pinned", "pageable")
"""Kinds of host memory in which weights can change their form."""


def may_choose(config: OffloadConfig, backend: Backend, *, gathers: bool) -> bool:
    """Return whether nobody has said anything that a choice would go against.

    Args:
        config: The settings.
        backend: Of the device.
        gathers: Whether the weights are sharded over a group.
    """
    return (
        config.packed is None
        and not gathers
        and backend.has_codec()
        and config.device_budget_bytes is None
        and config.host in (None, *OWN_TIERS)
        and 0 < config.time_every <= MOST_AUTO
    )


def ready_to_pack(plans: Sequence[ModelPlan], alignment: int) -> list[ModelPlan] | None:
    """Return raw plans whose tensors begin at chunks, as those do that may come to be packed.

    Args:
        plans: Of all models, raw, on one rank.
        alignment: Of the device, in bytes.

    Returns:
        None: there is nothing to pack, or chunks would add more than a thousandth; or there are
        several models, of which one would decide for all.
    """
    if len(plans) > 1:
        return None
    specs = [spec for plan in plans for layout in plan.layouts for spec in layout.tensors]
    if not any(spec.dtype is torch.bfloat16 for spec in specs):
        return None
    step = max(alignment, CHUNK_NBYTES)
    made = [
        with_layouts(
            plan,
            [BlockLayout.pack(each.name, each.tensors, step) for each in plan.layouts],
            alignment=step,
        )
        for plan in plans
    ]
    before, after = (
        max(sum(cut.nbytes for plan in each for cut in plan.shards), 1) for each in (plans, made)
    )
    return made if after - before <= before // _LEAST_ADDED else None
