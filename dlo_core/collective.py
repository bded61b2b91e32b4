"""The all-gather under the name that the installed torch has for it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dlo_core.interface import Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

__all__ = ["LoneCollective", "all_gather_bytes", "new_group_of", "release_group"]

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


def new_group_of(group: ProcessGroup, comm_library: str, timeout_s: float) -> ProcessGroup:
    """Return a new process group of the ranks of ``group``, on which only dlo talks.

    Every rank of ``group`` must call this at the same point; no other rank has to.

    Args:
        group: The caller's group; it says who takes part and never carries our traffic.
        comm_library: Name of the ``torch.distributed`` backend.
        timeout_s: Seconds after which an operation of the new group gives up.
    """
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timedelta(seconds=timeout_s),
        backend=comm_library,
        use_local_synchronization=True,
    )
    if not isinstance(made, dist.ProcessGroup):
        raise TypeError(f"torch.distributed.new_group returned {made!r} to a member of the group")
    return made


def release_group(group: ProcessGroup | None) -> None:
    """Destroy a group of ours; do nothing when torch.distributed took it down before."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
