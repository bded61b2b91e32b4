"""The loader: reads this rank's bytes of every block into its shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dlo_core.shard import TRAILER_NBYTES, trailer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.host import HostStore
    from dlo_core.layout import BlockLayout
    from dlo_core.plan import ModelPlan
    from dlo_core.progress import Report
    from dlo_core.shard import Piece
    from dlo_core.source import Source

__all__ = ["count_shard_nbytes", "load_shards"]


def count_shard_nbytes(
    plans: Sequence[ModelPlan], rank: int, part: tuple[int, int] = (0, 1)
) -> int:
    """Return the bytes that ``rank`` reads for its shards, trailers and padding not counted."""
    blocks = [row for plan in plans for row in zip(plan.layouts, plan.shards, strict=True)]
    return sum(
        stop - start
        for number, (layout, shard) in enumerate(blocks)
        if number % part[1] == part[0]
        for piece in shard.pieces(rank)
        for _, start, stop, _ in _parts(layout, piece)
    )


def load_shards(
    plans: Sequence[ModelPlan],
    store: HostStore,
    *,
    rank: int,
    digest: bytes,
    report: Report,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Read the shards of all blocks of all plans into ``store``, block by block.

    Args:
        plans: The models.
        store: Holds one shard a block, in the order of the plans.
        rank: In the shard group.
        digest: Ends every shard, with the block and the rank.
        report: Is told the bytes.
        part: (i, n): read only the i-th of n parts of the blocks, for a store that ranks share.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    number = 0
    for plan in plans:
        for layout, cut in zip(plan.layouts, plan.shards, strict=True):
            if number % part[1] == part[0]:
                with store.writing(number) as shard:
                    for piece in cut.pieces(rank):
                        _load_piece(layout, piece, plan.sources, shard, report)
                    if cut.size > 1:
                        end = bytearray(trailer(digest, number, rank))
                        shard[cut.nbytes - TRAILER_NBYTES :] = torch.frombuffer(
                            end, dtype=torch.uint8
                        )
            number += 1
    report.finish()


def _load_piece(
    layout: BlockLayout,
    piece: Piece,
    sources: dict[str, Source],
    shard: torch.Tensor,
    report: Report,
) -> None:
    for index, start, stop, at in _parts(layout, piece):
        spec = layout.tensors[index]
        sources[spec.name].read(spec, start, stop, shard[at : at + stop - start])
        report.add(stop - start)


def _parts(layout: BlockLayout, piece: Piece) -> list[tuple[int, int, int, int]]:
    """Return (tensor, first byte, end, place in the shard) of the tensors in a piece of the run."""
    parts = []
    for index, spec in enumerate(layout.tensors):
        low = max(piece.start, spec.offset)
        high = min(piece.stop, spec.offset + spec.nbytes)
        if low < high:
            parts.append(
                (index, low - spec.offset, high - spec.offset, piece.at + low - piece.start)
            )
    return parts
