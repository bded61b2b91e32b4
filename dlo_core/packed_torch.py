"""The codec in torch's own operations: the reference, and for devices without a faster one.

See [Note: the packed format] in ``packed_format.py``. Decoding looks at nothing beyond its row and
writes nothing beyond its chunk, whatever the row holds.
"""

from __future__ import annotations

import torch

from dlo_core.interface import Codec
from dlo_core.packed_format import (
    CHUNK_NBYTES,
    ENTRY_WORDS,
    HEADER_NBYTES,
    LEAST_ROW_NBYTES,
    RAW_TABLE,
    TABLE_WORDS,
)

__all__ = ["TorchCodec", "checksums", "signed"]

_VALUES = CHUNK_NBYTES // 2
_LANES = 256
_WORDS = CHUNK_NBYTES // 4
_WORD = 0xFFFFFFFF
# Words of the first level, and of signs and mantissas.
_FIRST = _LANES
_FIXED = _FIRST + _VALUES // 4
_MOST_SECOND = 256
_MOST_THIRD = 384
# Chunks at once: their temporary values stay in a processor's cache.
_BATCH = 32


class TorchCodec(Codec):
    """Counts, writes and decodes chunks, some dozens at a time."""

    def count(self, run: torch.Tensor, ranks: torch.Tensor, table_of: torch.Tensor) -> torch.Tensor:
        """Return second and third codes, patches and checksum of each chunk."""
        words = run.view(torch.int32).view(-1, _WORDS)
        counts = torch.empty(len(words), ENTRY_WORDS, dtype=torch.int32, device=run.device)
        for part in _batches(len(words)):
            found = _ranks(words[part], ranks, table_of[part])
            rank = _within(found)
            counts[part, 0] = (rank >= 3).sum(1)
            counts[part, 1] = (rank >= 6).sum(1)
            counts[part, 2] = (found == 255).sum(1)
            counts[part, 3] = checksums(words[part])
        return counts

    def write(self, run: torch.Tensor, ranks: torch.Tensor, row: torch.Tensor) -> None:
        """Write the blobs of all chunks, which lie one behind the other."""
        words = run.view(torch.int32).view(-1, _WORDS)
        out = row.view(torch.int32)
        entries = _entries(out, len(words))
        for part in _batches(len(words)):
            blobs = _blobs(words[part], entries[part], ranks)
            start = int(entries[part.start, 0]) * 4
            out[start : start + len(blobs)] = blobs

    def decode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Decode every row into its part of ``out``."""
        num_chunks = out.numel() // CHUNK_NBYTES // rows.shape[0]
        results = out.view(torch.int32).view(rows.shape[0], num_chunks, _WORDS)
        least = HEADER_NBYTES + 4 * ENTRY_WORDS * num_chunks + LEAST_ROW_NBYTES
        if num_chunks and rows.shape[1] < least:
            raise ValueError(f"a row of {rows.shape[1]:,} bytes holds no {num_chunks:,} chunks")
        for row, result in zip(rows, results, strict=True):
            words = row.view(torch.int32)
            entries = _entries(words, num_chunks)
            for part in _batches(num_chunks):
                raw = _table(entries[part]) == RAW_TABLE
                for chunks, get in ((raw, _get_raw), (~raw, _get_coded)):
                    if chunks.any():
                        numbers = torch.nonzero(chunks)[:, 0] + part.start
                        result[numbers] = get(words, entries[numbers], num_chunks)


def _batches(count: int) -> list[slice]:
    return [slice(at, min(at + _BATCH, count)) for at in range(0, count, _BATCH)]


def _entries(row: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Return the entries as unsigned numbers."""
    start = HEADER_NBYTES // 4
    run = row[start : start + ENTRY_WORDS * num_chunks]
    return run.view(num_chunks, ENTRY_WORDS).to(torch.int64) & _WORD


def _table(entries: torch.Tensor) -> torch.Tensor:
    return entries[:, 2] >> 16


