"""The all-gather under the name that the installed torch has for it."""

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


def release_group(group: ProcessGroup | None) -> None:
    """Destroy a group of ours; do nothing when torch.distributed took it down before."""
    if group is not None and dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
