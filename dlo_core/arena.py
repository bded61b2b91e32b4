"""An arena: memory for many runs of bytes, in as few buffers as an exact size allows.

An allocator that rounds what it locks up to a power of two would take up to twice the bytes. So
it is asked for powers of two: the total, cut into descending ones. A run may then lie across two
buffers, in parts.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.feed import Part
    from dlo_core.interface import HostBuffer, PinnedAllocator

__all__ = ["Arena", "cut"]

# A power of two and a page: rounded up it takes more than the two pages that may lie at its ends.
_PROBE_NBYTES = 5 * mmap.PAGESIZE
# What the last buffer may be too large by, as a part of the total.
_SLACK = 256


def cut(nbytes: int) -> list[int]:
    """Return descending powers of two that hold ``nbytes``, at most 1/256 or a page too many."""
    least = max(mmap.PAGESIZE, 1 << max(0, (nbytes // _SLACK).bit_length() - 1))
    left = -(-nbytes // least) * least
    pieces = []
    while left:
        pieces.append(1 << (left.bit_length() - 1))
        left -= pieces[-1]
    return pieces


class Arena:
    """Runs of given sizes, one behind the other."""

    def __init__(self, allocator: PinnedAllocator, sizes: Sequence[int]) -> None:
        """Allocate.

        Args:
            allocator: Makes the buffers.
            sizes: Bytes of each run.

        Raises:
            HostMemoryError: The memory cannot be had; what was had of it is given back.
        """
        self._ranges: list[tuple[int, int]] = []
        stop = 0
        for nbytes in sizes:
            self._ranges.append((stop, stop + nbytes))
            stop += nbytes
        self.nbytes = stop
        self.buffers: list[HostBuffer] = []
        try:
            for nbytes in cut(stop) if _rounds(allocator, stop) else [stop]:
                self.buffers.append(allocator.allocate(nbytes))
        except BaseException:
            self.release()
            raise

    @property
    def locked_nbytes(self) -> int:
        """Bytes that the system locked."""
        return sum(buffer.locked_nbytes for buffer in self.buffers)

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return run ``index`` as (place in the run, bytes there), by ascending place."""
        start, stop = self._ranges[index]
        found: list[Part] = []
        base = 0
        for buffer in self.buffers:
            low, high = max(start, base), min(stop, base + buffer.tensor.nbytes)
            if low < high:
                found.append((low - start, buffer.tensor[low - base : high - base]))
            base += buffer.tensor.nbytes
        return tuple(found) or ((0, self.buffers[0].tensor[:0]),)

    def release(self) -> None:
        """Give the buffers back. Idempotent."""
        for buffer in self.buffers:
            buffer.release()

    def __repr__(self) -> str:
        """Show how much there is."""
        return (
            f"Arena({len(self._ranges)} runs, {self.nbytes:,} bytes, {len(self.buffers)} buffers)"
        )


def _rounds(allocator: PinnedAllocator, nbytes: int) -> bool:
    """Return whether ``allocator`` locks more than it is asked for, beyond whole pages."""
    if nbytes <= _PROBE_NBYTES:
        return False
    probe = allocator.allocate(_PROBE_NBYTES)
    try:
        return probe.locked_nbytes > _PROBE_NBYTES + 2 * mmap.PAGESIZE
    finally:
        probe.release()
