"""The simulated backend: the real engine runs on it, in an order that the world decides."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dlo_core.agreement import Agreement
from dlo_core.cpu import CpuBackend
from dlo_core.interface import Backend, Capabilities, Check, Collective, MemoryInfo
from dlo_core.testing.world import Meeting, Queue, Step, Ticket, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    from dlo_core.testing.recorder import Recorder

__all__ = ["ComputeStream", "SimAgreement", "SimBackend", "SimEvent", "SimStream"]

POISON = 0xFF


class SimEvent:
    """An event of the simulated backend."""

    def __init__(self, backend: SimBackend) -> None:
        """Make an event that was never recorded."""
        self._backend = backend
        self.ticket: Ticket | None = None
        self.name = "event"

    def record(self, stream: Any = None) -> None:
        """Mark the work that ``stream`` (default: the current one) holds so far."""
        (stream or self._backend.current_stream()).record_event(self)

    def query(self) -> bool:
        """Return whether the marked work is done."""
        return self.ticket is None or self.ticket.reached

    def synchronize(self) -> None:
        """Block the host until the marked work is done."""
        self._backend.count_host_sync("event.synchronize")
        self._backend.reach(self)
        if self._backend.recorder is not None:
            self._backend.recorder.host_waits(self)

    def elapsed_time(self, end_event: SimEvent) -> float:
        """Return the number of steps between two events, as milliseconds."""
        start, end = self.ticket, end_event.ticket
        if start is None or end is None or not (start.reached and end.reached):
            raise ValueError("elapsed_time() needs two events that were recorded and reached")
        return float(end.time - start.time)


class SimStream:
    """A side stream: a queue of the world."""

    def __init__(self, backend: SimBackend, name: str) -> None:
        """Join the backend's world."""
        self._backend = backend
        self.name = name
        self.queue = Queue(backend.world, name)

    def wait_event(self, event: SimEvent) -> None:
        """Let work that is queued from now on wait for ``event`` as it is recorded now."""
        if self._backend.recorder is not None:
            self._backend.recorder.waits(self.name, event)
        if event.ticket is not None:
            self.queue.put(Step(wait=event.ticket))

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """Reach ``event`` when all work that is queued so far is done."""
        event = event or SimEvent(self._backend)
        event.ticket = Ticket(self.queue)
        if self._backend.recorder is not None:
            self._backend.recorder.records(self.name, event)
        self.queue.put(Step(reach=event.ticket))
        return event

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""
        self.record_event().synchronize()

    def __repr__(self) -> str:
        """Show the name."""
        return f"SimStream({self.name!r})"


class ComputeStream:
    """The compute stream: the host does its work at once, but it has a clock of its own."""

    def __init__(self, backend: SimBackend, name: str = "compute") -> None:
        """Belong to ``backend``."""
        self._backend = backend
        self.name = name

    def wait_event(self, event: SimEvent) -> None:
        """Let later compute wait for ``event``; the simulation brings it about now."""
        if self._backend.recorder is not None:
            self._backend.recorder.waits(self.name, event)
        self._backend.reach(event)

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """Reach ``event`` now: all earlier compute is done."""
        event = event or SimEvent(self._backend)
        event.ticket = Ticket(None, reached=True, time=self._backend.world.num_steps)
        if self._backend.recorder is not None:
            self._backend.recorder.records(self.name, event)
        return event

    def synchronize(self) -> None:
        """Block the host until all compute is done."""
        self._backend.count_host_sync("compute.synchronize")
        if self._backend.recorder is not None:
            self._backend.recorder.host_waits(self.record_event())


