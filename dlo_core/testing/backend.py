"""The simulated backend: the real engine runs on it, in an order that the world decides."""

from __future__ import annotations

import itertools
import threading
import weakref
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlo_core.cpu import CpuBackend
from dlo_core.errors import BackendError
from dlo_core.interface import Backend, Capabilities, Check, Collective, MemoryInfo
from dlo_core.packed_torch import TorchCodec
from dlo_core.testing.compute import Compute
from dlo_core.testing.device_memory import POISON, DeviceMemory, storage_of
from dlo_core.testing.gather import SimCollective, SimGroup
from dlo_core.testing.gloo import GlooGather
from dlo_core.testing.graph import SimGraph
from dlo_core.testing.steps import Meeting, Step, Ticket
from dlo_core.testing.streams import ComputeStream, SimEvent, SimStream
from dlo_core.testing.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import ProcessGroup

    from dlo_core.interface import Graph
    from dlo_core.testing.recorder import Recorder

__all__ = ["SimBackend", "SimCheck"]

AnyStream = SimStream | ComputeStream


class SimCheck(Check):
    """Compares when its stream comes to it."""

    def __init__(self, backend: SimBackend) -> None:
        """Start without a difference."""
        self._backend = backend
        self._failed = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison."""
        alias = self._backend.device_memory.alias
        work = partial(self._compare, alias(actual), alias(expected))
        self._backend.queue("check", work, reads=(actual, expected))

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        self._failed = self._failed or not torch.equal(actual, expected)

    def failed(self) -> bool:
        """Return whether a difference was found."""
        return self._failed


class SimCodec(TorchCodec):
    """Decodes when its stream comes to it; counts and writes at once."""

    def __init__(self, backend: SimBackend) -> None:
        """Belong to ``backend``."""
        self._backend = backend

    def count(self, run: torch.Tensor, ranks: torch.Tensor, table_of: torch.Tensor) -> torch.Tensor:
        """Count when what is queued before is done."""
        self._backend.current_stream().synchronize()
        return super().count(run, ranks, table_of)

    def decode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Queue the decoding."""
        alias = self._backend.device_memory.alias
        work = partial(super().decode, alias(rows), alias(out))
        self._backend.spoil((out,), (rows, out))
        self._backend.queue("decode", work, reads=(rows,), writes=(out,))


