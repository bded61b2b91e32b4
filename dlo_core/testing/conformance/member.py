"""A member: one rank of a group whose collective is under test, in a process of its own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dlo_core.errors import BackendError
from dlo_core.gathering import make_group
from dlo_core.rendezvous import new_group_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, Collective

__all__ = ["TIMEOUT_S", "Member", "member_main"]

# Of the groups: what hangs is to fail soon.
TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Member:
    """What a check of a collective is given.

    Attributes:
        backend: This rank's backend.
        rank: In the group.
        size: Of the group.
        group: The ranks, as ``offload(group=...)`` takes them.
        new_collective: Makes a collective over a new process group; all members must call it.
        barrier: Waits on the host for all members, on another group.
    """

    backend: Backend
    rank: int
    size: int
    group: Any
    new_collective: Callable[[], Collective]
    barrier: Callable[[], None]


def member_main(
    global_rank: int,
    check: Callable[..., None],
    make_backend: Callable[[int], Backend],
    members: tuple[int, ...],
    args: tuple[Any, ...],
) -> str | None:
    """Run ``check`` on this rank when it is a member; return why a rank has no backend, or None."""
    try:
        backend, reason = make_backend(global_rank), None
    except BackendError as error:
        backend, reason = None, f"rank {global_rank}: {error}"
    reasons: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason)
    absent = next((reason for reason in reasons if reason is not None), None)
    if absent is not None or backend is None:
        return absent
    # Made by all ranks, so in the order of the world, which gloo's barrier below wants.
    ours: Any = dist.new_group(list(members), backend="gloo")
    if global_rank in members:
        check(_member(backend, members, ours), *args)
    dist.barrier()
    return None


def _member(backend: Backend, members: tuple[int, ...], group: Any) -> Member:
    numbers = itertools.count()

    def new_collective() -> Collective:
        name = f"conformance-{next(numbers)}"
        made = make_group(
            backend, lambda: new_group_of(members, backend.comm_library, TIMEOUT_S, name)
        )
        return backend.collective(made)

    return Member(
        backend,
        dist.get_rank(group),
        len(members),
        group,
        new_collective,
        lambda: dist.barrier(group),
    )
