"""Packed rows from a packed checkpoint: chunks are joined as they are, and nothing is coded.

A block's layout and its parts begin at chunks, and so do packed tensors in a file. So a rank's row
is put together from the file's entries and blobs; what the file has raw becomes raw chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlo_core.packed import join, padded_row, write_index
from dlo_core.packed_format import CHUNK_NBYTES, ENTRY_WORDS, RAW_TABLE, TABLE_WORDS, count_chunks
from dlo_core.packed_read import PackedTensor
from dlo_core.packed_torch import checksums
from dlo_core.reading import Work, memory_of
from dlo_core.source import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dlo_core.layout import BlockLayout, TensorSpec
    from dlo_core.packed_cut import PackedCut
    from dlo_core.packed_read import PackedChunks
    from dlo_core.source import Source

__all__ = ["PackedRow", "find_row"]

# Chunks whose checksums are summed at once.
_BATCH = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some bytes of a tensor in a rank's part: packed chunks of the file, or read as they are."""

    source: Source
    spec: TensorSpec
    start: int
    stop: int
    chunks: PackedChunks | None

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries and tables; the checksums of what is read as it is are not known yet."""
        if self.chunks is not None:
            return self.chunks.entries, self.chunks.tables
        return _raw_entries(count_chunks(self.stop - self.start))


def find_row(
    layout: BlockLayout, cut: PackedCut, rank: int, sources: Mapping[str, Source]
) -> PackedRow | None:
    """Return a rank's row of a block where the checkpoint has it packed; only indexes are read.

    Returns:
        None where no tensor is packed in the file, or one is but is not wanted as it lies there.

    Raises:
        CheckpointError: The file cannot be read, or is damaged.
    """
    low, high = rank * cut.part_nbytes, (rank + 1) * cut.part_nbytes
    stored = {spec.name: _packed(sources[spec.name], spec) for spec in layout.tensors}
    wanted = [source for source in sources.values() if isinstance(source, StoredTensor)]
    if not any(stored.values()) or not wanted:
        return None
    parts, at = [], 0
    for spec in layout.tensors:
        source, tensor = sources[spec.name], stored[spec.name]
        if tensor is None and isinstance(source, StoredTensor) and source.packed:
            return None
        if spec.offset != at:
            # Tensors that are aligned to more than a chunk have chunks of no tensor between them.
            return None
        at = spec.offset + count_chunks(spec.nbytes) * CHUNK_NBYTES
        start, stop = max(spec.offset, low), min(spec.offset + spec.nbytes, high)
        if start < stop:
            start, stop = start - spec.offset, stop - spec.offset
            chunks = None
            if tensor is not None:
                chunks = tensor.chunks(start // CHUNK_NBYTES, count_chunks(stop))
            parts.append(_Part(source, spec, start, stop, chunks))
    return PackedRow(cut, parts)


class PackedRow:
    """One rank's row of one block.

    Attributes:
        nbytes: Bytes of the segment.
    """

    def __init__(self, cut: PackedCut, parts: list[_Part]) -> None:
        """Join the indexes of ``parts``."""
        self._parts = parts
        indexes = [part.index for part in parts]
        # The last rank's part may be longer than what is left of the block.
        filled = sum(len(entries) for entries, _ in indexes)
        indexes.append(_raw_entries(cut.part_nbytes // CHUNK_NBYTES - filled))
        self._made = join(indexes, cut.part_nbytes)
        self.nbytes = self._made.header.nbytes

    def read(self, threads: int) -> torch.Tensor:
        """Return the segment in host memory, read anew.

        Raises:
            CheckpointError: The file cannot be read.
        """
        made = self._made
        row = padded_row(made)
        memory, work, at = memory_of(row), Work(), made.header.index_nbytes
        first, plain = 0, []
        for part in self._parts:
            if part.chunks is None:
                nbytes = count_chunks(part.stop - part.start) * CHUNK_NBYTES
                out = memory[at : at + part.stop - part.start]
                work.add(part.source, part.spec, part.start, out)
                plain.append((first, row[at : at + nbytes]))
            else:
                assert isinstance(part.source, StoredTensor)
                nbytes = part.chunks.nbytes
                stored = part.source.recipe.patches[0].stored
                offset = stored.offset + part.chunks.start
                out = memory[at : at + nbytes]
                work.add_extent(part.source.checkpoint, stored, offset, out)
            at += nbytes
            first += count_chunks(part.stop - part.start)
        work.run(threads=threads)
        # The file has the checksums of its own chunks, which tell whether these are damaged.
        for start, run in plain:
            batches = run.view(torch.int32).view(-1, CHUNK_NBYTES // 4).split(_BATCH)
            for number, words in enumerate(batches):
                found = start + number * _BATCH
                made.entries[found : found + len(words), 3] = checksums(words)
        write_index(made, row)
        return row


def _packed(source: Source, spec: TensorSpec) -> PackedTensor | None:
    """Return the packed tensor of the file that is wanted whole, as it lies there."""
    if not isinstance(source, StoredTensor) or not spec.row_major:
        return None
    patch = source.recipe.dense
    if patch is None or not patch.stored.packed_nbytes:
        return None
    whole = patch.start == 0 and spec.nbytes == patch.stored.nbytes
    return PackedTensor(source.checkpoint, patch.stored) if whole else None


def _raw_entries(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    entries = torch.zeros(count, ENTRY_WORDS, dtype=torch.int32)
    # The same bits as a signed number.
    entries[:, 2] = (RAW_TABLE << 16) - (1 << 32)
    return entries, torch.empty(0, TABLE_WORDS, dtype=torch.int32)
