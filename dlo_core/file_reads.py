"""Reads of a file: a run of its bytes into several memories, through the page cache or past it."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["MAX_OUTS", "Scratch", "check_direct", "read_buffered", "read_direct"]

# What the system takes in one call.
MAX_OUTS = 1024
_ALIGNED = 4096
_DIRECT_NBYTES = 8 << 20


class Scratch:
    """Memory of one thread, kept from one read to the next."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self._memory: list[memoryview] = [memoryview(b""), memoryview(b"")]

    def take(self, nbytes: int) -> memoryview:
        """Return ``nbytes`` bytes; what they held before is lost."""
        return self._take(0, nbytes)

    def aligned(self) -> memoryview:
        """Return memory that begins and ends where direct reads demand it."""
        return self._take(1, _DIRECT_NBYTES)

    def _take(self, which: int, nbytes: int) -> memoryview:
        if self._memory[which].nbytes < nbytes:
            self._memory[which] = memoryview(mmap.mmap(-1, nbytes))
        return self._memory[which][:nbytes]


def read_buffered(
    descriptor: int, offset: int, outs: Sequence[memoryview], scratch: Scratch
) -> int:
    """Read from ``offset`` on until all memories are full or the file ends; return the bytes.

    Args:
        descriptor: The open file.
        offset: First byte.
        outs: Where the bytes go, one behind the other.
        scratch: Not needed.
    """
    left, done = list(outs), 0
    while left:
        got = os.preadv(descriptor, left, offset + done)
        if got == 0:
            break
        done += got
        while left and got >= len(left[0]):
            got -= len(left.pop(0))
        if got:
            left[0] = left[0][got:]
    return done


def read_direct(descriptor: int, offset: int, outs: Sequence[memoryview], scratch: Scratch) -> int:
    """Read as ``read_buffered`` does, past the page cache and through aligned memory.

    Args:
        descriptor: The file, opened for direct reads.
        offset: First byte.
        outs: Where the bytes go, one behind the other.
        scratch: The calling thread's.
    """
    room = scratch.aligned()
    left, done, wanted = list(outs), 0, sum(map(len, outs))
    while done < wanted:
        at = offset + done
        begin = at // _ALIGNED * _ALIGNED
        end = min(begin + len(room), -(-(offset + wanted) // _ALIGNED) * _ALIGNED)
        # The last block of a file may be shorter.
        got = os.preadv(descriptor, [room[: end - begin]], begin)
        fresh = room[at - begin : min(got, offset + wanted - begin)]
        if not fresh:
            break
        done += len(fresh)
        while fresh:
            part = min(len(left[0]), len(fresh))
            # A copy that lets the interpreter go.
            np.copyto(
                np.frombuffer(left[0][:part], np.uint8), np.frombuffer(fresh[:part], np.uint8)
            )
            fresh = fresh[part:]
            left[0] = left[0][part:]
            if not left[0]:
                left.pop(0)
    return done


def _copy(out: memoryview, source: memoryview) -> None:
    """Copy as numpy does, which lets the interpreter go."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))


def check_direct(path: Path) -> None:
    """Check that the file system takes direct reads.

    Raises:
        ConfigError: It does not; names the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        try:
            os.preadv(descriptor, [Scratch().aligned()[:_ALIGNED]], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"direct_io=True cannot be had for {str(path)!r}: {error.strerror or error}; its file "
            "system has no direct reads: use direct_io=False"
        ) from error
