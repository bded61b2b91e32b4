"""Packed tensors in a checkpoint: ranges of them, decoded as they are read.

Chunks stand alone, so a range costs the entries and blobs of its chunks and nothing else.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import CheckpointError
from dlo_core.file_reads import Scratch
from dlo_core.packed import decode_segment
from dlo_core.packed_format import (
    CHUNK_NBYTES,
    ENTRY_WORDS,
    HEADER_NBYTES,
    TABLE_WORDS,
    Header,
    count_chunks,
)
from dlo_core.packed_join import join, padded_row
from dlo_core.packed_torch import TorchCodec
from dlo_core.pieces import Extent, Laid
from dlo_core.reading import Computed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.safetensors_header import CheckpointTensor

__all__ = ["PackedChunks", "PackedTensor", "unpacking"]

# An extent is decoded in parts of this size, several threads at once.
_PART_NBYTES = 512 * CHUNK_NBYTES


def unpacking(checkpoint: Checkpoint, piece: Extent | Laid) -> Iterator[Computed]:
    """Yield what makes a piece of a packed tensor, of which the file has no such bytes."""
    stored = piece.stored
    tensor = PackedTensor(checkpoint, stored)
    start = piece.offset - stored.offset
    if isinstance(piece, Laid):
        yield Computed(stored, _Lay(tensor, piece, start), piece.done_nbytes)
        return
    out = piece.out
    while len(out):
        nbytes = _PART_NBYTES - start % _PART_NBYTES
        part, out = out[:nbytes], out[nbytes:]
        yield Computed(stored, _Read(tensor, start, part), len(part))
        start += len(part)


@dataclass(frozen=True, slots=True, eq=False)
class PackedChunks:
    """Neighbouring chunks of a packed tensor.

    Attributes:
        entries: Theirs, as in the file.
        tables: The tensor's.
        start: Where their blobs begin, in bytes from the segment's beginning.
        nbytes: Bytes of the blobs, which lie one behind the other.
    """

    entries: torch.Tensor
    tables: torch.Tensor
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """One packed tensor of a checkpoint.

    Attributes:
        checkpoint: Reads the file.
        stored: What it holds, and where its segment lies.
    """

    checkpoint: Checkpoint
    stored: CheckpointTensor

    def read(self, start: int, out: memoryview) -> None:
        """Decode the tensor's bytes from ``start`` on into ``out``.

        Raises:
            CheckpointError: The file cannot be read, or is damaged.
        """
        if not len(out):
            return
        first, stop = start // CHUNK_NBYTES, count_chunks(start + len(out))
        with self._named():
            run = self._decode(first, stop)
        at = start - first * CHUNK_NBYTES
        out[:] = memoryview(run[at : at + len(out)].numpy())  # type: ignore[arg-type]

    def chunks(self, first: int, stop: int) -> PackedChunks:
        """Return where chunks ``[first, stop)`` lie; their blobs are not read.

        Raises:
            CheckpointError: The file cannot be read, or is damaged.
        """
        with self._named():
            return self._chunks(first, stop)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Let errors say which tensor of which file it is."""
        try:
            yield
        except CheckpointError as error:
            text = f"{str(self.stored.path)!r}: {self.stored.name!r}: {error}"
            raise CheckpointError(text) from error

    def _chunks(self, first: int, stop: int) -> PackedChunks:
        header = self._header()
        place = HEADER_NBYTES + 4 * ENTRY_WORDS * first
        entries = self._words(place, ENTRY_WORDS * (stop - first)).view(-1, ENTRY_WORDS)
        place = HEADER_NBYTES + 4 * ENTRY_WORDS * header.num_chunks
        tables = self._words(place, TABLE_WORDS * header.num_tables).view(-1, TABLE_WORDS)
        made = join([(entries, tables)], CHUNK_NBYTES * (stop - first)).header
        begin = (int(entries[0, 0]) & 0xFFFFFFFF) * 16
        length = made.blobs_stop - made.index_nbytes
        if begin < header.index_nbytes or begin + length > header.blobs_stop:
            raise CheckpointError(
                f"entry {first} of packed data points outside of it; it is damaged: pack the "
                "checkpoint again"
            )
        return PackedChunks(entries, tables, begin, length)

    def _decode(self, first: int, stop: int) -> torch.Tensor:
        chunks = self._chunks(first, stop)
        made = join([(chunks.entries, chunks.tables)], CHUNK_NBYTES * (stop - first))
        row = padded_row(made)
        self._fill(chunks.start, row[made.header.index_nbytes : made.header.blobs_stop])
        run = torch.empty(CHUNK_NBYTES * (stop - first), dtype=torch.uint8)
        decode_segment(TorchCodec(), row, run)
        return run

    def _header(self) -> Header:
        raw = torch.empty(HEADER_NBYTES, dtype=torch.uint8)
        self._fill(0, raw)
        header = Header.parse(raw.numpy().tobytes(), self.stored.packed_nbytes)
        if header.run_nbytes != self.stored.nbytes:
            raise CheckpointError(
                f"its shape has {self.stored.nbytes:,} bytes, but {header.run_nbytes:,} are "
                "packed; it is damaged: pack the checkpoint again"
            )
        return header

    def _words(self, place: int, count: int) -> torch.Tensor:
        words = torch.empty(count, dtype=torch.int32)
        self._fill(place, words.view(torch.uint8))
        return words

    def _fill(self, place: int, run: torch.Tensor) -> None:
        if run.numel():
            memory = memoryview(run.numpy())  # type: ignore[arg-type]
            self.checkpoint.fill(
                [(self.stored.name, memory)], self.stored.offset + place, Scratch()
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    tensor: PackedTensor
    start: int
    out: memoryview

    def __call__(self) -> None:
        self.tensor.read(self.start, self.out)


@dataclass(frozen=True, slots=True, eq=False)
class _Lay:
    tensor: PackedTensor
    piece: Laid
    start: int

    def __call__(self) -> None:
        raw = memoryview(bytearray(self.piece.nbytes))
        self.tensor.read(self.start, raw)
        self.piece.lay(raw)