def _base(words: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """Return where each blob begins, in words, as a column; never so late as to end outside."""
    return (entries[:, 0] * 4).clamp(max=words.numel() - _WORDS)[:, None]


def _columns(words: torch.Tensor, count: int) -> torch.Tensor:
    return torch.arange(count, device=words.device)


def _by_lane(values: torch.Tensor) -> torch.Tensor:
    """Return the values of each chunk lane after lane; a lane has two runs of eight."""
    return values.view(-1, 2, _LANES, 8).transpose(1, 2).reshape(-1, _VALUES)


def _by_place(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1, _LANES, 2, 8).transpose(1, 2).reshape(-1, _VALUES)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """Return the 16 bits of each value, lane after lane."""
    return _by_lane(words.view(torch.int16).to(torch.int32) & 0xFFFF)


def checksums(words: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each chunk, of which a row of words is one."""
    odd = 2 * _columns(words, _WORDS) + 1
    return signed(((words.to(torch.int64) & _WORD) * odd).sum(1) & _WORD)


def signed(words: torch.Tensor) -> torch.Tensor:
    """Return numbers below 2**32 as words of the same bits."""
    return (words - ((words >> 31) << 32)).to(torch.int32)


def _ranks(words: torch.Tensor, ranks: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return the rank of each value's exponent, lane after lane; 255: none."""
    if not len(ranks):
        return torch.zeros(len(words), _VALUES, dtype=torch.uint8, device=words.device)
    row = ranks[table.to(torch.int64).clamp(0, len(ranks) - 1)]
    return row.gather(1, ((_bits(words) >> 7) & 0xFF).to(torch.int64))


def _within(rank: torch.Tensor) -> torch.Tensor:
    return torch.where(rank == 255, 0, rank)


def _blobs(words: torch.Tensor, entries: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """Return the blobs of chunks, each as long as its entry says, one behind the other."""
    bits = _bits(words)
    table = _table(entries)
    coded = table != RAW_TABLE
    found = _ranks(words, ranks, torch.where(coded, table, 0))
    missed, rank = found == 255, _within(found).to(torch.int32)
    first = (rank.clamp(max=3).view(-1, _LANES, 16) << (2 * _columns(words, 16))).sum(2)
    middle = _by_place(((bits << 1) & 0xFF) | (bits >> 15)).to(torch.uint8)
    second = _stream(rank - 3, rank >= 3, 2, _MOST_SECOND)
    third = _stream(rank - 6, rank >= 6, 3, _MOST_THIRD)
    count = torch.where(coded, entries[:, 2] & 0xFFFF, 0)
    num_second, num_third = entries[:, 1] & 0xFFFF, entries[:, 1] >> 16
    padding = -(num_second + num_third + count) % 4
    parts = [
        (signed(first), _LANES * coded),
        (middle.view(torch.int32), _VALUES // 4 * coded),
        (second, num_second),
        (third, num_third),
        (_patches(bits, missed & coded[:, None], int(count.max())), count),
        (torch.zeros_like(second[:, :3]), padding * coded),
        (words, _WORDS * ~coded),
    ]
    wide = torch.cat([part for part, _ in parts], 1)
    chosen = [_columns(words, part.shape[1]) < length[:, None] for part, length in parts]
    return wide[torch.cat(chosen, 1)]


def _patches(bits: torch.Tensor, missed: torch.Tensor, most: int) -> torch.Tensor:
    """Return the patches of each chunk, in the order of the lanes, ``most`` columns of them."""
    out = torch.zeros(len(bits), most, dtype=torch.int32, device=bits.device)
    if most:
        chunk, place = torch.nonzero(missed, as_tuple=True)
        ordinal = missed.cumsum(1)[missed] - 1
        within = _by_lane(_columns(bits, _VALUES).view(1, -1))[0]
        # A raw chunk has none, however many it misses.
        out[chunk, ordinal] = signed(within[place] | (bits[missed].to(torch.int64) << 16))
    return out


def _stream(codes: torch.Tensor, chosen: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """Return the ``chosen`` codes of each chunk as a dense string of bits, in words."""
    chunk, _ = torch.nonzero(chosen, as_tuple=True)
    at = (chosen.cumsum(1)[chosen] - 1) * width
    value = codes[chosen].clamp(max=2**width - 1).to(torch.int64) << (at & 31)
    words = torch.zeros(len(codes) * (count + 1), dtype=torch.int64, device=codes.device)
    place = chunk * (count + 1) + (at >> 5)
    words.scatter_add_(0, place, value & _WORD)
    if width == 3:
        # Such a code may cross into the next word.
        words.scatter_add_(0, place + 1, value >> 32)
    return signed(words.view(len(codes), count + 1)[:, :count])


def _get_raw(words: torch.Tensor, entries: torch.Tensor, num_chunks: int) -> torch.Tensor:
    return words[_base(words, entries) + _columns(words, _WORDS)]


def _get_coded(words: torch.Tensor, entries: torch.Tensor, num_chunks: int) -> torch.Tensor:
    base = _base(words, entries)
    num_second = (entries[:, 1:2] & 0xFFFF).clamp(max=_MOST_SECOND)
    num_third = (entries[:, 1:2] >> 16).clamp(max=_MOST_THIRD)
    first = words[base + _columns(words, _FIRST)][:, :, None]
    shifts = 2 * _columns(words, 16).to(torch.int32)
    rank = ((first >> shifts) & 3).view(-1, _VALUES)
    rank = _add_codes(words, base + _FIXED, rank, 3, 2)
    rank = _add_codes(words, base + _FIXED + num_second, rank, 6, 3)
    exponent = _exponents(words, entries, num_chunks).gather(1, rank.to(torch.int64))
    middle = words[base + _FIRST + _columns(words, _VALUES // 4)]
    low = middle.view(torch.uint8).to(torch.int32)
    bits = ((low & 1) << 15) | (_by_place(exponent) << 7) | (low >> 1)
    _patch(words, bits, entries, base + _FIXED + num_second + num_third)
    return bits.to(torch.int16).view(torch.int32)


def _add_codes(
    words: torch.Tensor, base: torch.Tensor, rank: torch.Tensor, full: int, width: int
) -> torch.Tensor:
    """Add the next code of a dense string to each rank that is ``full``."""
    here = rank == full
    at = ((here.cumsum(1) - 1) * width)[here]
    place = base.expand(rank.shape)[here] + (at >> 5)
    code = (words[place].to(torch.int64) & _WORD) >> (at & 31)
    if width == 3:
        # Such a code may cross into the next word.
        high = words[(place + 1).clamp(max=words.numel() - 1)].to(torch.int64) & 7
        code |= high << (32 - (at & 31))
    rank[here] += (code & (2**width - 1)).to(torch.int32)
    return rank


def _exponents(words: torch.Tensor, entries: torch.Tensor, num_chunks: int) -> torch.Tensor:
    """Return each chunk's table as 14 exponents, by rank."""
    start = HEADER_NBYTES // 4 + ENTRY_WORDS * num_chunks + TABLE_WORDS * _table(entries)[:, None]
    table = words[start.clamp(max=words.numel() - TABLE_WORDS) + _columns(words, TABLE_WORDS)]
    found = table.view(torch.uint8).to(torch.int32)
    return torch.cat([found[:, 0:3], found[:, 4:7], found[:, 8:16]], 1)


def _patch(
    words: torch.Tensor, bits: torch.Tensor, entries: torch.Tensor, start: torch.Tensor
) -> None:
    count = (entries[:, 2:3] & 0xFFFF).clamp(max=_VALUES)
    most = int(count.max())
    columns = _columns(words, most)
    chosen = columns < count
    patch = words[(start + columns).clamp(max=words.numel() - 1)[chosen]].to(torch.int64) & _WORD
    chunk = torch.nonzero(chosen)[:, 0]
    bits[chunk, patch & (_VALUES - 1)] = (patch >> 16).to(torch.int32)
