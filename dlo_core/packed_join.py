"""Joining: a segment put together from chunks that are coded already, each as it is.

See ``packed_format.py``: what a reader needs of a chunk is in its blob, its entry and its table.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import CheckpointError
from dlo_core.packed import blob_nbytes, index_checksum
from dlo_core.packed_format import ENTRY_WORDS, HEADER_NBYTES, RAW_TABLE, Header, index_nbytes
from dlo_core.packed_torch import signed

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Joined", "join", "padded_row", "write_index"]

_WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """The index of a segment that is put together from chunks which are coded already.

    Attributes:
        header: Its sizes; ``write_index`` knows the checksum.
        entries: An entry a chunk, as words of which the sign means nothing.
        tables: All tables.
    """

    header: Header
    entries: torch.Tensor
    tables: torch.Tensor


def join(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], run_nbytes: int) -> Joined:
    """Return the index of a segment of the chunks of several parts, on the host.

    The blobs of each part lie one behind the other, as the part had them, and so do the parts.

    Args:
        parts: Of each, its entries and the tables that they name.
        run_nbytes: Bytes of the run.

    Raises:
        CheckpointError: An entry cannot be true.
    """
    num_tables = sum(len(tables) for _, tables in parts)
    if num_tables >= RAW_TABLE:
        raise CheckpointError(f"{num_tables:,} tables are too many for one segment")
    num_chunks = sum(len(entries) for entries, _ in parts)
    start = index_nbytes(num_chunks, num_tables)
    place, first, made = start, 0, []
    for entries, tables in parts:
        moved = entries.to(torch.int64) & _WORD
        sizes = blob_nbytes(moved, len(tables))
        ends = torch.cumsum(sizes, 0)
        moved[:, 0] = (place + ends - sizes) // 16
        table = moved[:, 2] >> 16
        moved[:, 2] += torch.where(table == RAW_TABLE, 0, first) << 16
        place += int(ends[-1]) if len(ends) else 0
        first += len(tables)
        made.append(signed(moved))
    header = Header.of(run_nbytes, num_tables, place - start, 0)
    empty = torch.empty(0, ENTRY_WORDS, dtype=torch.int32)
    return Joined(
        header, torch.cat([empty, *made]), torch.cat([empty, *(tables for _, tables in parts)])
    )


def padded_row(made: Joined) -> torch.Tensor:
    """Return a host row with the index of ``made``, in which the blobs are still to be put."""
    row = torch.zeros(made.header.nbytes, dtype=torch.uint8)
    write_index(made, row)
    return row


def write_index(made: Joined, row: torch.Tensor) -> None:
    """Write header, entries and tables of ``made`` to the beginning of a host row."""
    words = torch.cat([made.entries.flatten(), made.tables.flatten()])
    header = replace(made.header, checksum=index_checksum(words))
    row[:HEADER_NBYTES] = torch.frombuffer(bytearray(header.to_bytes()), dtype=torch.uint8)
    row[HEADER_NBYTES : header.index_nbytes] = words.view(torch.uint8)
