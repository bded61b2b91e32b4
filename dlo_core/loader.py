"""The loader: reads this rank's bytes of every block into its shard."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import repeat
from typing import TYPE_CHECKING

import torch

from dlo_core.packed_cut import PackedCut, packed_tensors
from dlo_core.packed_rows import PackedRow, find_row
from dlo_core.rawbytes import bytes_of
from dlo_core.reading import Work, default_threads, memory_of
from dlo_core.shard import TRAILER_NBYTES, trailer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from dlo_core.coder import Coder
    from dlo_core.host import HostStore
    from dlo_core.layout import BlockLayout
    from dlo_core.packed_store import PackedStore
    from dlo_core.plan import ModelPlan
    from dlo_core.progress import Report
    from dlo_core.shard import Piece
    from dlo_core.source import Source

__all__ = ["count_shard_nbytes", "load_blocks", "load_packed", "load_shards", "measure_packed"]


def count_shard_nbytes(plans: Sequence[ModelPlan], rank: int) -> int:
    """Return the bytes of ``rank``'s shards, trailers and padding not counted."""
    return sum(
        stop - start
        for plan in plans
        for layout, shard in zip(plan.layouts, plan.shards, strict=True)
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
    remainders: Sequence[torch.Tensor] = (),
    threads: int | None = None,
) -> None:
    """Read the shards of all blocks of all plans into ``store``, each file once from its beginning.

    Args:
        plans: The models.
        store: Holds one shard a block, in the order of the plans; one that does not read gets none.
        rank: In the shard group.
        digest: Ends every shard, with the block and the rank.
        report: Is told the bytes.
        part: ``(i, n)``: read the ``i``-th of ``n`` nearly equal parts of the shards' bytes, in the
            order of the files. With all ``n`` parts, by as many processes, a store that they share
            is full. Trailers are written by part 0.
        remainders: Memory for what stays on the device, one run a plan, or nothing; never divided.
        threads: How many read at once; None: one a CPU, at most 16.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    work, whole = Work(), Work()
    # A shard that lies in parts is read as one run, which goes to its places at the end.
    with ExitStack() as held:
        number = 0
        for plan in plans if store.reads else ():
            for layout, cut in zip(plan.layouts, plan.shards, strict=True):
                shard = held.enter_context(store.writing(number))
                memory = memory_of(shard)
                for piece in cut.pieces(rank):
                    _add_piece(work, layout, piece, plan.sources, memory)
                if cut.size > 1 and part[0] == 0:
                    end = bytearray(trailer(digest, number, rank))
                    shard[cut.nbytes - TRAILER_NBYTES :] = torch.frombuffer(end, dtype=torch.uint8)
                number += 1
        for plan, run in zip(plans, remainders, strict=False):
            _add_layout(whole, plan.remainder, plan.sources, run)
        work.take_part(part)
        work.join(whole)
        work.run(report, threads=default_threads() if threads is None else threads)
    report.finish()


def measure_packed(
    plans: Sequence[ModelPlan], coder: Coder, *, rank: int, threads: int | None = None
) -> list[int]:
    """Read all blocks once and return the bytes that this rank's part of each takes packed.

    Args:
        plans: The models, whose blocks are cut to be packed.
        coder: Counts.
        rank: In the shard group.
        threads: As in ``load_shards``.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    sizes = []
    for _, layout, cut, found in _packed_runs(plans, rank, threads, coder.host_run):
        if isinstance(found, PackedRow):
            sizes.append(found.nbytes)
        else:
            sizes.append(coder.measure(found, packed_tensors(layout, cut, rank)))
    return sizes


