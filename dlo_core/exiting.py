"""Exiting: the threads that are stopped and joined when the interpreter exits.

A daemon that is in the middle of torch's work then would abort the process. A forked child has
none of them.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import threading

__all__ = ["JoinedAtExit"]


class _Loop(Protocol):
    """What runs in a thread until it is stopped."""

    thread: threading.Thread

    def stop(self) -> None:
        """End the thread soon."""


class JoinedAtExit:
    """Loops, held weakly, each of which ends before the interpreter does, if it can in time."""

    def __init__(self, limit_s: float) -> None:
        """Begin with none.

        Args:
            limit_s: For how long to wait for all of them together.
        """
        self._limit_s = limit_s
        self._loops: weakref.WeakSet[_Loop] = weakref.WeakSet()
        atexit.register(self.stop)
        os.register_at_fork(after_in_child=self._loops.clear)

    def start(self, loop: _Loop) -> None:
        """Start the thread of ``loop``, which is stopped at exit."""
        self._loops.add(loop)
        loop.thread.start()

    def stop(self) -> None:
        """Stop and join them all."""
        for loop in list(self._loops):
            loop.stop()
        deadline = time.monotonic() + self._limit_s
        for loop in list(self._loops):
            if loop.thread.is_alive():
                loop.thread.join(max(0.0, deadline - time.monotonic()))
