"""A world: the streams of one or several simulated ranks in one process, run one step at a time.

Nothing here runs beside anything else. A stream is a queue; who runs what, and when, is decided by
the mode, so that every order that a device could choose can be produced, and produced again:

- ``late``: work runs only when something waits for it, and no more than that needs;
- ``eager``: work runs as early as its own waits allow;
- ``random``: a seeded choice among all steps that are possible.

A world may hold several ranks, which take turns (``turns.py``); over gloo each process has a world
of its own, and whatever waits for other processes runs only where something needs it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dlo_core.cpu_stream import StreamError
from dlo_core.testing.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from dlo_core.testing.steps import Meeting, Queue, Ticket

__all__ = ["MODES", "World"]

MODES = ("late", "eager", "random")


class World(Turns):
    """All queues and ranks, and the mode in which they run.

    Attributes:
        collectives: Names of the collectives of each simulated rank, in order.
        num_steps: Steps that ran.
        schedule: Whose they were, in order.
        uses: How many queued steps touch a storage, by its address.
    """

    def __init__(
        self,
        size: int = 1,
        mode: str = "late",
        seed: int = 0,
        *,
        early: Collection[str] = (),
    ) -> None:
        """Make a world without queues.

        Args:
            size: Number of ranks in this process; over gloo each process is a world of one.
            mode: One of ``MODES``.
            seed: Of the choices in ``random`` mode and of the order of ranks.
            early: In ``late`` mode, streams that run as early as their waits allow all the same:
                ``"stream 0"`` is the first side stream that a backend made (dlo's copy stream),
                ``"stream 1"`` the second (its comm stream), ``"compute"`` the compute stream of a
                backend whose host runs ahead.

        Raises:
            ValueError: There is no such mode, or ``early`` is given in another one than ``late``.
        """
        if mode not in MODES:
            raise ValueError(f"mode must be one of {MODES}; got {mode!r}")
        if early and mode != "late":
            raise ValueError(f"early= is for mode 'late'; got mode {mode!r}")
        rng = random.Random(seed)
        super().__init__(size, rng if mode == "random" else None)
        self.mode = mode
        self.queues: list[Queue] = []
        self.meetings: dict[Any, Meeting] = {}
        self.boards: dict[Any, dict[int, Any]] = {}
        self.collectives: list[list[str]] = [[] for _ in range(size)]
        self.num_steps = 0
        self.schedule: list[str] = []
        self.uses: Counter[int] = Counter()
        self.lock = threading.RLock()
        self._early = frozenset(early)
        self._held = False
        self._is_driven = False
        self._thread = threading.local()
        self._random = rng

    @property
    def executing(self) -> bool:
        """Whether this thread does a stream's work now."""
        return getattr(self._thread, "executing", False)

    def pending(self, storage: int) -> bool:
        """Return whether a queued step touches ``storage``."""
        return self.uses[storage] > 0

    def after_put(self) -> None:
        """Run what the mode wants to run now."""
        if self.executing or self._held:
            return
        if self.mode == "random":
            for _ in range(self._random.randrange(3)):
                self._random_step(None)
        else:
            self._run_early()

    def drive(self, ticket: Ticket) -> bool:
        """Run steps for the sake of ``ticket``; return whether it is reached."""
        with self.lock:
            driven, self._is_driven = self._is_driven, True
            try:
                if self.mode == "random" and not self._held:
                    while not ticket.reached and self._random_step(ticket):
                        pass
                    return ticket.reached
                self._run_early()
                return self._towards(ticket, set())
            finally:
                self._is_driven = driven

    def drain(self) -> None:
        """Run all that can run."""
        with self.lock:
            while any(self._advance(queue) for queue in self.queues if self._is_free(queue)):
                pass
            # What is left waits for other processes; they come to it in the same order.
            blocked = next((queue for queue in self.queues if self._can(queue)), None)
            if blocked is not None:
                self._advance(blocked)
                self.drain()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all streams inside, but for what is driven: so chance and time have no say."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before
            self.after_put()

    def _run_early(self) -> None:
        """Run the streams that are as early as may be."""
        if self._held or not (self._early or self.mode == "eager"):
            return
        early = [q for q in self.queues if self.mode == "eager" or q.role in self._early]
        while any(self._step(q) for q in early if self._is_free(q)) or any(
            self._step(q) for q in early if self._runs_ahead(q)
        ):
            pass

    def _random_step(self, ticket: Ticket | None) -> bool:
        """Run one of the steps that can run; without a ticket none that waits for peers."""
        needed = None if ticket is None else _head_before(ticket)
        ready = [q for q in self.queues if self._is_free(q) or (self._is_driven and self._can(q))]
        while ready:
            queue = self._random.choice(ready)
            if queue is needed or self._is_free(queue) or self._runs_ahead(queue):
                return self._advance(queue)
            ready.remove(queue)
        return False

    def _is_free(self, queue: Queue) -> bool:
        """Return whether the queue's first step can run and waits for no other process."""
        return self._can(queue) and queue.steps[0].come is None

    def _runs_ahead(self, queue: Queue) -> bool:
        """Return whether other processes come to the queue's first step, which nothing needs."""
        if not self._is_driven or not self._can(queue):
            return False
        come = queue.steps[0].come
        return come is not None and come()

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
        """Run the queue's first step if it can run, and what is early after it."""
        if not self._step(queue):
            return False
        if self.mode != "random":
            self._run_early()
        return True

    def _step(self, queue: Queue) -> bool:
        """Run the queue's first step if it can run."""
        if not self._can(queue):
            return False
        step, queues = queue.steps[0], [queue]
        if step.meeting is not None:
            queues = list(step.meeting.arrived.values())
        for each in queues:
            self.uses.subtract(each.steps.popleft().storages)
        self.num_steps += 1
        self.schedule.append(queue.name)
        try:
            if step.wait is not None:
                step.wait.check()
            if step.meeting is not None:
                self.execute(step.meeting.gather)
            if step.run is not None:
                self.execute(step.run)
        # Kept for whoever waits for the work.
        except Exception as error:
            for each in queues:
                each.fail((isinstance(error, StreamError) and error.__cause__) or error)
        if step.reach is not None:
            step.reach.reach(self.num_steps, queue.error)
        self.moved()
        return True

    def execute(self, work: Callable[[], object]) -> None:
        """Do work of a stream, in the modes of a worker; to the recorder it is no compute."""
        before, self._thread.executing = self.executing, True
        try:
            with torch.inference_mode(False), torch.no_grad():
                work()
        finally:
            self._thread.executing = before

    def _towards(self, ticket: Ticket, path: set[int]) -> bool:
        """Run no more than is needed to reach ``ticket``."""
        queue = ticket.queue
        if ticket.reached or queue is None or id(ticket) in path:
            return ticket.reached
        path.add(id(ticket))
        while not ticket.reached and queue.steps:
            if not self._bring_on(queue, path):
                break
        path.discard(id(ticket))
        return ticket.reached

    def _bring_on(self, queue: Queue, path: set[int]) -> bool:
        """Run the queue's first step and what it needs, here and on other ranks."""
        step = queue.steps[0]
        if step.wait is not None and not self._towards(step.wait, path):
            return False
        if step.meeting is not None and not self._bring_to(step.meeting, path):
            return False
        # It may have run meanwhile, being early.
        return not queue.steps or queue.steps[0] is not step or self._advance(queue)

    def _bring_to(self, meeting: Meeting, path: set[int]) -> bool:
        if len(meeting.arrived) < meeting.size or id(meeting) in path:
            return False
        path.add(id(meeting))
        try:
            for queue in meeting.arrived.values():
                while queue.steps and queue.steps[0].meeting is not meeting:
                    if not self._bring_on(queue, path):
                        return False
            return self._complete(meeting)
        finally:
            path.discard(id(meeting))


def _head_before(ticket: Ticket) -> Queue | None:
    """Return the queue whose first step is the next that has to run before ``ticket``."""
    seen: set[int] = set()
    while ticket.queue is not None and ticket.queue.steps and id(ticket) not in seen:
        seen.add(id(ticket))
        head = ticket.queue.steps[0]
        if head.wait is None or head.wait.reached:
            return ticket.queue
        ticket = head.wait
    return None
