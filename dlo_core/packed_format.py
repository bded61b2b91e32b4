"""The packed format: how bf16 weights lie in fewer bytes without losing a bit.

[Note: the packed format]
What is packed is a run of bytes, cut into chunks of 4096 values of 16 bits. A *segment* holds one
run: header, an entry a chunk, the tables, then one blob a chunk. All numbers are little-endian,
words have 32 bits. ``docs/packed.md`` specifies it for other decoders.

A chunk is *raw*, its blob then being its 8192 bytes, or *coded*. A coded value gives its sign and
mantissa as one byte; its exponent is looked up in a table of the 14 commonest ones of the tensor,
in three levels: two bits for ranks 0 to 2, two more for 3 to 5, three more for 6 to 13. A value
whose exponent is not in the table is a patch. So every pattern of bits comes back, NaNs and all.

A chunk is coded where this takes at most nine tenths of its bytes, so nothing ever grows by more
than its entry. What a reader needs of a chunk is in its blob, its entry and its table: segments can
be cut and joined at chunks.

Pure: sizes and headers only.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from dlo_core.errors import CheckpointError

__all__ = [
    "CHUNK_NBYTES",
    "ENTRY_WORDS",
    "HEADER_NBYTES",
    "LEAST_ROW_NBYTES",
    "MOST_CODED_NBYTES",
    "NUM_RANKS",
    "RAW_TABLE",
    "TABLE_WORDS",
    "VERSION",
    "Header",
    "count_chunks",
    "index_nbytes",
]

VERSION = 1
_MAGIC = b"DLOPACK\0"
# magic, version, chunks, tables, reserved, bytes of the run, bytes of the segment, checksum
_FORMAT = struct.Struct("<8sIIIIQQQ16s")
HEADER_NBYTES = _FORMAT.size
CHUNK_NBYTES = 8192
ENTRY_WORDS = 4
TABLE_WORDS = 4
NUM_RANKS = 14
# The table number of a raw chunk.
RAW_TABLE = 0xFFFF
MOST_CODED_NBYTES = CHUNK_NBYTES * 9 // 10
# A decoder may look at so many bytes from where a blob begins, whatever the entry says.
LEAST_ROW_NBYTES = CHUNK_NBYTES
# A coded blob has 5120 bytes at least, so this much behind the last one is enough for that.
_TAIL_NBYTES = 4096
_MOST_CHUNKS = 1 << 26
_MAX_64 = (1 << 64) - 1


def count_chunks(nbytes: int) -> int:
    """Return how many chunks a run of ``nbytes`` bytes has."""
    return -(-nbytes // CHUNK_NBYTES)


def index_nbytes(num_chunks: int, num_tables: int) -> int:
    """Return the bytes in front of the first blob: header, entries and tables."""
    words = ENTRY_WORDS * num_chunks + TABLE_WORDS * num_tables
    return HEADER_NBYTES + 4 * words


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment begins with.

    Attributes:
        num_chunks: Chunks, and so entries.
        num_tables: Tables.
        run_nbytes: Bytes of the run, in the last chunk without its padding.
        nbytes: Bytes of the segment.
        checksum: Of entries and tables; see ``docs/packed.md``.
    """

    num_chunks: int
    num_tables: int
    run_nbytes: int
    nbytes: int
    checksum: int

    @classmethod
    def of(cls, run_nbytes: int, num_tables: int, blobs_nbytes: int, checksum: int) -> Header:
        """Return the header of a segment with so many bytes of blobs."""
        chunks = count_chunks(run_nbytes)
        return cls(
            chunks,
            num_tables,
            run_nbytes,
            index_nbytes(chunks, num_tables) + blobs_nbytes + _TAIL_NBYTES,
            checksum & _MAX_64,
        )

    @property
    def index_nbytes(self) -> int:
        """Bytes in front of the first blob."""
        return index_nbytes(self.num_chunks, self.num_tables)

    @property
    def blobs_stop(self) -> int:
        """End of the last blob."""
        return self.nbytes - _TAIL_NBYTES

    def to_bytes(self) -> bytes:
        """Return the 64 bytes that begin the segment."""
        return _FORMAT.pack(
            _MAGIC,
            VERSION,
            self.num_chunks,
            self.num_tables,
            0,
            self.run_nbytes,
            self.nbytes,
            self.checksum,
            b"",
        )

    @classmethod
    def parse(cls, data: bytes, available: int) -> Header:
        """Return the header that ``data`` begins with.

        Args:
            data: 64 bytes at least.
            available: Bytes that there are of the segment.

        Raises:
            CheckpointError: It is no header, of another version, or cannot be true.
        """
        if len(data) < HEADER_NBYTES:
            raise CheckpointError(
                f"packed data has {len(data)} bytes, less than its header of {HEADER_NBYTES}; it "
                "was cut short: pack the checkpoint again"
            )
        magic, version, chunks, tables, zero, run, nbytes, checksum, rest = _FORMAT.unpack_from(
            data
        )
        if magic != _MAGIC:
            raise CheckpointError(
                f"packed data begins with {magic!r} instead of {_MAGIC!r}; it is damaged or "
                "something else"
            )
        if version != VERSION:
            raise CheckpointError(
                f"packed data has version {version}, this dlo reads {VERSION}; pack the "
                "checkpoint again, or use the dlo that packed it"
            )
        header = cls(chunks, tables, run, nbytes, checksum)
        problem = header._problem(available)
        if zero or any(rest):
            problem = problem or "its reserved bytes are not zero"
        if problem:
            raise CheckpointError(
                f"the header of packed data cannot be true: {problem}; it is damaged: pack the "
                "checkpoint again"
            )
        return header

    def _problem(self, available: int) -> str | None:
        if self.num_chunks > _MOST_CHUNKS or self.num_tables >= RAW_TABLE:
            return f"{self.num_chunks:,} chunks and {self.num_tables:,} tables are too many"
        if self.num_chunks != count_chunks(self.run_nbytes):
            return f"{self.num_chunks:,} chunks do not hold {self.run_nbytes:,} bytes"
        if self.nbytes > available:
            return f"it says {self.nbytes:,} bytes, and {available:,} are there"
        if self.nbytes < self.index_nbytes + _TAIL_NBYTES:
            return f"{self.nbytes:,} bytes do not hold its index of {self.index_nbytes:,}"
        return None
