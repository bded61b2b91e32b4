"""A shard: the slice of a block's run of bytes that one rank keeps on its host.

[Note: trailer and spill]
A mix of equal-sized blocks is something that no comm library notices, so every rank's slice ends
in a 16-byte trailer that says whose it is; the gathered trailers are compared on the device. But
the gathered run must be the block, without holes. So the bytes that the trailers displace (the last
16 of every slice but the last one's) travel in the *spill*, near the end of the last slice, and
are put back after the comparison::

    slice 0                 slice 1                 slice 2 (last)
    [data ........ trailer] [data ........ trailer] [data .. padding | spill 0 | spill 1 | trailer]
                      ^-----------------------^---------------------'----------'

Pure: sizes and ranges only. A group of one rank has neither.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlo_core.layout import align_up

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TRAILER_NBYTES", "Piece", "ShardPlan", "trailer", "trailers_nbytes"]

TRAILER_NBYTES = 16


def trailer(digest: bytes, block: int, rank: int) -> bytes:
    """Return the 16 bytes that end a shard: 8 of the digest, the block, the rank."""
    return struct.pack("<8sII", digest[:8], block, rank)


def trailers_nbytes(num_blocks: int, size: int) -> int:
    """Return the bytes of all trailers that a rank expects; none where nothing is gathered."""
    return TRAILER_NBYTES * num_blocks * size if size > 1 else 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of the block's run and where it lies in the shard.

    Attributes:
        start: First byte in the run.
        stop: End in the run.
        at: First byte in the shard.
    """

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How one block is cut into equal, aligned slices.

    Attributes:
        run_nbytes: Bytes of the block's run.
        size: Ranks in the group.
        nbytes: Bytes of every rank's shard, trailer included.
    """

    run_nbytes: int
    size: int
    nbytes: int

    @classmethod
    def cut(cls, run_nbytes: int, size: int, alignment: int) -> ShardPlan:
        """Plan the slices of a run for ``size`` ranks."""
        if size == 1:
            return cls(run_nbytes, 1, run_nbytes)
        extra = TRAILER_NBYTES * size
        # The spill must fit into the last slice, beside its trailer.
        least = max(-(-(run_nbytes + extra) // size), extra)
        return cls(run_nbytes, size, align_up(least, alignment))

    @property
    def padded_nbytes(self) -> int:
        """Bytes that a slot needs for the gathered block."""
        return self.nbytes * self.size

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that the block needs beside its slot: none, for it computes there."""
        return 0

    @property
    def spill_start(self) -> int:
        """First byte of the spill in the gathered run."""
        return self.padded_nbytes - TRAILER_NBYTES * self.size

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield the ranges of the run that ``rank`` keeps, by ascending place in the shard."""
        if self.size == 1:
            yield Piece(0, self.run_nbytes, 0)
            return
        first = rank * self.nbytes
        stop = min(first + self.nbytes - TRAILER_NBYTES, self.run_nbytes)
        if first < stop:
            yield Piece(first, stop, 0)
        if rank == self.size - 1:
            for owner in range(self.size - 1):
                yield from self._displaced(owner, self.spill_start - first)

    def _displaced(self, owner: int, spill_at: int) -> Iterator[Piece]:
        stop = (owner + 1) * self.nbytes
        start = stop - TRAILER_NBYTES
        if start < self.run_nbytes:
            at = spill_at + TRAILER_NBYTES * owner
            yield Piece(start, min(stop, self.run_nbytes), at)
