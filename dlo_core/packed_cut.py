"""The cut of a block that travels packed: which part each rank packs, and how much that is.

Each rank packs a part of the block's run by itself, in whole chunks, so the parts differ in size
when they are packed. Every rank's shard is as long as the longest, for a gather wants equal ones;
what the others have behind their segment is not used. Pure: sizes and ranges only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dlo_core.layout import align_up
from dlo_core.packed_format import CHUNK_NBYTES
from dlo_core.shard import TRAILER_NBYTES, Piece

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.layout import BlockLayout

__all__ = ["PackedCut", "packed_tensors"]

# New values of the same kind may take a little more; they must fit, too. It travels along.
_SPARE = 256
_LEAST_SPARE_NBYTES = 4096


@dataclass(frozen=True, slots=True)
class PackedCut:
    """How one block is cut into parts of whole chunks.

    Attributes:
        run_nbytes: Bytes of the block's run.
        size: Ranks in the group.
        part_nbytes: Bytes of the run that each rank packs; the last may have less.
        alignment: Of the shards, in bytes.
        nbytes: Bytes of every rank's packed shard, trailer included; 0: not measured yet.
    """

    run_nbytes: int
    size: int
    part_nbytes: int
    alignment: int
    nbytes: int = 0

    @classmethod
    def cut(cls, run_nbytes: int, size: int, alignment: int) -> PackedCut:
        """Plan the parts of a run for ``size`` ranks."""
        part = align_up(max(-(-run_nbytes // size), 1), CHUNK_NBYTES)
        return cls(run_nbytes, size, part, alignment)

    def measured(self, segment_nbytes: int) -> PackedCut:
        """Return the cut with room for the longest segment of any rank."""
        spare = max(segment_nbytes // _SPARE, _LEAST_SPARE_NBYTES)
        wanted = segment_nbytes + spare + self.trailer_nbytes
        return replace(self, nbytes=align_up(wanted, self.alignment))

    @property
    def trailer_nbytes(self) -> int:
        """Bytes behind the segment that are the trailer's."""
        return TRAILER_NBYTES if self.size > 1 else 0

    @property
    def padded_nbytes(self) -> int:
        """Bytes that a slot needs for the gathered packed block."""
        return self.nbytes * self.size

    @property
    def decoded_nbytes(self) -> int:
        """Bytes that the decoded block needs."""
        return self.part_nbytes * self.size

    def pieces(self, rank: int) -> Iterator[Piece]:
        """Yield the range of the run that ``rank`` packs, and where it lies in its part."""
        first = rank * self.part_nbytes
        stop = min(first + self.part_nbytes, self.run_nbytes)
        if first < stop:
            yield Piece(first, stop, 0)


def packed_tensors(layout: BlockLayout, cut: PackedCut, rank: int) -> list[tuple[int, int]]:
    """Return first byte and end of each bf16 tensor in a rank's part; each begins at a chunk."""
    low = rank * cut.part_nbytes
    found = []
    for spec in layout.tensors:
        start = max(spec.offset, low)
        stop = min(spec.offset + spec.nbytes, low + cut.part_nbytes)
        if start < stop and str(spec.dtype) == "torch.bfloat16":
            found.append((start - low, stop - low))
    return found
