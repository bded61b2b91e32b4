"""Gathers and agreement of simulated backends in several processes, over gloo.

[Note: who waits for whom]
Each process runs its own streams, one step at a time, and nothing beside its host. A gather waits
for the other processes, so it runs where something here needs it, and never before: one that ran
as soon as it is queued could wait for a rank that queues its part only after it has met us on the
host. And a rank that waits on the host runs nothing that its peers need. So a rank tells the
others, through the store of the job, which gather it is about to enter, and a rank that waits in
an exchange of its ``GlooAgreement`` runs what it is asked for.

What runs when is thus decided by the program, the mode and the seed, never by time: a failing seed
replays.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from dlo_core.agreement import GroupAgreement, check_member
from dlo_core.collective import all_gather_bytes, living, release_group
from dlo_core.interface import Collective
from dlo_core.rendezvous import default_store

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

    from dlo_core.testing.backend import SimBackend
    from dlo_core.testing.steps import Ticket

__all__ = ["GlooAgreement", "GlooGather"]

T = TypeVar("T")


class GlooGather(Collective):
    """The all-gather of a simulated backend over a real gloo group."""

    def __init__(self, backend: SimBackend, group: ProcessGroup) -> None:
        """Take ``group`` over."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._backend = backend
        self._group: ProcessGroup | None = group
        self._store = default_store()
        self._key = f"dlo-sim/{group.group_name}"
        self._tickets: list[Ticket] = []
        self._num_done = 0
        # An offload that is forgotten without disable() takes its group along.
        self._finalizer = weakref.finalize(self, release_group, group)
        self._finalizer.atexit = False

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather."""
        if out.nbytes != self.size * shard.nbytes:
            raise ValueError(f"out has {out.nbytes} bytes, wanted {self.size} x {shard.nbytes}")
        number, group = len(self._tickets), living(self._group)
        alias = self._backend.device_memory.alias
        work = partial(self._gather, number, alias(out), alias(shard), group)
        self._tickets.append(self._backend.queue_gather(work, out, shard))

    def _gather(
        self, number: int, out: torch.Tensor, shard: torch.Tensor, group: ProcessGroup
    ) -> None:
        # See [Note: who waits for whom].
        self._store.set(f"{self._key}/{self.rank}", str(number + 1))
        all_gather_bytes(out, shard, group=group)
        self._num_done = number + 1

    def serve(self) -> None:
        """Run the gathers that peers have entered, as far as they are queued here."""
        if self._group is None:
            return
        keys = [f"{self._key}/{rank}" for rank in range(self.size)]
        entered = [int(self._store.get(key)) for key in keys if self._store.check([key])]
        asked = max(entered, default=0)
        while self._num_done < min(asked, len(self._tickets)):
            ticket = self._tickets[self._num_done]
            self._backend.world.drive(ticket)
            if ticket.error is not None or not ticket.reached:
                # Whoever needs the gather here is told.
                return

    def close(self) -> None:
        """Destroy the group; local."""
        self._group = None
        self._finalizer()

    def __repr__(self) -> str:
        """Show rank and size."""
        return f"GlooGather(rank={self.rank}, size={self.size})"


class GlooAgreement(GroupAgreement):
    """The ranks of a gloo job whose backends are simulated; give it as ``group=``.

    One is enough for any number of offloads, one after the other.
    """

    def __init__(
        self, backend: SimBackend, group: ProcessGroup | None = None, timeout_s: float = 20.0
    ) -> None:
        """Make a control group of the ranks; all of them must come.

        Args:
            backend: This rank's.
            group: The ranks; None: all of the job.
            timeout_s: How long to wait for them.

        Raises:
            ConfigError: This process is not in ``group``.
            AgreementError: A rank did not come within ``timeout_s``.
        """
        super().__init__(check_member(dist.group.WORLD if group is None else group), timeout_s)
        self._backend = backend
        backend.is_served = True

    def exchange(
        self,
        value: T,
        what: str,
        timeout_s: float | None = None,
        *,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[T]:
        """Return every rank's ``value``, in rank order; run meanwhile what the peers need."""

        def serve() -> None:
            if meanwhile is not None:
                meanwhile()
            self._backend.serve()

        # What the exchange does with tensors is no compute, though it may stand in compute().
        with self._backend.world.held(), _disable_current_modes():
            return super().exchange(value, what, timeout_s, meanwhile=serve)

    def barrier(self) -> None:
        """Wait on the host for all ranks, and run what they need."""
        self.exchange(None, "barrier")

    def close(self) -> None:
        """Do nothing: the next offload uses it, too; it goes when nobody holds it."""
