"""The all-gather under the name that the installed torch has for it, and groups of our own.

[Note: names of groups]
The ranks of a group find each other in the store under the group's name. ``new_group`` makes that
name, with local synchronisation, of the ranks and of how many groups this process has. So it gives
the name of a destroyed group again, under which the old addresses still stand ("connection
refused"), and where the ranks are in unequal numbers of groups it gives them different names and
they wait for each other for ever. It also sorts the ranks. Ours are named by count, and keep the
caller's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from dlo_core.interface import Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

__all__ = ["LoneCollective", "all_gather_bytes", "release_group"]

# torch 2.13 deprecates all_gather_into_tensor for all_gather_single.
all_gather_bytes: Callable[..., object] = getattr(
    dist, "all_gather_single", dist.all_gather_into_tensor
)


class LoneCollective(Collective):
    """The collective of one rank: the shard is the whole."""

    rank = 0
    size = 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Do nothing: ``shard`` already lies in ``out``."""

    def close(self) -> None:
        """Do nothing: there is no group."""


_made: dict[str, int] = {}


def release_group(group: ProcessGroup | None) -> None:
    """Destroy a group of ours; do nothing when torch.distributed took it down before."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
