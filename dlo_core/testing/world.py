"""A world: the streams of one or several simulated ranks in one process, run one step at a time.

Nothing here runs beside anything else. A stream is a queue; who runs what, and when, is decided by
the mode, so that every order that a device could choose can be produced, and produced again:

- ``late``: work runs only when something waits for it, and no more than that needs;
- ``eager``: work runs as early as its own waits allow;
- ``random``: a seeded choice among all steps that are possible.

Ranks are threads of which exactly one runs at a time; it hands over only when it has to wait for
another. When every rank waits and nothing can move, all of them raise ``Deadlock``.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MODES", "Deadlock", "Meeting", "Queue", "Step", "Ticket", "World"]

MODES = ("late", "eager", "random")


class Deadlock(RuntimeError):
    """Raised on every rank when each waits for something that nobody will do."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One recording of an event."""

    queue: Queue | None
    reached: bool = False
    time: int = 0


@dataclass(slots=True, eq=False)
class Meeting:
    """One collective: it happens when every rank's queue has come to it."""

    size: int
    name: str
    arrived: dict[int, Queue] = field(default_factory=dict)
    parts: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    done: bool = False


@dataclass(slots=True, eq=False)
class Step:
    """One piece of a queue's work: a wait, a ticket to reach, a meeting, or something to run.

    Attributes:
        wait: Not before this ticket is reached.
        reach: Reached by the step.
        meeting: Happens by the step, on all ranks at once.
        run: Called by the step.
        storages: Addresses of the storages that ``run`` or the meeting touches.
    """

    wait: Ticket | None = None
    reach: Ticket | None = None
    meeting: Meeting | None = None
    run: Callable[[], object] | None = None
    storages: frozenset[int] = frozenset()


class Queue:
    """The steps of one stream that have not run yet."""

    def __init__(self, world: World, name: str) -> None:
        """Join ``world``."""
        self.world = world
        self.name = name
        self.steps: deque[Step] = deque()
        world.queues.append(self)

    def put(self, step: Step) -> None:
        """Append a step; an eager world runs what it can."""
        self.steps.append(step)
        self.world.moved()
        self.world.after_put()

    def __repr__(self) -> str:
        """Show how much is queued."""
        return f"Queue({self.name!r}, {len(self.steps)} steps)"


