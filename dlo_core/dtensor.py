"""A DTensor's local part: what of a distributed tensor lies on this rank, and so can stream.

The local part is repointed by ``_local_tensor.data``, or a new DTensor is made over another local
part. ``DTensor.data = ...`` must never be used: torch accepts it and the forward goes on with the
old local part.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = [
    "check_apart",
    "is_dtensor",
    "is_part",
    "local_of",
    "set_local",
    "shard_groups",
    "with_local",
]

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> bool:
    """Return whether ``tensor`` is a DTensor; imports nothing, for then there is none."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(tensor, module.DTensor)


def is_part(tensor: object) -> bool:
    """Return whether this rank has but a part of ``tensor``, a DTensor or what stands for one."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return False
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return any(
        mesh.size(dim) > 1 and not placement.is_replicate()
        for dim, placement in enumerate(placements)
    )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` on this rank: a DTensor's local part, else the tensor."""
    local: torch.Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return local


def set_local(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """Let ``tensor``, or its local part, have the memory of ``values``, on its own device.

    A DTensor lies on its mesh's device, so its local part goes back there.
    """
    if is_dtensor(tensor):
        local_of(tensor).data = values.to(tensor.device)
    else:
        tensor.data = values


def with_local(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as a DTensor that is spread as ``like`` is; as it is if that is none."""
    if not is_dtensor(like):
        return local
    spread: Any = like
    made: torch.Tensor = sys.modules[_MODULE].DTensor.from_local(
        local,
        spread.device_mesh,
        spread.placements,
        run_check=False,
        shape=spread.shape,
        stride=spread.stride(),
    )
    return made


def shard_groups(tensor: torch.Tensor) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each dimension along which a DTensor is cut, and the global ranks that have its parts.

    Raises:
        ConfigError: It is a partial sum, or cut in a way that dlo does not know.
    """
    spread: Any = tensor
    for mesh_dim, placement in enumerate(spread.placements):
        if placement.is_replicate():
            continue
        if not placement.is_shard():
            raise ConfigError(f"a parameter is a DTensor with the placement {placement!r}")
        group = spread.device_mesh.get_group(mesh_dim)
        yield int(placement.dim), tuple(dist.get_process_group_ranks(group))


def check_apart(model: nn.Module, members: Collection[int]) -> None:
    """Refuse parameters whose parts lie on several ranks of one shard group.

    Args:
        model: Its parameters may be DTensors.
        members: Global ranks of the shard group.

    Raises:
        ConfigError: Names the parameter and the ranks.
    """
    for name, parameter in model.named_parameters():
        if not is_dtensor(parameter):
            continue
        for _, ranks in shard_groups(parameter):
            both = sorted(set(ranks) & set(members))
            if len(both) > 1:
                raise ConfigError(
                    f"{name!r} is cut by tensor parallelism over the ranks {list(ranks)}, and "
                    f"{both} of them would share one shard group; TP is never dlo's group, for "
                    "its ranks hold different weights: pass topology= with the DP or SP group, or "
                    "use_allgather=False"
                )
