"""Gathers and agreement of simulated backends in several processes, over gloo.

[Note: who waits for whom]
Each process runs its own streams, one step at a time, and nothing beside its host. A gather waits
for the other processes. Where something here needs it, it is entered, and the others come to it.
Where nothing does, but the mode lets the stream run ahead, it may be entered only if the others
come to it without us: a peer that waits for us on the host, and has not queued it, never
will. And a rank that waits on the host must run what its peers need.

So each rank tells the others, through the store of the job, how many gathers it is ready to enter,
how many of these it needs, and whether it waits on the host. One that wants to run ahead waits
until all are ready, or until one that waits on the host is not. One that waits in an exchange of
its ``GlooAgreement`` runs what others need or are ready for, too.

What runs when is thus decided by the program, the mode and the seed, and not by time: a failing
seed replays.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
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
_POLL_S = 0.0002
# A peer that waits for us in a collective of the model's own tells us nothing; after so long
# nothing runs ahead any more.
_PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True)
class _State:
    """What a rank tells the others of one group, in numbers of gathers.

    Attributes:
        ready: So many may be entered as far as this rank is concerned.
        needed: So many this rank cannot do without.
        waits: Whether it waits on the host.
    """

    ready: int = 0
    needed: int = 0
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.ready} {self.needed} {int(self.waits)}"

    @classmethod
    def parse(cls, text: str) -> _State:
        ready, needed, waits = map(int, text.split())
        return cls(ready, needed, bool(waits))


class GlooGather(Collective):
    """The all-gather of a simulated backend over a real gloo group."""

    def __init__(self, backend: SimBackend, group: ProcessGroup) -> None:
        """Take ``group`` over."""
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._backend = backend
        self._group: ProcessGroup | None = group
        self._store = default_store()
        self._key = f"dlo-sim/{group.group_name}"
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._tickets: list[Ticket] = []
        self._num_done = 0
        self._runs_ahead = True
        self._state: _State | None = None
        self._tell(_State())
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
        come = partial(self._come, number)
        self._tickets.append(self._backend.queue_gather(work, come, out, shard))

    def _gather(
        self, number: int, out: torch.Tensor, shard: torch.Tensor, group: ProcessGroup
    ) -> None:
        self._tell(_State(number + 1, number + 1))
        all_gather_bytes(out, shard, group=group)
        self._num_done = number + 1

    def _come(self, number: int) -> bool:
        """Return whether all peers come to the gather that nothing here needs."""
        # See [Note: who waits for whom].
        if not self._runs_ahead:
            return False
        self._tell(_State(number + 1, self._num_done))
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            peers = self._hear()
            if all(peer.ready > number for peer in peers):
                return True
            if any(peer.waits and peer.ready <= number for peer in peers):
                break
            if time.monotonic() > deadline:
                self._runs_ahead = False
                break
            time.sleep(_POLL_S)
        self._tell(_State(self._num_done, self._num_done))
        return False

    def serve(self) -> None:
        """Run the gathers that peers need or all are ready for, as far as they are queued here."""
        if self._group is None or not self._peers:
            return
        self._tell(_State(len(self._tickets), self._num_done, True))
        peers = self._hear()
        asked = max(*(peer.needed for peer in peers), min(peer.ready for peer in peers))
        while self._num_done < min(asked, len(self._tickets)):
            ticket = self._tickets[self._num_done]
            self._backend.world.drive(ticket)
            if ticket.error is not None or not ticket.reached:
                # Whoever needs the gather here is told.
                return

    def leave(self) -> None:
        """Tell the others that the host waits no longer."""
        if self._group is not None:
            self._tell(_State(self._num_done, self._num_done))

    def _tell(self, state: _State) -> None:
        if state != self._state:
            self._store.set(f"{self._key}/{self.rank}", str(state))
            self._state = state

    def _hear(self) -> list[_State]:
        texts = [self._store.get(f"{self._key}/{rank}").decode() for rank in self._peers]
        return [_State.parse(text) for text in texts]

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
            try:
                return super().exchange(value, what, timeout_s, meanwhile=serve)
            finally:
                self._backend.stop_serving()

    def barrier(self) -> None:
        """Wait on the host for all ranks, and run what they need."""
        self.exchange(None, "barrier")

    def close(self) -> None:
        """Do nothing: the next offload uses it, too; it goes when nobody holds it."""