class SimBackend(Backend):
    """A backend for one simulated rank of a world, or for one process of a gloo job.

    Attributes:
        host_syncs: Every named wait of the host so far.
        is_served: Whether a ``GlooAgreement`` lets this rank serve its peers.
        num_exchanges: How many exchanges of a ``GlooAgreement`` it has come to.
        graph: What is being recorded, if anything is.
    """

    name = "cpu"
    comm_library = "gloo"

    def __init__(
        self,
        world: World | None = None,
        rank: int = 0,
        *,
        recorder: Recorder | None = None,
        poison: bool = True,
        alignment: int = 256,
        host_ahead: bool = False,
    ) -> None:
        """Belong to ``world``; without one, to a world of one rank in late mode.

        Args:
            world: Decides the order.
            rank: This rank in the world; 0 in a process of a gloo job, which has its own world.
            recorder: Keeps vector clocks and finds races.
            poison: Fill what is about to be overwritten, and fresh memory, with 0xFF (NaN).
            alignment: Of tensors and shards, in bytes.
            host_ahead: Whether compute is a queue, too, as on an accelerator: the host runs ahead
                of it inside of ``compute()``. Else the host computes itself, as on a CPU.

        Raises:
            ValueError: The world has no such rank.
        """
        self.world = world or World()
        if not 0 <= rank < self.world.size:
            raise ValueError(
                f"rank {rank} is not in a world of {self.world.size}; over gloo each process has a "
                "World() of its own, in which it is rank 0"
            )
        self.rank = rank
        self.recorder = recorder
        self.capabilities = Capabilities(
            alignment=alignment, host_blocks=not host_ahead, graph_capture=host_ahead
        )
        self.graph: SimGraph | None = None
        self.host_syncs: list[str] = []
        self.is_served = False
        self.num_exchanges = 0
        self._real = CpuBackend()
        self.device_memory = DeviceMemory(self._real)
        self._poison = poison
        self._label = f"rank {rank if self.world.size > 1 or not _in_job() else dist.get_rank()}"
        self._numbers = itertools.count()
        self._computes: list[AnyStream] = []
        self._compute = self.new_compute_stream("compute")
        self._current = threading.local()
        self._gathers: list[weakref.ref[GlooGather]] = []
        self.device = self._real.device
        self.allocator = self._real.allocator
        if recorder is not None:
            recorder.backend = self

    # --- the interface ------------------------------------------------------------------------

    def new_stream(self, priority: int = 0) -> SimStream:
        """Return a new side stream."""
        role = f"stream {next(self._numbers)}"
        return SimStream(self, f"{self._label} {role}", role)

    def new_compute_stream(self, name: str) -> AnyStream:
        """Return another compute stream, for forwards on several streams."""
        blocking = self.capabilities.host_blocks
        made = ComputeStream(self, name) if blocking else SimStream(self, name, "compute")
        self._computes.append(made)
        return made

    def current_stream(self) -> AnyStream:
        """Return this thread's current stream; the compute stream unless in a context."""
        stream: AnyStream = getattr(self._current, "stream", self._compute)
        return stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` current in this thread."""
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def new_event(self, *, timing: bool = False) -> SimEvent:
        """Return a new event."""
        return SimEvent(self)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return counted device memory, poisoned."""
        made = self.device_memory.empty(nbytes)
        return made.fill_(POISON) if self._poison else made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy."""
        self.spoil((dst,), (dst, src))
        alias = self.device_memory.alias
        self.queue("copy", partial(alias(dst).copy_, alias(src)), reads=(src,), writes=(dst,))

    def codec(self) -> SimCodec:
        """Return the codec in torch's operations, queued."""
        return SimCodec(self)

    def new_check(self) -> SimCheck:
        """Return a new comparison."""
        return SimCheck(self)

    def collective(self, group: ProcessGroup) -> Collective:
        """Return the gather of a simulated group, or of a gloo group.

        Raises:
            BackendError: The group is gloo's, and no ``GlooAgreement`` belongs to this backend.
        """
        if isinstance(group, SimGroup):
            return SimCollective(self, group)
        if not self.is_served:
            raise BackendError(
                "a simulated backend gathers over gloo only where its ranks serve each other while "
                "they wait; pass group=GlooAgreement(backend) to offload()"
            )
        made = GlooGather(self, group)
        self._gathers.append(weakref.ref(made))
        return made

    def memory(self) -> MemoryInfo:
        """Return the CPU backend's account."""
        return self._real.memory()

    def synchronize(self) -> None:
        """Run everything that can run; raise what stopped a stream."""
        self.count_host_sync("backend.synchronize")
        self.world.drain()
        if self.recorder is not None:
            self.recorder.host_waits_for_all()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record what is queued on a stream of its own, and those that wait for it.

        The recorder hears nothing of it.
        """
        if self.capabilities.host_blocks:
            raise BackendError("only a simulated device whose host runs ahead captures graphs")
        origin = SimStream(self, f"{self._label} capture {next(self._numbers)}", "capture")
        graph, recorder = SimGraph(self, origin), self.recorder
        self.graph, self.recorder = graph, None
        try:
            with self.stream(origin):
                yield graph
            graph.end()
        finally:
            self.graph, self.recorder = None, recorder

    def recording(self) -> bool:
        """Return whether a graph is being recorded."""
        return self.graph is not None

    # --- for a user of the kit ----------------------------------------------------------------

    @contextmanager
    def compute(self) -> Iterator[None]:
        """Return a context in which torch operations are this backend's compute.

        The recorder sees what they read and write. Where the host runs ahead they are queued on the
        current stream, and the end of the context waits for them.
        """
        with Compute(self):
            yield
        if not self.capabilities.host_blocks:
            for stream in self._computes:
                self.reach(stream.record_event())

    def host_streams(self) -> list[str]:
        """Return the names of the compute streams that are the host itself."""
        return [s.name for s in self._computes if isinstance(s, ComputeStream)]

    # --- for the parts ------------------------------------------------------------------------

    def queue(
        self,
        op: str,
        work: Callable[[], object],
        *,
        reads: tuple[torch.Tensor, ...] = (),
        writes: tuple[torch.Tensor, ...] = (),
    ) -> None:
        """Queue ``work`` on the current stream; where the host computes itself, do it there now."""
        stream = self.current_stream()
        if self.recorder is not None:
            self.recorder.accesses(stream.name, op, reads=reads, writes=writes)
            work = self.recorder.of_device(work, writes)
        stream.run(work, frozenset(map(storage_of, (*reads, *writes))))

    def join_meeting(self, meeting: Meeting, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue this rank's part of a collective of the world on the current stream."""
        alias = self.device_memory.alias
        meeting.parts[self.rank] = (alias(out), alias(shard))
        self.world.collectives[self.rank].append(meeting.name)
        storages = self._begin_gather(out, shard)
        queue = self.current_stream().queue
        meeting.arrived[self.rank] = queue
        self._put_gather(Step(meeting=meeting, storages=storages))

    def queue_gather(
        self,
        work: Callable[[], object],
        come: Callable[[], bool],
        out: torch.Tensor,
        shard: torch.Tensor,
    ) -> Ticket:
        """Queue a gather that waits for other processes; return what it reaches."""
        storages = self._begin_gather(out, shard)
        return self._put_gather(Step(run=work, come=come, storages=storages))

    def serve(self, meanwhile: Callable[[], object] | None) -> None:
        """Run the gathers that peers wait for, those too that ``meanwhile`` queues."""
        # See [Note: who waits for whom] in gloo.py.
        gathers = self._living_gathers()
        for gather in gathers:
            gather.listen()
        if meanwhile is not None:
            meanwhile()
        for gather in gathers:
            gather.serve()

    def stop_serving(self) -> None:
        """Tell the peers that the host waits no longer."""
        for gather in self._living_gathers():
            gather.leave()

    def _living_gathers(self) -> list[GlooGather]:
        return [gather for ref in self._gathers if (gather := ref()) is not None]

    def reach(self, event: SimEvent) -> None:
        """Run what ``event`` needs; let other ranks run where it needs them.

        Raises:
            StreamError: Work before the event failed.
            Deadlock: Nothing can ever reach it.
        """
        ticket = event.ticket
        if ticket is not None:
            self._reach(ticket)

    def count_host_sync(self, what: str) -> None:
        """Note a named host synchronisation."""
        if not self.world.executing:
            self.host_syncs.append(what)

    def _reach(self, ticket: Ticket) -> None:
        if not ticket.reached:
            what = f"an event of {ticket.queue.name if ticket.queue else 'compute'}"
            self.world.wait_until(self.rank, lambda: self.world.drive(ticket), what)
        ticket.check()

    def _begin_gather(self, out: torch.Tensor, shard: torch.Tensor) -> frozenset[int]:
        """Spoil what is gathered into, tell the recorder, and return the storages."""
        parts: tuple[torch.Tensor, ...] = (out,)
        if storage_of(out) == storage_of(shard):
            # In place: our own part stays.
            low = shard.data_ptr() - out.data_ptr()
            parts = (out[:low], out[low + shard.nbytes :])
        self.spoil(parts, (out, shard))
        if self.recorder is not None:
            name = self.current_stream().name
            self.recorder.accesses(name, "gather", reads=(shard,), writes=(out,))
        return frozenset({storage_of(out), storage_of(shard)})

    def _put_gather(self, step: Step) -> Ticket:
        """Queue the step; where the host computes itself, it waits for it."""
        stream = self.current_stream()
        ticket = Ticket(stream.queue)
        stream.queue.put(step)
        stream.queue.put(Step(reach=ticket))
        if isinstance(stream, ComputeStream):
            self._reach(ticket)
        return ticket

    def spoil(self, parts: tuple[torch.Tensor, ...], touched: tuple[torch.Tensor, ...]) -> None:
        """Poison what is about to be written: now, unless queued work uses it, and in its turn."""
        if not self._poison:
            return
        parts = tuple(map(self.device_memory.alias, parts))
        storages = frozenset(map(storage_of, touched))
        work: Callable[[], object] = partial(_poison, parts)
        if self.recorder is not None:
            work = self.recorder.of_device(work, parts)
        if self.graph is None and not any(map(self.world.pending, storages)):
            self.world.execute(work)
        self.current_stream().run(work, storages)


def _poison(parts: tuple[torch.Tensor, ...]) -> None:
    for part in parts:
        part.fill_(POISON)


def _in_job() -> bool:
    return dist.is_available() and dist.is_initialized()
