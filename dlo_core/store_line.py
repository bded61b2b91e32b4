"""The store line: a connection of dlo's own to the job's store, used by one thread.

A call of the store blocks for ever while the process that keeps the store is stopped, and holds the
connection against every other thread. So dlo clones the connection, and whoever asks waits for the
answer no longer than it wants to.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from dlo_core.exiting import JoinedAtExit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import timedelta

    from torch._C._distributed_c10d import Store

__all__ = ["StoreGone", "StoreLine", "StoreSilent"]

T = TypeVar("T")
_EXIT_S = 1.0
_at_exit = JoinedAtExit(_EXIT_S)
_BROKEN = (
    "the connection to the store of the job broke: the process that keeps it (the launcher, or "
    "global rank 0) ended ({})"
)


class StoreSilent(RuntimeError):
    """Raised when the job's store did not answer in time."""


class StoreGone(StoreSilent):
    """Raised when the job's store will never answer again."""


class StoreLine:
    """Asks the store, in a thread of its own; what is asked is done in order."""

    def __init__(self, store: Any, patience_s: float) -> None:
        """Clone the connection and start the thread.

        Args:
            store: Of the job; kept alive, for this process may be the one that serves it.
            patience_s: How long to wait for an answer.
        """
        self._store = store
        self._patience_s = patience_s
        self._loop = _Loop(store.clone())
        self._finalizer = weakref.finalize(self, self._loop.stop)
        self._finalizer.atexit = False

    def ask(self, work: Callable[[Store], T], timeout_s: float | None = None) -> T:
        """Return what ``work`` returns when it is given the store.

        Raises:
            StoreSilent: The store did not answer in time.
            StoreGone: The connection broke, or the line is closed.
            RuntimeError: What ``work`` raised, in a line.
        """
        limit_s = self._patience_s if timeout_s is None else timeout_s
        call = _Call(work)
        self._loop.put(call)
        if not call.done.wait(limit_s):
            raise StoreSilent(
                f"the store of the job did not answer for {limit_s:g} s: the process that keeps it "
                "(the launcher, or global rank 0) is stopped or cannot be reached"
            )
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def post(self, work: Callable[[Store], object]) -> Callable[[], bool]:
        """Have ``work`` done soon, whatever comes of it; return what tells whether it is done."""
        call = _Call(work)
        self._loop.put(call)
        return call.done.is_set

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self.ask(lambda store: store.set(key, value))

    def get(self, key: str) -> bytes:
        """Return the value of a key that is there."""
        return self.ask(lambda store: store.get(key))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return self.ask(lambda store: store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait for keys."""
        seconds = timeout.total_seconds() + self._patience_s
        self.ask(lambda store: store.wait(list(keys), timeout), seconds)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self.ask(lambda store: store.delete_key(key))

    def close(self, limit_s: float = _EXIT_S) -> None:
        """Do what was asked so far, for ``limit_s`` at most, and end the thread. Idempotent."""
        self._finalizer()
        if self._loop.thread is not threading.current_thread():
            self._loop.thread.join(limit_s)


class _Call:
    """One thing to ask."""

    def __init__(self, work: Callable[[Store], object]) -> None:
        self._work: Callable[[Store], object] | None = work
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None

    def run(self, store: Store) -> bool:
        """Do it, and return whether the store is still there."""
        work, self._work = self._work, None
        there = True
        try:
            if work is not None:
                self.result = work(store)
        except Exception as error:  # whichever kind of store it is
            there = not isinstance(error, dist.DistNetworkError)
            # Behind the first line torch tells where in its own code it happened.
            text = str(error).partition("\n")[0]
            self.error = RuntimeError(text) if there else StoreGone(_BROKEN.format(text))
        del work
        self.done.set()
        return there

    def drop(self) -> None:
        self.error = StoreGone("the connection to the store of the job is closed or broken")
        self.done.set()


class _Loop:
    """The thread; it never holds the line, so that can be collected."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._ended = False
        self.thread = threading.Thread(target=self._run, name="dlo-store", daemon=True)
        _at_exit.start(self)

    def put(self, call: _Call) -> None:
        self._calls.put(call)
        if self._ended:
            self._drain()

    def stop(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        there = True
        while there and (call := self._calls.get()) is not None:
            # A connection that broke does not come back, and says so at length in the log.
            there = call.run(self._store)
            del call
        self._ended = True
        self._drain()

    def _drain(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.drop()
