"""Streams and events of the simulated backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dlo_core.testing.steps import Queue, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.testing.backend import SimBackend

__all__ = ["ComputeStream", "SimEvent", "SimStream"]


class SimEvent:
    """An event of the simulated backend; one that was never recorded counts as reached."""

    def __init__(self, backend: SimBackend) -> None:
        """Make an event that was never recorded."""
        self._backend = backend
        self.ticket: Ticket | None = None

    def record(self, stream: Any = None) -> None:
        """Mark the work that ``stream`` (default: the current one) holds so far."""
        (stream or self._backend.current_stream()).record_event(self)

    def query(self) -> bool:
        """Return whether the marked work is done."""
        return self.ticket is None or self.ticket.reached

    def synchronize(self) -> None:
        """Block the host until the marked work is done; raise what stopped its stream."""
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

    def __repr__(self) -> str:
        """Show whether the event is reached."""
        state = "unrecorded" if self.ticket is None else "reached" if self.query() else "pending"
        return f"SimEvent({state})"


class SimStream:
    """A stream whose work is a queue of the world."""

    def __init__(self, backend: SimBackend, name: str, role: str) -> None:
        """Join the backend's world."""
        self._backend = backend
        self.name = name
        self.queue = Queue(backend.world, name, role)

    def run(self, work: Callable[[], object], storages: frozenset[int] = frozenset()) -> None:
        """Queue ``work``, which touches ``storages``."""
        graph = self._backend.graph
        if graph is not None and graph.takes(self):
            graph.run(self, work, storages)
            return
        self.queue.put(Step(run=work, storages=storages))

    def wait_event(self, event: SimEvent) -> None:
        """Let work that is queued from now on wait for ``event`` as it is recorded now."""
        graph = self._backend.graph
        if graph is not None and graph.waits(self, event):
            return
        if self._backend.recorder is not None:
            self._backend.recorder.waits(self.name, event)
        if event.ticket is not None:
            self.queue.put(Step(wait=event.ticket))

    def record_event(self, event: SimEvent | None = None) -> SimEvent:
        """Reach ``event`` when all work that is queued so far is done."""
        event = event or SimEvent(self._backend)
        graph = self._backend.graph
        if graph is not None and graph.takes(self):
            graph.record(self, event)
            return event
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
    """A compute stream that is the host itself: work is done at once, but it has a clock."""

    def __init__(self, backend: SimBackend, name: str) -> None:
        """Belong to ``backend``."""
        self._backend = backend
        self.name = name
        # A gather on this stream meets those of other ranks here.
        self.queue = Queue(backend.world, name, "compute")

    def run(self, work: Callable[[], object], storages: frozenset[int] = frozenset()) -> None:
        """Do ``work`` now."""
        self._backend.world.execute(work)

    def wait_event(self, event: SimEvent) -> None:
        """Let later compute wait for ``event``: the host does, and raises what went wrong."""
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

    def __repr__(self) -> str:
        """Show the name."""
        return f"ComputeStream({self.name!r})"
