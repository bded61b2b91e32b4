"""Registered pages: host memory that a driver locked, in pieces, and how it is let go again.

[Note: letting go]
The pages stay mapped as long as they are registered: what registers them holds whatever maps them.
``release()`` is for an owner who knows that no copy is under way. A registration that is merely
forgotten, or still there when the interpreter ends, waits for the device first; if the device does
not come to rest within the limit (a gather whose peer is gone), the pages are left registered and
mapped, which costs nothing at an exit, while letting go would let the device read pages that are
somebody else's. After the context is gone there is nothing to unlock, and the driver's answer is
dropped. In a forked child nothing is done: the pages are the parent's.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import weakref
from bisect import bisect_left, bisect_right
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from dlo_core.errors import HostMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "PAGE_NBYTES",
    "PIECE_NBYTES",
    "HostRegistration",
    "RefusedError",
    "Registrar",
    "whole_pages",
]

PAGE_NBYTES = os.sysconf("SC_PAGESIZE")
# While one piece is registered the pages of the next ones come in. A single call over 512 GiB fails
# on some drivers and leaves its error behind.
PIECE_NBYTES = 1 << 30
SETTLE_S = 10.0

_logger = logging.getLogger("dlo")


class Registrar(Protocol):
    """What locking host memory in place takes of a driver; every code is 0 or an error."""

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock a range."""

    def host_unregister(self, address: int) -> int:
        """Unlock the range that begins at ``address``."""

    def take_error(self) -> int:
        """Return the error that this thread was left with, and clear it."""

    def describe(self, code: int) -> str:
        """Return the text of an error code."""

    def synchronize(self) -> int:
        """Block until the device is idle."""


class RefusedError(HostMemoryError):
    """Raised when the driver does not take a registration; says its reason alone."""


def whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """Return the first and the end address of the pages that a range touches."""
    start = address // PAGE_NBYTES * PAGE_NBYTES
    return start, -(-(address + nbytes) // PAGE_NBYTES) * PAGE_NBYTES


class _Pages:
    """The pieces of one range; outlives whoever asked for it until they are unlocked."""

    def __init__(self, runtime: Registrar, keep: Any) -> None:
        self._runtime = runtime
        self._keep = keep
        self._pieces: list[int] = []
        self._pid = os.getpid()

    def lock(
        self,
        start: int,
        stop: int,
        *,
        flags: int,
        piece_nbytes: int,
        reach: Callable[[int], object],
    ) -> None:
        """Register every piece once its pages are reached, or none at all."""
        try:
            for piece in range(start, stop, piece_nbytes):
                nbytes = min(piece_nbytes, stop - piece)
                reach(piece + nbytes)
                code = self._runtime.host_register(piece, nbytes, flags)
                if code:
                    # Otherwise it comes up again as the error of the next kernel.
                    self._runtime.take_error()
                    where = f", at byte {piece - start:,}" if stop - start > piece_nbytes else ""
                    reason = f"error {code}, {self._runtime.describe(code)}{where}"
                    raise RefusedError(reason)
                self._pieces.append(piece)
        except BaseException:
            self.unlock()
            raise

    def unlock(self) -> None:
        """Unregister in reverse order, then let the mapping go. Idempotent."""
        pieces, self._pieces = self._pieces, []
        if pieces and os.getpid() == self._pid:
            for piece in reversed(pieces):
                code = self._runtime.host_unregister(piece)
                if code:
                    self._runtime.take_error()
                    _logger.debug("unregistering %#x gave error %d; dropped", piece, code)
        self._keep = None

    def unlock_when_idle(self) -> None:
        """Unlock once the device rests; see [Note: letting go]."""
        if not self._pieces or os.getpid() != self._pid:
            return
        if _waiter.run(self._runtime.synchronize, SETTLE_S):
            self.unlock()
        else:
            _left.append(self)


class _Waiter:
    """A thread that waits in the place of another one, which gives up after a while.

    It is there before it is needed: Python starts no thread any more once it ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = -1
        self._asked: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]

    def start(self) -> None:
        """Start the thread, once a process."""
        with self._lock:
            if self._pid == os.getpid():
                return
            self._asked = queue.SimpleQueue()
            threading.Thread(
                target=self._serve, args=(self._asked,), name="dlo-waiter", daemon=True
            ).start()
            self._pid = os.getpid()

    def run(self, wait: Callable[[], object], limit_s: float) -> bool:
        """Return whether ``wait`` came back within ``limit_s``."""
        done = threading.Event()
        self._asked.put((wait, done))
        return done.wait(limit_s)

    @staticmethod
    def _serve(asked: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]]) -> None:
        while True:
            wait, done = asked.get()
            # A context that is gone has nothing to wait for.
            with suppress(Exception):
                wait()
            done.set()


_waiter = _Waiter()
# What could not be unlocked stays mapped for the rest of the process.
_left: list[_Pages] = []


class HostRegistration:
    """Host memory that is page-locked in place until it is released.

    Attributes:
        nbytes: Bytes of the pages that are locked: all that the memory touches; 0 once released.
        seams: Addresses inside of it at which one piece ends and the next one begins, in order.
    """

    def __init__(
        self,
        runtime: Registrar,
        address: int,
        nbytes: int,
        *,
        keep: Any,
        flags: int = 0,
        piece_nbytes: int = PIECE_NBYTES,
        reach: Callable[[int], object] = lambda _: None,
    ) -> None:
        """Lock the pages that the range touches.

        Args:
            runtime: Does it.
            address: Where the memory begins.
            nbytes: How much of it there is.
            keep: Whatever maps it; held until it is unlocked.
            flags: Of the registration.
            piece_nbytes: The most that one call registers; whole pages.
            reach: Called with the end of each piece before it is registered; may raise.

        Raises:
            RefusedError: The driver refused; nothing stays locked.
        """
        start, stop = whole_pages(address, nbytes)
        self.seams = tuple(range(start + piece_nbytes, stop, piece_nbytes))
        _waiter.start()
        self._pages = _Pages(runtime, keep)
        self._pages.lock(start, stop, flags=flags, piece_nbytes=piece_nbytes, reach=reach)
        self.nbytes = stop - start
        # Runs when this object goes, and at exit in the reverse order of making.
        self._finalizer = weakref.finalize(self, self._pages.unlock_when_idle)

    def seams_in(self, address: int, nbytes: int) -> tuple[int, ...]:
        """Return the seams inside of a range."""
        seams = self.seams
        return seams[bisect_right(seams, address) : bisect_left(seams, address + nbytes)]

    def release(self) -> None:
        """Unlock the pages; no copy may be under way. Idempotent."""
        self._finalizer.detach()
        self._pages.unlock()
        self.nbytes, self.seams = 0, ()

    def __repr__(self) -> str:
        """Show how much is locked."""
        return f"HostRegistration({self.nbytes:,} bytes locked)"
