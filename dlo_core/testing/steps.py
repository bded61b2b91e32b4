"""Steps: what a simulated stream has queued, and what its events are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dlo_core.cpu_stream import StreamError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dlo_core.testing.world import World

__all__ = ["Meeting", "Queue", "Step", "Ticket"]


@dataclass(slots=True, eq=False)
class Ticket:
    """One recording of an event.

    Attributes:
        queue: The stream's; None for a stream whose work is done at once.
        reached: Whether all work before it is done, or will never be.
        time: The world's number of steps when it was reached.
        error: What stopped the stream before it came here.
    """

    queue: Queue | None
    reached: bool = False
    time: int = 0
    error: BaseException | None = None

    def reach(self, time: int, error: BaseException | None = None) -> None:
        """Note that the stream came here, or never will."""
        self.reached, self.time, self.error = True, time, error

    def check(self) -> None:
        """Raise what stopped the stream, each time anew.

        Raises:
            StreamError: Work before the event failed; the cause is what happened.
        """
        if self.error is not None:
            raise StreamError(f"{type(self.error).__name__}: {self.error}") from self.error


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective of simulated ranks: it happens when every rank's queue has come to it."""

    size: int
    name: str
    arrived: dict[int, Queue] = field(default_factory=dict)
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def gather(self) -> None:
        """Give every rank every shard, as they are now."""
        shards = [self.parts[rank][1].clone() for rank in range(self.size)]
        for rank in range(self.size):
            out, at = self.parts[rank][0], 0
            for shard in shards:
                out[at : at + shard.numel()].copy_(shard)
                at += shard.numel()


@dataclass(slots=True, eq=False)
class Step:
    """One piece of a queue's work: a wait, a ticket to reach, a meeting, or something to run.

    Attributes:
        wait: Not before this ticket is reached.
        reach: Reached by the step.
        meeting: Happens by the step, on all ranks at once.
        run: Called by the step.
        come: Where ``run`` waits for other processes: waits until they come to the step, though
            nothing here needs it, and returns whether they do. None: it waits for nobody.
        storages: Addresses of the storages that ``run`` or the meeting touches.
    """

    wait: Ticket | None = None
    reach: Ticket | None = None
    meeting: Meeting | None = None
    run: Callable[[], object] | None = None
    come: Callable[[], bool] | None = None
    storages: frozenset[int] = frozenset()


class Queue:
    """The steps of one stream that have not run yet.

    Attributes:
        error: What stopped the stream for good: work that came later is dropped.
    """

    def __init__(self, world: World, name: str, role: str) -> None:
        """Join ``world``.

        Args:
            world: Runs the steps.
            name: Unlike that of any other queue.
            role: What ``World(early=...)`` calls it, alike on every rank.
        """
        self.world = world
        self.name = name
        self.role = role
        self.steps: deque[Step] = deque()
        self.error: BaseException | None = None
        world.queues.append(self)

    def put(self, step: Step) -> None:
        """Append a step; the world runs what its mode wants to run now."""
        with self.world.lock:
            if self.error is None:
                self.steps.append(step)
                self.world.uses.update(step.storages)
            elif step.reach is not None:
                step.reach.reach(self.world.num_steps, self.error)
            self.world.moved()
            self.world.after_put()

    def fail(self, error: BaseException) -> None:
        """Drop all work; whoever waits for it gets ``error``."""
        # Its frames hold what the work held.
        self.error = error.with_traceback(None)
        for step in self.steps:
            self.world.uses.subtract(step.storages)
            if step.reach is not None:
                step.reach.reach(self.world.num_steps, self.error)
        self.steps.clear()

    def __repr__(self) -> str:
        """Show how much is queued."""
        return f"Queue({self.name!r}, {len(self.steps)} steps)"