def load_packed(
    plans: Sequence[ModelPlan],
    store: PackedStore,
    *,
    rank: int,
    digest: bytes,
    report: Report,
    remainders: Sequence[torch.Tensor] = (),
    threads: int | None = None,
) -> None:
    """Read all blocks and pack them into ``store``, one after the other.

    Args:
        plans: As in ``load_shards``.
        store: Takes one part of a block at a time; ranks that share it take turns.
        rank: As in ``load_shards``.
        digest: As in ``load_shards``.
        report: As in ``load_shards``.
        remainders: As in ``load_shards``.
        threads: As in ``load_shards``.

    Raises:
        CheckpointError: The bytes cannot be read.
        DloError: They do not come out as they went in.
    """
    for number, _, cut, found in _packed_runs(plans, rank, threads, store.host_run, store.part):
        if isinstance(found, PackedRow):
            store.put(number, found.read(_threads(threads)))
        else:
            store.pack(number, found)
        if cut.size > 1:
            store.seal(number, trailer(digest, number, rank))
        report.add(sum(piece.stop - piece.start for piece in cut.pieces(rank)))
    store.rest()
    work = Work()
    for plan, run in zip(plans, remainders, strict=False):
        _add_layout(work, plan.remainder, plan.sources, run)
    work.run(threads=_threads(threads))
    report.finish()


def _threads(threads: int | None) -> int:
    return default_threads() if threads is None else threads


def _packed_runs(
    plans: Sequence[ModelPlan],
    rank: int,
    threads: int | None,
    host_run: Callable[[int], torch.Tensor],
    part: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, BlockLayout, PackedCut, torch.Tensor | PackedRow]]:
    """Yield each block's number, layout and cut, and this rank's part of it.

    The part is its run, read anew, or where it lies packed in the checkpoint.
    """
    rows = [row for plan in plans for row in zip(repeat(plan), plan.layouts, plan.shards)]
    largest = max(cut.part_nbytes for _, _, cut in rows if isinstance(cut, PackedCut))
    for number, (plan, layout, cut) in enumerate(rows):
        if number % part[1] != part[0]:
            continue
        assert isinstance(cut, PackedCut)
        row = find_row(layout, cut, rank, plan.sources)
        if row is not None:
            yield number, layout, cut, row
            continue
        run = host_run(largest)[: cut.part_nbytes]
        _clear_gaps(run, layout, rank * cut.part_nbytes)
        work = Work()
        for piece in cut.pieces(rank):
            _add_piece(work, layout, piece, plan.sources, memory_of(run))
        work.run(threads=_threads(threads))
        yield number, layout, cut, run


def _clear_gaps(run: torch.Tensor, layout: BlockLayout, first: int) -> None:
    """Zero what no tensor fills of a part that begins at byte ``first`` of the block's run."""
    at = 0
    for spec in layout.tensors:
        start, stop = spec.offset - first, spec.offset + spec.nbytes - first
        if start > at:
            run[at:start].zero_()
        at = max(at, stop)
    run[at:].zero_()


def load_blocks(
    plan: ModelPlan, blocks: Sequence[int], threads: int | None = None
) -> list[list[torch.Tensor]]:
    """Read whole blocks again from where they came, into host tensors of their own.

    Args:
        plan: The model.
        blocks: Numbers of its blocks.
        threads: As in ``load_shards``.

    Returns:
        The tensors of each block, in the order of its layout.

    Raises:
        CheckpointError: The bytes cannot be read.
    """
    work = Work()
    values = []
    for number in blocks:
        tensors = []
        for spec in plan.layouts[number].tensors:
            made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
            run = bytes_of(made, spec.nbytes)
            work.add(plan.sources[spec.name], spec, 0, memory_of(run))
            tensors.append(made)
        values.append(tensors)
    work.run(threads=default_threads() if threads is None else threads)
    return values


def _add_piece(
    work: Work,
    layout: BlockLayout,
    piece: Piece,
    sources: dict[str, Source],
    memory: memoryview,
) -> None:
    for index, start, stop, at in _parts(layout, piece):
        spec = layout.tensors[index]
        work.add(sources[spec.name], spec, start, memory[at : at + stop - start])


def _add_layout(
    work: Work, layout: BlockLayout, sources: dict[str, Source], run: torch.Tensor
) -> None:
    memory = memory_of(run)
    for spec in layout.tensors:
        out = memory[spec.offset : spec.offset + spec.nbytes]
        work.add(sources[spec.name], spec, 0, out)


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
