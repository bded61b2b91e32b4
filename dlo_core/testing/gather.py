"""Gathers and agreement of simulated ranks in one process."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dlo_core.agreement import Agreement
from dlo_core.interface import Collective
from dlo_core.testing.steps import Meeting

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

    from dlo_core.testing.backend import SimBackend
    from dlo_core.testing.world import World

__all__ = ["SimAgreement", "SimCollective", "SimGroup"]


class SimGroup:
    """What stands for a process group of simulated ranks; equal names are one group."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """Name it."""
        self.name = name
        self.rank = rank
        self.size = size


class SimCollective(Collective):
    """The all-gather of simulated ranks: a meeting of the world."""

    def __init__(self, backend: SimBackend, group: SimGroup) -> None:
        """Join the group."""
        self._backend = backend
        self._group = group
        self._count = itertools.count()
        self.rank, self.size = group.rank, group.size

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather."""
        if out.nbytes != self.size * shard.nbytes:
            raise ValueError(f"out has {out.nbytes} bytes, wanted {self.size} x {shard.nbytes}")
        world, number = self._backend.world, next(self._count)
        key = (self._group.name, number)
        meeting = world.meetings.setdefault(key, Meeting(self.size, f"gather {number}"))
        self._backend.join_meeting(meeting, out, shard)

    def close(self) -> None:
        """Do nothing: there is no group to give back."""


class SimAgreement(Agreement):
    """The ranks of a world agree through boards; give it as ``group=``."""

    def __init__(self, world: World, rank: int) -> None:
        """Stand for ``rank`` of the world."""
        self._world = world
        self._steps = itertools.count()
        self._groups = itertools.count()
        self.rank, self.size = rank, world.size

    def exchange(
        self,
        value: Any,
        what: str,
        timeout_s: float | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Any]:
        """Return every rank's ``value``, in rank order."""
        board = self._world.boards.setdefault(next(self._steps), {})
        board[self.rank] = value
        self._world.moved()

        def complete() -> bool:
            if meanwhile is not None and len(board) < self.size:
                meanwhile()
            return len(board) == self.size

        self._world.wait_until(self.rank, complete, what)
        return [board[rank] for rank in range(self.size)]

    def barrier(self) -> None:
        """Wait on the host for all ranks."""
        self.exchange(None, "barrier")

    def announce(self, topic: str, number: int) -> None:
        """Tell all ranks of the world."""
        self._world.boards.setdefault(topic, {})[self.rank] = number
        self._world.moved()

    def heard(self, topic: str) -> list[int]:
        """Return what every rank announced last."""
        board = self._world.boards.get(topic, {})
        return [board.get(rank, 0) for rank in range(self.size)]

    def new_group(
        self, comm_library: str, timeout_s: float, options: Any | None = None
    ) -> ProcessGroup:
        """Return a new group of the same ranks."""
        made: Any = SimGroup(f"group {next(self._groups)}", self.rank, self.size)
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        """Do nothing."""
