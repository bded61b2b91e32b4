"""A graph of the simulated device: steps that are recorded once and queued again at every replay.

It refuses what a real device refuses: a stream that records and waits for an event from outside,
and one that nothing waits for at the end. A stream records from its first wait for a recorded event
on; what the others queue meanwhile runs, and is in no graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.testing.steps import Queue, Step, Ticket

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.testing.backend import SimBackend
    from dlo_core.testing.streams import SimEvent, SimStream

__all__ = ["SimGraph"]

_Clock = dict[Queue, int]


class SimGraph:
    """Records the work of one stream and of those that wait for it."""

    def __init__(self, backend: SimBackend, origin: SimStream) -> None:
        """Record from now on.

        Args:
            backend: Whose streams they are.
            origin: The stream that records.
        """
        self._backend = backend
        self._origin = origin.queue
        self._steps: list[tuple[Queue, Step]] = []
        # How many steps of each stream come before the next step of one, and before a ticket.
        self._clocks: dict[Queue, _Clock] = {origin.queue: {origin.queue: 0}}
        self._tickets: dict[int, tuple[Ticket, _Clock]] = {}
        self._own: dict[Queue, Queue] = {}

    def takes(self, stream: SimStream) -> bool:
        """Return whether the stream records."""
        return stream.queue in self._clocks

    def run(self, stream: SimStream, work: Callable[[], object], storages: frozenset[int]) -> None:
        """Record work."""
        self._put(stream.queue, Step(run=work, storages=storages))

    def record(self, stream: SimStream, event: SimEvent) -> None:
        """Record the recording of an event."""
        event.ticket = Ticket(stream.queue)
        self._put(stream.queue, Step(reach=event.ticket))
        self._tickets[id(event.ticket)] = event.ticket, dict(self._clocks[stream.queue])

    def waits(self, stream: SimStream, event: SimEvent) -> bool:
        """Record a wait, with which a stream begins to record; return whether it is one of these.

        Raises:
            RuntimeError: The event is from outside.
        """
        _, clock = self._tickets.get(id(event.ticket), (None, None))
        if clock is None:
            if self.takes(stream) and event.ticket is not None:
                raise RuntimeError(
                    f"{stream.name} records, and waits for an event from outside of the graph"
                )
            return self.takes(stream)
        mine = self._clocks.setdefault(stream.queue, {stream.queue: 0})
        for queue, count in clock.items():
            mine[queue] = max(mine.get(queue, 0), count)
        self._put(stream.queue, Step(wait=event.ticket))
        return True

    def end(self) -> None:
        """Record no more.

        Raises:
            RuntimeError: The origin does not wait for all work of another stream.
        """
        seen = self._clocks[self._origin]
        for queue, clock in self._clocks.items():
            if seen.get(queue, 0) < clock[queue]:
                raise RuntimeError(f"{queue.name} was not joined at the end of the graph")

    def replay(self) -> None:
        """Queue the steps: the origin's on the current stream, those of others on its own."""
        queues = {self._origin: self._backend.current_stream().queue}
        for queue in self._clocks:
            if queue not in queues:
                if queue not in self._own:
                    self._own[queue] = Queue(queue.world, f"{queue.name} in a graph", queue.role)
                queues[queue] = self._own[queue]
        tickets = {
            key: Ticket(queues[ticket.queue])
            for key, (ticket, _) in self._tickets.items()
            if ticket.queue is not None
        }
        for queue, step in self._steps:
            queues[queue].put(
                Step(
                    wait=None if step.wait is None else tickets[id(step.wait)],
                    reach=None if step.reach is None else tickets[id(step.reach)],
                    run=step.run,
                    storages=step.storages,
                )
            )

    def _put(self, queue: Queue, step: Step) -> None:
        self._steps.append((queue, step))
        self._clocks[queue][queue] += 1

    def __repr__(self) -> str:
        """Show how much it holds."""
        return f"SimGraph({len(self._steps)} steps, {len(self._clocks)} streams)"
