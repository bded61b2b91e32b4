"""The all-gather under the name that the installed torch has for it, and the ends of groups.

[Note: the last reference]
Whoever drops the last reference to an accelerator's group holds the interpreter, and the group's
destructor waits for the group's own watchdog. Where a gather failed, that thread prints where the
gather was called, for which it needs the interpreter: the process would hang. So a group of which
a gather failed is kept until the process ends, when nothing of it is destructed either.
"""

from __future__ import annotations

import atexit
import ctypes
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dlo_core.interface import Collective

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

__all__ = [
    "GroupGone",
    "LoneCollective",
    "abandon",
    "abort_group",
    "all_gather_bytes",
    "living",
    "release_group",
]

# torch 2.13 deprecates all_gather_into_tensor for all_gather_single; a release has either or both.
_ALL_GATHER = next(
    name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)
)
all_gather_bytes: Callable[..., object] = getattr(dist, _ALL_GATHER)


class GroupGone(RuntimeError):
    """Raised when a group of dlo's own was taken down under it."""


class LoneCollective(Collective):
    """The collective of one rank: the shard is the whole."""

    rank = 0
    size = 1

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Do nothing: ``shard`` already lies in ``out``."""

    def close(self) -> None:
        """Do nothing: there is no group."""


def living(group: ProcessGroup | None) -> ProcessGroup:
    """Return ``group``, unless it is closed or torch.distributed took it down.

    Without this a gather over None would run on the job's default group, and gloo's would go on
    over a group that was destroyed.

    Raises:
        GroupGone: It is.
    """
    if group is None or not _is_known(group):
        raise GroupGone(
            "the process group of the weights is gone (destroy_process_group() was called, or the "
            "offload was closed)"
        )
    return group


def release_group(group: ProcessGroup | None) -> None:
    """Destroy a group of ours; do nothing when torch.distributed took it down before."""
    if group is not None and _is_known(group):
        dist.destroy_process_group(group)


def abort_group(group: ProcessGroup | None, *, failed: bool = False) -> None:
    """Give up what a group of ours still does, then forget it; never waits for a peer.

    Destroying a group of an accelerator's comm library waits for the other ranks to do so, too.

    Args:
        group: The group; None, or one that is gone already, is none of ours any more.
        failed: Whether one of its gathers failed; see [Note: the last reference].
    """
    if group is not None and _is_known(group):
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        # Before, for the abort may raise, and after: the watchdog may have seen more meanwhile.
        keep = failed or _has_failed(group)
        _kept.append(group)
        abort(group)
        if not keep and not _has_failed(group):
            _kept.remove(group)


def _has_failed(group: ProcessGroup) -> bool:
    """Return whether the comm library tells of an error; not all do."""
    told: list[object] = []
    for device in group._device_types:
        with suppress(RuntimeError, AttributeError):
            told.append(group._get_backend(device).get_error().name)
    return any(name != "SUCCESS" for name in told)


def abandon(group: ProcessGroup, work: Any) -> None:
    """Keep a gloo group until what it does is over.

    Its destructor waits for that, and would keep whoever drops the last reference for so long.
    """
    _abandoned[:] = [row for row in _abandoned if not row[1].is_completed()]
    if not work.is_completed():
        _abandoned.append((group, work))


_abandoned: list[tuple[ProcessGroup, Any]] = []
# See [Note: the last reference].
_kept: list[ProcessGroup] = []


@atexit.register
def _leave_abandoned() -> None:
    """Never drop the last reference: the end of the process must not wait either."""
    busy = [group for group, work in _abandoned if not work.is_completed()]
    for group in (*busy, *_kept):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def _is_known(group: ProcessGroup) -> bool:
    return dist.is_initialized() and group in dist.distributed_c10d._world.pg_map
