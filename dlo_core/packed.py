"""Packing: a run of bytes to a segment and back, with any codec; see ``packed_format.py``.

Two passes: ``measure`` counts, so that the bytes of a segment are a plain number before there is
memory for it; ``write_segment`` writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import CheckpointError
from dlo_core.packed_format import (
    CHUNK_NBYTES,
    ENTRY_WORDS,
    HEADER_NBYTES,
    LEAST_ROW_NBYTES,
    MOST_CODED_NBYTES,
    NUM_RANKS,
    RAW_TABLE,
    Header,
    count_chunks,
)
from dlo_core.packed_torch import TorchCodec, signed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.interface import Codec

__all__ = [
    "Index",
    "blob_nbytes",
    "check_segment",
    "decode_segment",
    "index_checksum",
    "measure",
    "pack",
    "padded",
    "parse_segment",
    "unpack",
    "write_segment",
]

_WORD = 0xFFFFFFFF
_LOW = 0xFFFF
# So many values tell which exponents are common; one that they miss is a patch.
_SAMPLE = 1_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Index:
    """How a run will be packed.

    Attributes:
        header: Its sizes.
        words: Entries and tables, one behind the other.
        ranks: The rank of each exponent, a row a table.
    """

    header: Header
    words: torch.Tensor
    ranks: torch.Tensor


def padded(nbytes: int) -> int:
    """Return the bytes of a run of whole chunks that holds ``nbytes`` bytes."""
    return count_chunks(nbytes) * CHUNK_NBYTES


def measure(
    codec: Codec, run: torch.Tensor, nbytes: int, tensors: Sequence[tuple[int, int]]
) -> Index:
    """Count what packing ``run`` takes.

    Args:
        codec: Of the device on which ``run`` is.
        run: ``uint8``, of whole chunks.
        nbytes: How many of its bytes are packed; the others must be zero.
        tensors: First byte and end of each bf16 tensor in it; each begins at a chunk. What lies
            elsewhere stays raw.
    """
    ranks, tables = _make_tables(run, tensors)
    table_of = torch.full((run.numel() // CHUNK_NBYTES,), -1, dtype=torch.int32)
    for number, (start, stop) in enumerate(tensors):
        table_of[start // CHUNK_NBYTES : count_chunks(stop)] = number
    table_of = table_of.to(run.device)
    counts = codec.count(run, ranks, table_of).to(torch.int64)
    second, third = (counts[:, 0] + 15) // 16, (counts[:, 1] + 31) // 32 * 3
    coded_nbytes = (1280 + second + third + counts[:, 2] + 3) // 4 * 16
    coded = (table_of >= 0) & (coded_nbytes <= MOST_CODED_NBYTES)
    blobs = torch.where(coded, coded_nbytes, CHUNK_NBYTES)
    ends = torch.cumsum(blobs, 0)
    total = int(ends[-1]) if len(ends) else 0
    header = Header.of(nbytes, len(tables), total, 0)
    # The blobs begin at a multiple of 16, for entries and tables are of 16 bytes each.
    places = (header.index_nbytes + ends - blobs) // 16
    entries = torch.stack(
        [
            places,
            torch.where(coded, second | third << 16, 0),
            torch.where(coded, counts[:, 2] | table_of.to(torch.int64) << 16, RAW_TABLE << 16),
            counts[:, 3] & _WORD,
        ],
        1,
    )
    words = torch.cat([signed(entries).flatten(), tables.view(torch.int32).flatten()])
    return Index(Header.of(nbytes, len(tables), total, index_checksum(words)), words, ranks)


def write_segment(codec: Codec, run: torch.Tensor, index: Index, row: torch.Tensor) -> None:
    """Write the segment of a measured run.

    Args:
        codec: Of the device.
        run: What was measured.
        index: What that gave.
        row: Where it goes: as many bytes as the header says, a multiple of 16, at least. What is
            behind it becomes zero.
    """
    row.zero_()
    head = torch.frombuffer(bytearray(index.header.to_bytes()), dtype=torch.uint8)
    row[:HEADER_NBYTES].copy_(head)
    row[HEADER_NBYTES : index.header.index_nbytes].copy_(index.words.view(torch.uint8))
    if index.header.num_chunks:
        codec.write(run, index.ranks, row)


def blob_nbytes(entries: torch.Tensor, num_tables: int) -> torch.Tensor:
    """Return the bytes of each chunk's blob.

    Raises:
        CheckpointError: One cannot have so many, or names a table that is not there.
    """
    table = entries[:, 2] >> 16
    words = 1280 + (entries[:, 1] & _LOW) + (entries[:, 1] >> 16) + (entries[:, 2] & _LOW)
    raw = table == RAW_TABLE
    coded = (words + 3) // 4 * 16
    bad = ~raw & ((table >= num_tables) | (coded > MOST_CODED_NBYTES))
    if bool(bad.any()):
        raise CheckpointError(
            f"entry {int(torch.nonzero(bad)[0])} of packed data cannot be true; it is damaged: "
            "pack the checkpoint again"
        )
    return torch.where(raw, CHUNK_NBYTES, coded)


def parse_segment(row: torch.Tensor) -> Header:
    """Return the header of the segment at the beginning of a host or device ``row``.

    Raises:
        CheckpointError: There is none.
    """
    head = row[:HEADER_NBYTES].cpu().numpy().tobytes()
    return Header.parse(head, row.numel())


def check_segment(row: torch.Tensor) -> Header:
    """Check header and index of the segment at the beginning of ``row``.

    Raises:
        CheckpointError: Something cannot be true, or a checksum is wrong.
    """
    header = parse_segment(row)
    words = row[HEADER_NBYTES : header.index_nbytes].view(torch.int32)
    if index_checksum(words) & ((1 << 64) - 1) != header.checksum:
        raise CheckpointError(
            "the checksum of packed data's index is wrong: it is damaged; pack the checkpoint again"
        )
    entries = _entries(words, header.num_chunks)
    place = entries[:, 0] * 16
    stop = place + blob_nbytes(entries, header.num_tables)
    bad = (place < header.index_nbytes) | (stop > header.blobs_stop)
    if bool(bad.any()):
        raise CheckpointError(
            f"entry {int(torch.nonzero(bad)[0])} of packed data points outside of it; it is "
            "damaged: pack the checkpoint again"
        )
    return header


def decode_segment(codec: Codec, row: torch.Tensor, out: torch.Tensor) -> None:
    """Decode a checked segment and compare the checksums of its chunks.

    Args:
        codec: Of the device.
        row: Begins with the segment.
        out: Gets the run, in whole chunks.

    Raises:
        CheckpointError: A chunk does not come out as it went in.
    """
    header = parse_segment(row)
    if not header.num_chunks:
        return
    codec.decode(_long_enough(row, header).view(1, -1), out)
    words = row[HEADER_NBYTES : header.index_nbytes].view(torch.int32)
    wanted = _entries(words, header.num_chunks)[:, 3]
    none = torch.empty(0, 256, dtype=torch.uint8, device=out.device)
    raw = torch.full((header.num_chunks,), -1, dtype=torch.int32, device=out.device)
    found = codec.count(out, none, raw)[:, 3].to(torch.int64) & _WORD
    bad = torch.nonzero(found != wanted)
    if len(bad):
        raise CheckpointError(
            f"the checksum of chunk {int(bad[0])} of packed data is wrong ({len(bad):,} of "
            f"{header.num_chunks:,} are): it is damaged; pack the checkpoint again"
        )


def pack(data: torch.Tensor, tensors: Sequence[tuple[int, int]] | None = None) -> torch.Tensor:
    """Return the segment of host bytes, by the reference codec.

    Args:
        data: ``uint8``.
        tensors: Its bf16 tensors, as in ``measure``; None: it is one.
    """
    run = torch.zeros(padded(data.numel()), dtype=torch.uint8)
    run[: data.numel()] = data
    codec = TorchCodec()
    whole = [(0, data.numel())] if data.numel() else []
    index = measure(codec, run, data.numel(), whole if tensors is None else tensors)
    row = torch.empty(index.header.nbytes, dtype=torch.uint8)
    write_segment(codec, run, index, row)
    return row


def unpack(row: torch.Tensor) -> torch.Tensor:
    """Return the bytes that a segment on the host holds, by the reference codec.

    Raises:
        CheckpointError: It is damaged.
    """
    header = check_segment(row)
    out = torch.empty(header.num_chunks * CHUNK_NBYTES, dtype=torch.uint8)
    decode_segment(TorchCodec(), row, out)
    return out[: header.run_nbytes]


def _long_enough(row: torch.Tensor, header: Header) -> torch.Tensor:
    """Return the row in whole words, padded where a decoder may look beyond its end."""
    wanted = header.index_nbytes + LEAST_ROW_NBYTES
    if row.numel() % 16 == 0 and row.numel() >= wanted:
        return row
    longer = torch.zeros(-(-max(row.numel(), wanted) // 16) * 16, dtype=torch.uint8)
    longer = longer.to(row.device)
    longer[: row.numel()].copy_(row)
    return longer


def _entries(words: torch.Tensor, num_chunks: int) -> torch.Tensor:
    return words[: ENTRY_WORDS * num_chunks].view(-1, ENTRY_WORDS).to(torch.int64) & _WORD


def index_checksum(words: torch.Tensor) -> int:
    """Return the checksum of entries and tables, modulo 2**64, as a signed number."""
    odd = 2 * torch.arange(words.numel(), device=words.device) + 1
    return int(((words.to(torch.int64) & _WORD) * odd).sum())


def _make_tables(
    run: torch.Tensor, tensors: Sequence[tuple[int, int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each tensor's ranks by exponent, and its 14 commonest exponents as they travel."""
    counts = torch.zeros(len(tensors), 256, dtype=torch.int64, device=run.device)
    for number, (start, stop) in enumerate(tensors):
        bits = run[start : stop - (stop - start) % 2].view(torch.int16)
        sample = bits[:: max(1, bits.numel() // _SAMPLE)].to(torch.int32)
        counts[number] = torch.bincount((sample >> 7) & 0xFF, minlength=256)
    order = torch.argsort(counts, dim=1, descending=True, stable=True)[:, :NUM_RANKS]
    ranks = torch.full((len(tensors), 256), 255, dtype=torch.uint8, device=run.device)
    places = torch.arange(NUM_RANKS, dtype=torch.uint8, device=run.device)
    ranks.scatter_(1, order, places.expand(len(tensors), NUM_RANKS))
    tables = torch.zeros(len(tensors), 16, dtype=torch.uint8, device=run.device)
    common = order.to(torch.uint8)
    tables[:, 0:3], tables[:, 4:7], tables[:, 8:16] = common[:, :3], common[:, 3:6], common[:, 6:]
    return ranks, tables