class World:
    """All queues and ranks, and the mode in which they run."""

    def __init__(self, size: int = 1, mode: str = "late", seed: int = 0) -> None:
        """Make a world without queues.

        Args:
            size: Number of ranks.
            mode: One of ``MODES``.
            seed: Of the choices in ``random`` mode and of the order of ranks.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}; got {mode!r}")
        self.size = size
        self.mode = mode
        self.queues: list[Queue] = []
        self.meetings: dict[Any, Meeting] = {}
        self.boards: dict[Any, dict[int, Any]] = {}
        self.collectives: list[list[str]] = [[] for _ in range(size)]
        self.executing = False
        self.num_steps = 0
        self._random = random.Random(seed)
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[int, str]] = {}
        self._running = set(range(size)) if size > 1 else {0}
        self._progress = 0
        self._failure: BaseException | None = None

    # --- ranks --------------------------------------------------------------------------------

    def run_ranks(self, fn: Callable[[int], Any], limit_s: float = 60.0) -> list[Any]:
        """Run ``fn(rank)`` on every rank and return the results, by rank.

        Raises:
            ExceptionGroup-like: The first rank's error; the others are in its notes.
        """
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def body(rank: int) -> None:
            try:
                self._await_turn(rank)
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    results[rank] = fn(rank)
            # Collected, and raised by the caller.
            except BaseException as error:
                errors[rank] = error
            finally:
                self._leave(rank)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"simulated ranks did not end within {limit_s:g} s")
        if errors:
            rank, error = next(iter(sorted(errors.items())))
            others = {r: repr(e) for r, e in errors.items() if r != rank}
            raise RankFailed(f"rank {rank}: {error!r}; others: {others}", errors) from error
        return results

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()`` is true.

        Raises:
            Deadlock: It never will be.
        """
        while not ready():
            self._waiting[rank] = (self._progress, what)
            if self._stuck():
                waits = "; ".join(f"rank {r} waits for {w}" for r, (_, w) in self._waiting.items())
                self._failure = Deadlock(f"every rank waits and nothing can move: {waits}")
            if self._failure is not None:
                self._wake_all()
                raise self._failure
            self._hand_over(rank)
        self._waiting.pop(rank, None)

    def moved(self) -> None:
        """Note that something happened for which somebody may wait."""
        self._progress += 1

    def _stuck(self) -> bool:
        return all(
            rank in self._waiting and self._waiting[rank][0] == self._progress
            for rank in self._running
        )

    def _hand_over(self, rank: int) -> None:
        with self._condition:
            self._turn = self._next(rank)
            self._condition.notify_all()
        self._await_turn(rank)

    def _next(self, rank: int) -> int:
        others = sorted(self._running - {rank})
        if not others:
            return rank
        if self.mode == "random":
            return self._random.choice(others)
        return next((other for other in others if other > rank), others[0])

    def _await_turn(self, rank: int) -> None:
        with self._condition:
            while self._turn != rank:
                if not self._condition.wait(60.0):
                    raise TimeoutError(f"rank {rank} was never given its turn")

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._running.discard(rank)
            self._waiting.pop(rank, None)
            self._progress += 1
            self._turn = self._next(rank)
            self._condition.notify_all()

    def _wake_all(self) -> None:
        with self._condition:
            self._condition.notify_all()

    # --- steps --------------------------------------------------------------------------------

    def pending(self, storage: int) -> bool:
        """Return whether a queued step touches ``storage``."""
        return any(storage in step.storages for queue in self.queues for step in queue.steps)

    def after_put(self) -> None:
        """Run what the mode wants to run now."""
        if self.executing:
            return
        if self.mode == "eager":
            while any(self._advance(queue) for queue in self.queues):
                pass
        elif self.mode == "random":
            for _ in range(self._random.randrange(3)):
                self._random_step()

    def drive(self, ticket: Ticket) -> bool:
        """Run steps for the sake of ``ticket``; return whether it is reached."""
        if self.mode == "random":
            while not ticket.reached and self._random_step():
                pass
            return ticket.reached
        return self._towards(ticket, set())

    def drain(self) -> None:
        """Run all that can run."""
        while any(self._advance(queue) for queue in list(self.queues)):
            pass

    def _random_step(self) -> bool:
        ready = [queue for queue in self.queues if self._can(queue)]
        return bool(ready) and self._advance(self._random.choice(ready))

    def _can(self, queue: Queue) -> bool:
        if not queue.steps:
            return False
        step = queue.steps[0]
        if step.wait is not None and not step.wait.reached:
            return False
        return step.meeting is None or self._complete(step.meeting)

    def _complete(self, meeting: Meeting) -> bool:
        """Return whether every rank's queue stands at the meeting."""
        return len(meeting.arrived) == meeting.size and all(
            bool(queue.steps) and queue.steps[0].meeting is meeting
            for queue in meeting.arrived.values()
        )

    def _advance(self, queue: Queue) -> bool:
        """Run the queue's first step if it can run."""
        if not self._can(queue):
            return False
        step = queue.steps[0]
        if step.meeting is not None:
            for other in step.meeting.arrived.values():
                other.steps.popleft()
            self.execute(lambda: _gather(step.meeting))  # type: ignore[arg-type]
            step.meeting.done = True
        else:
            queue.steps.popleft()
            if step.run is not None:
                self.execute(step.run)
            if step.reach is not None:
                step.reach.reached = True
                step.reach.time = self.num_steps
        self.num_steps += 1
        self.moved()
        return True

    def execute(self, work: Callable[[], object]) -> None:
        """Do work of a stream, in the modes of a worker; to the recorder it is no compute."""
        before, self.executing = self.executing, True
        try:
            with torch.inference_mode(False), torch.no_grad():
                work()
        finally:
            self.executing = before

    def _towards(self, ticket: Ticket, path: set[int]) -> bool:
        """Run no more than is needed to reach ``ticket``."""
        queue = ticket.queue
        if ticket.reached or queue is None or id(ticket) in path:
            return ticket.reached
        path.add(id(ticket))
        while not ticket.reached and queue.steps:
            if not self._clear_head(queue, path) or not self._advance(queue):
                break
        path.discard(id(ticket))
        return ticket.reached

    def _clear_head(self, queue: Queue, path: set[int]) -> bool:
        """Bring about what the queue's first step waits for, here and on other ranks."""
        step = queue.steps[0]
        if step.wait is not None and not self._towards(step.wait, path):
            return False
        return step.meeting is None or self._bring_to(step.meeting, path)

    def _bring_to(self, meeting: Meeting, path: set[int]) -> bool:
        if len(meeting.arrived) < meeting.size or id(meeting) in path:
            return False
        path.add(id(meeting))
        try:
            for queue in meeting.arrived.values():
                while queue.steps and queue.steps[0].meeting is not meeting:
                    if not self._clear_head(queue, path) or not self._advance(queue):
                        return False
            return self._complete(meeting)
        finally:
            path.discard(id(meeting))


class RankFailed(AssertionError):
    """Raised when a simulated rank raised; ``errors`` has them all, by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


def _gather(meeting: Meeting) -> None:
    shards: Sequence[torch.Tensor] = [
        meeting.parts[rank][1].clone() for rank in range(meeting.size)
    ]
    for rank in range(meeting.size):
        out = meeting.parts[rank][0]
        at = 0
        for shard in shards:
            out[at : at + shard.numel()].copy_(shard)
            at += shard.numel()
