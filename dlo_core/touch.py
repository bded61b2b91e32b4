"""Touching: bringing the pages of a mapping in by several threads, before they are wanted.

Pages that nobody wrote are not there yet. Made one by one, by whoever comes across them, they cost
more than the copy into them. Threads that cannot be had are no error: fewer do the work, at last
the calling one alone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["POPULATE_READ", "POPULATE_WRITE", "Touching", "touch", "touch_threads"]

POPULATE_READ, POPULATE_WRITE = 22, 23
"""Advices to ``madvise`` that bring pages in as a read or a write does; no byte is changed."""
_UNIT_NBYTES = 32 << 20
_MOST_THREADS = 16


def touch_threads() -> int:
    """Return how many threads touch at once where nobody says: one a CPU, at most 16."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0))))


def touch(
    address: int,
    nbytes: int,
    *,
    advice: int = POPULATE_WRITE,
    num_threads: int | None = None,
    madvise: Callable[[int, int, int], int] | None = None,
) -> int:
    """Bring the pages of a range in; no byte is changed.

    Args:
        address: Start of a page.
        nbytes: Bytes of the range.
        advice: ``POPULATE_WRITE`` or ``POPULATE_READ``.
        num_threads: Threads at a time; None: one a CPU, at most 16.
        madvise: Advises a range and returns an error number; None: the system's.

    Returns:
        0, or the error number of what went wrong. A system without these advices is no error: pages
        come in when they are used.
    """
    with Touching(
        address, nbytes, advice=advice, num_threads=num_threads, madvise=madvise
    ) as touching:
        return touching.reach(address + nbytes)


class Touching:
    """A range whose pages come in from its beginning on, while the caller does something else.

    Attributes:
        supported: Whether the system has the advice, as far as it was asked.
    """

    def __init__(
        self,
        address: int,
        nbytes: int,
        *,
        advice: int = POPULATE_WRITE,
        num_threads: int | None = None,
        madvise: Callable[[int, int, int], int] | None = None,
    ) -> None:
        """Start; the arguments are those of ``touch``. Use it as a context, which ends it."""
        self._stop = address + nbytes
        self._starts = range(address, self._stop, _UNIT_NBYTES)
        self._advice = advice
        self._call = madvise or _system_madvise()
        self._changed = threading.Condition()
        self._next = 0
        self._done = [False] * len(self._starts)
        self._reached = 0
        self._code = 0
        self.supported = True
        self._threads: list[threading.Thread] = []
        wanted = touch_threads() if num_threads is None else num_threads
        # One unit is done sooner than a thread starts.
        for number in range(min(wanted, len(self._starts)) if len(self._starts) > 1 else 0):
            thread = threading.Thread(target=self._work, name=f"dlo-touch-{number}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                break
            self._threads.append(thread)

    def reach(self, stop: int) -> int:
        """Block until the pages below ``stop`` are there; return 0 or an error number."""
        units = min(-(-(stop - self._starts.start) // _UNIT_NBYTES), len(self._starts))
        if not self._threads:
            while self._reached < units and self._one():
                pass
            return self._code
        with self._changed:
            self._changed.wait_for(lambda: self._reached >= units or self._code)
            return self._code

    def close(self) -> None:
        """Begin nothing more, and wait for what was begun. Idempotent."""
        with self._changed:
            self._next = len(self._starts)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Touching:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()

    def _work(self) -> None:
        while self._one():
            pass

    def _one(self) -> bool:
        """Touch the next unit; return whether there may be another one."""
        with self._changed:
            number, self._next = self._next, self._next + 1
        if number >= len(self._starts):
            return False
        start = self._starts[number]
        code = self._call(start, min(_UNIT_NBYTES, self._stop - start), self._advice)
        with self._changed:
            if code in (errno.EINVAL, errno.ENOSYS):
                self.supported = False
            elif code:
                self._code = self._code or code
                self._next = len(self._starts)
            self._done[number] = True
            while self._reached < len(self._done) and self._done[self._reached]:
                self._reached += 1
            self._changed.notify_all()
        return True


def _system_madvise() -> Callable[[int, int, int], int]:
    # Unlike mmap.madvise, a call through ctypes lets the other threads run meanwhile.
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def call(address: int, nbytes: int, advice: int) -> int:
        while library.madvise(address, nbytes, advice):
            code = ctypes.get_errno()
            # An interrupted call, or pages that are on their way elsewhere, are tried again.
            if code not in (errno.EINTR, errno.EAGAIN):
                return code
        return 0

    return call
