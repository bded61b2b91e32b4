"""An inline worker: stands for the thread that reads, and runs when the test says.

``late``: a job runs when the host waits for it; ``eager``: when it is given; ``random``: at a
moment drawn from a seed. So every order in which a thread could come is produced, again and again.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING

from dlo_core.worker import Job

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MODES", "InlineWorker"]

MODES = ("late", "eager", "random")


class _InlineJob(Job):
    def __init__(self, work: Callable[[], None], worker: InlineWorker) -> None:
        super().__init__(work, None)
        self._worker = worker

    def wait(self, timeout_s: float) -> BaseException | None:
        """Run what comes before it, and it."""
        while not self._done.is_set():
            self._worker.step()
        return self.error


class InlineWorker:
    """A worker without a thread."""

    stopping = staticmethod(lambda: False)

    def __init__(self, mode: str = "late", seed: int = 0) -> None:
        self._mode = mode
        self._random = random.Random(seed)
        self._jobs: deque[_InlineJob] = deque()
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> _InlineJob:
        """Queue ``work``; run as much as the mode says."""
        job = _InlineJob(work, self)
        self._jobs.append(job)
        while self._jobs and (
            self._mode == "eager" or (self._mode == "random" and self._random.random() < 0.4)
        ):
            self.step()
        return job

    def step(self) -> None:
        """Run the next job."""
        job = self._jobs.popleft()
        if self._error is not None:
            job.drop(self._error)
            return
        job.run()
        self._error = job.error

    def close(self, limit_s: float = 0.0) -> bool:
        """Drop what is not begun."""
        while self._jobs:
            self._jobs.popleft().drop(self._error)
        return True