class SimCheck(Check):
    """Compares when its stream comes to it."""

    def __init__(self, backend: SimBackend) -> None:
        """Start without a difference."""
        self._backend = backend
        self._failed = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison."""

        def work() -> None:
            self._failed = self._failed or not torch.equal(actual, expected)

        self._backend.queue("check", work, reads=(actual, expected))

    def failed(self) -> bool:
        """Return whether a difference was found."""
        return self._failed


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
        self._backend.join_meeting(meeting, self.rank, out, shard)

    def close(self) -> None:
        """Do nothing: there is no group to give back."""


class SimGroup:
    """What stands for a process group of simulated ranks."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        """Name it; equal names are one group."""
        self.name = name
        self.rank = rank
        self.size = size


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

    def announce(self, topic: str, number: int) -> None:
        """Tell all ranks of the world."""
        self._world.boards.setdefault(topic, {})[self.rank] = number
        self._world.moved()

    def heard(self, topic: str) -> list[int]:
        """Return what every rank announced last."""
        board = self._world.boards.get(topic, {})
        return [board.get(rank, 0) for rank in range(self.size)]

    def new_group(self, comm_library: str, timeout_s: float) -> ProcessGroup:
        """Return a new group of the same ranks."""
        made: Any = SimGroup(f"group {next(self._groups)}", self.rank, self.size)
        return made  # type: ignore[no-any-return]

    def close(self) -> None:
        """Do nothing."""


class SimBackend(Backend):
    """A backend for one simulated rank of a world."""

    name = "cpu"
    comm_library = "simulated"

    def __init__(
        self,
        world: World | None = None,
        rank: int = 0,
        *,
        recorder: Recorder | None = None,
        poison: bool = True,
        alignment: int = 256,
    ) -> None:
        """Belong to ``world``; without one, to a world of one rank in late mode.

        Args:
            world: Decides the order.
            rank: This rank.
            recorder: Keeps vector clocks and finds races.
            poison: Fill what is about to be overwritten, and fresh memory, with 0xFF (NaN).
            alignment: Of tensors and shards, in bytes.
        """
        self.world = world or World()
        self.rank = rank
        self.recorder = recorder
        self.capabilities = Capabilities(alignment=alignment)
        self.host_syncs: list[str] = []
        self._real = CpuBackend()
        self._poison = poison
        self._compute = ComputeStream(self)
        self._current: Any = self._compute
        self._names = itertools.count()
        self.device = self._real.device
        self.allocator = self._real.allocator
        if recorder is not None:
            recorder.backend = self

    # --- the interface ------------------------------------------------------------------------

    def new_stream(self, priority: int = 0) -> SimStream:
        """Return a new side stream."""
        return SimStream(self, f"rank {self.rank} stream {next(self._names)}")

    def new_compute_stream(self, name: str) -> ComputeStream:
        """Return another compute stream, for forwards on several streams."""
        return ComputeStream(self, name)

    def current_stream(self) -> Any:
        """Return the current stream."""
        return self._current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` current."""
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, *, timing: bool = False) -> SimEvent:
        """Return a new event."""
        return SimEvent(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return counted device memory, poisoned."""
        made = self._real.empty(nbytes)
        return made.fill_(POISON) if self._poison else made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy."""
        self._poison_now(dst, (dst, src))
        self.queue("copy", partial(dst.copy_, src), reads=(src,), writes=(dst,))

    def new_check(self) -> SimCheck:
        """Return a new comparison."""
        return SimCheck(self)

    def collective(self, group: ProcessGroup) -> SimCollective:
        """Return the gather of a simulated group."""
        assert isinstance(group, SimGroup)
        return SimCollective(self, group)

    def memory(self) -> MemoryInfo:
        """Return the CPU backend's account."""
        return self._real.memory()

    def synchronize(self) -> None:
        """Run everything that can run."""
        self.count_host_sync("backend.synchronize")
        self.world.drain()
        if self.recorder is not None:
            self.recorder.host_waits_for_all()

    # --- for the parts ------------------------------------------------------------------------

    def queue(
        self,
        op: str,
        work: Any,
        *,
        reads: tuple[torch.Tensor, ...] = (),
        writes: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Queue ``work`` on the current stream; on the compute stream it is done at once."""
        stream = self._current
        if self.recorder is not None:
            self.recorder.accesses(stream.name, op, reads=reads, writes=writes)
        if isinstance(stream, ComputeStream):
            self.world.execute(work)
            return
        storages = frozenset(storage_of(tensor) for tensor in (*reads, *writes))
        stream.queue.put(Step(run=work, storages=storages))

    def join_meeting(
        self, meeting: Meeting, rank: int, out: torch.Tensor, shard: torch.Tensor
    ) -> None:
        """Queue this rank's part of a collective on the current stream."""
        stream = self._current
        in_place = storage_of(out) == storage_of(shard)
        if not in_place:
            self._poison_now(out, (out, shard))
        if self.recorder is not None:
            self.recorder.accesses(stream.name, "gather", reads=(shard,), writes=(out,))
        meeting.arrived[rank] = stream.queue
        meeting.parts[rank] = (out, shard)
        self.world.collectives[rank].append(meeting.name)
        storages = frozenset({storage_of(out), storage_of(shard)})
        stream.queue.put(Step(meeting=meeting, storages=storages))

    def reach(self, event: SimEvent) -> None:
        """Run what ``event`` needs; let other ranks run where it needs them."""
        ticket = event.ticket
        if ticket is None:
            return
        what = f"an event of {ticket.queue.name if ticket.queue else 'compute'}"
        self.world.wait_until(self.rank, lambda: self.world.drive(ticket), what)

    def count_host_sync(self, what: str) -> None:
        """Note a named host synchronisation."""
        if not self.world.executing:
            self.host_syncs.append(what)

    def _poison_now(self, dst: torch.Tensor, touched: tuple[torch.Tensor, ...]) -> None:
        """Poison a destination at the time of queueing, unless queued work still uses it."""
        if self._poison and not any(self.world.pending(storage_of(t)) for t in touched):
            self.world.execute(lambda: dst.fill_(POISON))


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, which tells storages apart."""
    return tensor.untyped_storage().data_ptr()
