"""The crew: a few threads that take jobs in their order, and end whatever happens.

See [Note: reading] in reading.py.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import TYPE_CHECKING, Protocol

from dlo_core.file_reads import Scratch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Job", "Listener", "run_in_threads"]

_START_S = 1.0


class Job(Protocol):
    """One call: some bytes of the model."""

    @property
    def done_nbytes(self) -> int:
        """Bytes of the model that are done with it."""

    def announce(self) -> None:
        """Tell the system that it will be run soon."""

    def run(self, scratch: Scratch) -> None:
        """Do it, with memory of the calling thread."""


class Listener(Protocol):
    """Is told how far the work is."""

    def expect(self, nbytes: int) -> None:
        """Take ``nbytes`` as the total."""

    def add(self, nbytes: int) -> None:
        """Count ``nbytes``; an exception cancels the work."""


def run_in_threads(jobs: Sequence[Job], report: Listener, threads: int) -> None:
    """Run the jobs by so many threads; the calling one reports, and ends after all of them.

    Raises:
        DloError: The first error of a job.
    """
    crew = _Crew(jobs)
    try:
        crew.start(threads)
        for nbytes in crew.done():
            report.add(nbytes)
    finally:
        crew.stop()


class _Crew:
    """Threads that take jobs in their order."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = list(jobs)
        self._next = self._ahead = 0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._told: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, count: int) -> None:
        self._ahead = count
        for number in range(count):
            thread = threading.Thread(target=self._work, name=f"dlo-read-{number}", daemon=True)
            # First: an interrupt may come inside of start().
            self._threads.append(thread)
            thread.start()

    def done(self) -> Iterator[int]:
        """Yield the bytes of each job that is done; raise the first error of a thread."""
        left = len(self._threads)
        while left:
            told = self._told.get()
            if told is None:
                left -= 1
            elif isinstance(told, BaseException):
                raise told
            else:
                yield told

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            # One that was interrupted while it was started may have to begin before it can end.
            deadline = time.monotonic() + _START_S
            while not thread.is_alive() and thread in threading.enumerate():
                if time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            if thread.is_alive():
                thread.join()
        self._threads = []

    def _work(self) -> None:
        scratch = Scratch()
        try:
            while not self._stopped.is_set():
                with self._lock:
                    number, self._next = self._next, self._next + 1
                if number >= len(self._jobs):
                    break
                if number + self._ahead < len(self._jobs):
                    self._jobs[number + self._ahead].announce()
                job = self._jobs[number]
                job.run(scratch)
                self._told.put(job.done_nbytes)
        # The caller's thread must hear of it, whatever it is.
        except BaseException as error:
            self._stopped.set()
            self._told.put(error)
        self._told.put(None)
