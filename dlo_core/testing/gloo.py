"""Gathers and agreement of simulated backends in several processes, over gloo.

[Note: who waits for whom]
Each process runs its own streams, one step at a time, and nothing beside its host. A gather waits
for the other processes. Where something here needs it, it is entered, and the others come to it.
Where nothing does, but the mode lets the stream run ahead, it may be entered only if the others
come to it without us: a peer that waits for us on the host, and has not queued it, never
will. And a rank that waits on the host must run what its peers need.

So each rank tells the others, through the store of the job, how many gathers it is ready to enter,
how many of these it needs, and whether it waits on the host. One that wants to run ahead waits
until all are ready, or until one that waits on the host says that it is not: it has looked, after
it was asked, for what it has to queue meanwhile. One that waits in an exchange of its
``GlooAgreement`` runs what others need, or run ahead to.

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
    from collections.abc import Callable, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from dlo_core.testing.backend import SimBackend
    from dlo_core.testing.steps import Ticket

__all__ = ["GlooAgreement", "GlooGather"]

T = TypeVar("T")
_POLL_S = 0.0002
# A peer that waits for us in a collective of the model's own tells us nothing; after so long
# nothing runs ahead any more.
_PATIENCE_S = 5.0
_NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class _State:
    """What a rank tells the others of one group.

    Attributes:
        ready: So many gathers may be entered as far as this rank is concerned.
        needed: So many it cannot do without.
        asks: How often it has asked whether all come.
        exchanges: How many it has come to.
        heard: Where it waits in an exchange: how often each rank that has not come there had asked
            when it last looked for what it is to queue meanwhile. Else empty.
    """

    ready: int = 0
    needed: int = 0
    asks: int = 0
    exchanges: int = 0
    heard: tuple[int, ...] = ()

    def __str__(self) -> str:
        numbers = (self.ready, self.needed, self.asks, self.exchanges, *self.heard)
        return " ".join(map(str, numbers))

    def has_heard(self, rank: int, num_asks: int) -> bool:
        """Return whether it waits on the host, and knows how often ``rank`` has asked by now."""
        return bool(self.heard) and self.heard[rank] >= num_asks

    @classmethod
    def parse(cls, text: str) -> _State:
        ready, needed, asks, exchanges, *heard = map(int, text.split())
        return cls(ready, needed, asks, exchanges, tuple(heard))


def _num_ready(states: Sequence[_State]) -> int:
    """Return how many gathers all ranks are ready for, one of which runs ahead; 0: none does.

    What a rank said that waited on the host counts only if it was asked: it may have left by now.
    """
    asking = {rank: state.asks for rank, state in enumerate(states) if not state.heard}
    waiting = [state for state in states if state.heard]
    known = all(state.has_heard(*ask) for state in waiting for ask in asking.items())
    return min(state.ready for state in states) if asking and known else 0


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
        self._runs_ahead = True
        self._num_asks = 0
        self._heard: tuple[int, ...] = ()
        self._state: _State | None = None
        self._tell(0)
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
        # Where a rank serves the others it still waits on the host.
        self._tell(number + 1, number + 1, self._heard)
        all_gather_bytes(out, shard, group=group)
        self._num_done = number + 1

    def _come(self, number: int) -> bool:
        """Return whether all peers come to the gather that nothing here needs."""
        # See [Note: who waits for whom].
        self._num_asks += 1
        self._tell(number + 1)
        deadline = time.monotonic() + _PATIENCE_S
        while self._runs_ahead:
            states = self._hear()
            if _num_ready(states) > number:
                return True
            if any(self._will_not_come(peer, number) for peer in states):
                break
            self._runs_ahead = time.monotonic() < deadline
            time.sleep(_POLL_S)
        self._tell(self._num_done)
        return False

    def _will_not_come(self, peer: _State, number: int) -> bool:
        return peer.has_heard(self.rank, self._num_asks) and peer.ready <= number

    def listen(self) -> None:
        """Note what the peers ask, before what has to be queued meanwhile is looked for."""
        if self._group is not None:
            # Whoever came here and went on is not ours to serve: we are about to go on, too.
            self._heard = tuple(
                state.asks if self._is_awaited(state) else -1 for state in self._hear()
            )

    def serve(self) -> None:
        """Run the gathers that peers need or run ahead to, as far as they are queued here."""
        if self._group is None:
            return
        self._tell(len(self._tickets), heard=self._heard)
        states = self._hear()
        needed = [state.needed for state in states if self._is_awaited(state)]
        asked = max(_num_ready(states), *needed, 0)
        while self._num_done < min(asked, len(self._tickets)):
            ticket = self._tickets[self._num_done]
            self._backend.world.drive(ticket)
            if ticket.error is not None or not ticket.reached:
                # Whoever needs the gather here is told.
                return

    def _is_awaited(self, state: _State) -> bool:
        return state.exchanges < self._backend.num_exchanges

    def leave(self) -> None:
        """Tell the others that the host waits no longer."""
        self._heard = ()
        if self._group is not None:
            self._tell(self._num_done)

    def _tell(self, ready: int, needed: int | None = None, heard: tuple[int, ...] = ()) -> None:
        needed = self._num_done if needed is None else needed
        state = _State(ready, needed, self._num_asks, self._backend.num_exchanges, heard)
        if state != self._state:
            self._store.set(f"{self._key}/{self.rank}", str(state))
            self._state = state

    def _hear(self) -> list[_State]:
        """Return every rank's state, by rank."""
        texts = [self._store.get(f"{self._key}/{rank}").decode() for rank in range(self.size)]
        return [_State.parse(text) for text in texts]

    def close(self) -> None:
        """Destroy the group; local."""
        if self._group is not None:
            # Whoever would run ahead need not wait for us.
            self._tell(self._num_done, heard=(_NEVER,) * self.size)
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

    def board(self) -> None:
        """Return nothing: on simulated streams nothing comes until somebody waits for it."""
        return

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
            self._backend.serve(meanwhile)

        # What the exchange does with tensors is no compute, though it may stand in compute().
        self._backend.num_exchanges += 1
        with self._backend.world.held(), _disable_current_modes():
            try:
                answers = super().exchange(value, what, timeout_s, meanwhile=serve)
                # What was announced before the peers came is queued now, if it was not seen before.
                if meanwhile is not None:
                    meanwhile()
                return answers
            finally:
                self._backend.stop_serving()

    def barrier(self) -> None:
        """Wait on the host for all ranks, and run what they need."""
        self.exchange(None, "barrier")

    def close(self) -> None:
        """Do nothing: the next offload uses it, too; it goes when nobody holds it."""
