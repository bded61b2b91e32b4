"""The page cache: which pages of a file the system had in memory, and giving back the others.

Reading tens of gigabytes once would push out of memory what other programs use. So what was not
there before is given back after it was read; what was there stays.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Any

import numpy as np

__all__ = ["CachedPages", "advise", "cached_pages"]

_PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def cached_pages(descriptor: int, nbytes: int) -> Any:
    """Return which pages of a file are in memory, as an array of bool.

    A system that does not tell says that all are; nothing is then given back.

    Args:
        descriptor: The open file.
        nbytes: Its size.
    """
    count = -(-nbytes // _PAGE)
    if not count:
        return np.zeros(0, dtype=bool)
    try:
        with mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_READ) as pages:
            # Only its address; no page is touched.
            seen = np.frombuffer(pages, dtype=np.uint8)
            there = np.zeros(count, dtype=np.uint8)
            failed = _libc.mincore(
                ctypes.c_void_p(seen.ctypes.data),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(there.ctypes.data),
            )
            del seen
    except (OSError, ValueError, AttributeError):
        return np.ones(count, dtype=bool)
    return np.ones(count, dtype=bool) if failed else (there & 1).astype(bool)


def advise(descriptor: int, start: int, nbytes: int, advice: str) -> None:
    """Advise the system about a range of a file; one that takes no advice is no error.

    Args:
        descriptor: The open file.
        start: First byte.
        nbytes: Length; 0: to the end.
        advice: Name of a constant of ``os``.
    """
    # Not every system and file system has it.
    with suppress(OSError, AttributeError):
        os.posix_fadvise(descriptor, start, nbytes, getattr(os, advice))


class CachedPages:
    """What of one file was in memory before, and what was read since."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        """Note what is in memory now.

        Args:
            descriptor: The open file; it must stay open.
            nbytes: Its size.
        """
        self._descriptor = descriptor
        self._before = cached_pages(descriptor, nbytes)
        self._read = np.zeros(len(self._before), dtype=bool)

    def fetch(self, start: int, stop: int) -> None:
        """Tell the system to read bytes ``[start, stop)`` now, if they were not in memory."""
        if not self._before[start // _PAGE : -(-stop // _PAGE)].all():
            self.read(start, stop)
            advise(self._descriptor, start, stop - start, "POSIX_FADV_WILLNEED")

    def read(self, start: int, stop: int) -> None:
        """Note that bytes ``[start, stop)`` were read."""
        self._read[start // _PAGE : -(-stop // _PAGE)] = True

    def give_back(self) -> None:
        """Tell the system that what was read and was not in memory before is not needed."""
        ours = np.flatnonzero(np.diff(np.concatenate(([0], self._read & ~self._before, [0]))))
        for first, end in zip(ours[::2].tolist(), ours[1::2].tolist(), strict=True):
            length = (end - first) * _PAGE
            advise(self._descriptor, first * _PAGE, length, "POSIX_FADV_DONTNEED")
        self._read[:] = False
