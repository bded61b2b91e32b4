"""A worker: one thread that does jobs of the host in order, and whom the host can wait for."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING

import torch

from dlo_core.exiting import JoinedAtExit

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Job", "Worker"]

_SLICE_S = 0.1
_EXIT_S = 2.0
_at_exit = JoinedAtExit(_EXIT_S)
_numbers = itertools.count()


class Job:
    """One piece of work, done or not, and with what error."""

    def __init__(self, work: Callable[[], None], thread: threading.Thread | None) -> None:
        """Belong to ``thread``."""
        self._work: Callable[[], None] | None = work
        self._thread = thread
        self._done = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, in the worker; let go of what it holds before anybody hears of it."""
        work, self._work = self._work, None
        try:
            if work is not None:
                work()
        # Whatever happens in the worker must reach the host that waits.
        except BaseException as error:
            # Its frames hold what the work held.
            self._error = error.with_traceback(None)
        del work
        self._done.set()

    @property
    def error(self) -> BaseException | None:
        """What it ended with, if with an error."""
        return self._error

    def drop(self, error: BaseException | None) -> None:
        """End it undone, for what stopped an earlier one."""
        self._work = None
        self._error = error or RuntimeError("the offload was closed before the bytes came")
        self._done.set()

    def wait(self, timeout_s: float) -> BaseException | None:
        """Block until it is done, and return what stopped it; raised, it would keep frames.

        Raises:
            TimeoutError: It took longer.
            RuntimeError: The worker is gone.
        """
        deadline = time.monotonic() + timeout_s
        while not self._done.wait(min(_SLICE_S, timeout_s)):
            if self._thread is not None and not self._thread.is_alive():
                raise RuntimeError(
                    "the thread that reads the checkpoint is gone (the process was forked after "
                    "offload, or the interpreter is exiting); offload again in this process"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {timeout_s:g} s")
        return self._error


class Worker:
    """Does jobs in the order in which they are given, in a thread of its own.

    After a job that failed, later ones are dropped.
    """

    def __init__(self) -> None:
        """Start the thread."""
        self._loop = _Loop()
        weakref.finalize(self, self._loop.stop)

    def submit(self, work: Callable[[], None]) -> Job:
        """Queue ``work``."""
        job = Job(work, self._loop.thread)
        self._loop.jobs.put(job)
        return job

    @property
    def stopping(self) -> Callable[[], bool]:
        """What tells a long job that it should end."""
        return self._loop.is_stopping

    def close(self, limit_s: float = _EXIT_S) -> bool:
        """Drop what is not begun, and return whether the thread ended within ``limit_s``."""
        self._loop.stop()
        if self._loop.thread.is_alive() and self._loop.thread is not threading.current_thread():
            self._loop.thread.join(limit_s)
        return not self._loop.thread.is_alive()


class _Loop:
    """The thread; it never holds the worker, so that can be collected."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        name = f"dlo-worker-{next(_numbers)}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        _at_exit.start(self)

    def is_stopping(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()
        self.jobs.put(None)

    def _run(self) -> None:
        failed: BaseException | None = None
        # Grad and inference modes are thread-local.
        with torch.inference_mode(False), torch.no_grad():
            while True:
                job = self.jobs.get()
                if job is None:
                    break
                if failed is not None or self._stopped.is_set():
                    job.drop(failed)
                else:
                    job.run()
                    failed = job.error
                del job
        while not self.jobs.empty():
            left = self.jobs.get()
            if left is not None:
                left.drop(failed)
