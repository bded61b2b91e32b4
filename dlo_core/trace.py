"""The trace: what each lane did for each block in the last pass that kept times.

Timing events are recorded on the hot path, in some passes, and read only here and by the choice of
packed weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlo_core.packed_cut import PackedCut
from dlo_core.stats import BlockState, BlockStats, Stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.engine import Engine
    from dlo_core.interface import Event
    from dlo_core.streamer import Streamer

__all__ = ["Span", "collect_stats", "spans"]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane.

    Attributes:
        lane: ``"compute"``, ``"wait"``, ``"copy"``, ``"gather"`` or ``"decode"``.
        block: Dotted name of the block.
        start_ms: Milliseconds from the start of the pass; negative for what was prefetched before.
        end_ms: Milliseconds from the start of the pass.
    """

    lane: str
    block: str
    start_ms: float
    end_ms: float


def spans(offload: Any) -> tuple[Span, ...]:
    """Return the spans of the last pass of an enabled ``LayerwiseOffload`` that kept times.

    They are ordered by their start. The fills are the blocks' latest ones: those of the first
    blocks belong to the next pass. Work that is still under way is left out.
    """
    engine = offload.engine
    found = [] if engine is None else [s for t in engine.streamers for s in _spans(engine, t)]
    return tuple(sorted(found, key=lambda span: span.start_ms))


def _spans(engine: Engine, streamer: Streamer) -> Iterator[Span]:
    origin = streamer.pass_start
    for local, name in enumerate(streamer.names):
        number = streamer.first_block + local
        times = engine.blocks[number].times
        moved = number in streamer.last_loaded or number not in engine.pool.residents
        lanes = [("copy", times.copy_start, times.copy_end)] if moved else []
        if moved and engine.transfer.gathers:
            lanes.append(("gather", times.gather_start, times.gather_end))
        if number in streamer.last_waited:
            if moved and times.waited:
                lanes.append(("wait", times.wait_start, times.wait_end))
            start = times.wait_end
            if _is_packed(engine, number):
                lanes.append(("decode", times.wait_end, times.decode_end))
                start = times.decode_end
            lanes.append(("compute", start, times.compute_end))
        for lane, start, end in lanes:
            begin, length = _elapsed(origin, start), _elapsed(start, end)
            if begin is not None and length is not None:
                yield Span(lane, name, begin, begin + length)


def collect_stats(engine: Engine) -> Stats:
    """Return the statistics of ``engine`` on this rank."""
    ran = {number for streamer in engine.streamers for number in streamer.last_waited}
    loaded = {number for streamer in engine.streamers for number in streamer.last_loaded}
    still = engine.pool.residents.keys() - loaded
    blocks = tuple(
        _block_stats(engine, number, number in ran, moved=number not in still)
        for number in range(len(engine.layouts))
    )
    exposed_ms = sum(blocks[number].exposed_ms for number in ran)
    moved_ms = sum(blocks[number].transfer_ms for number in ran)
    tapes = [streamer.tape for streamer in engine.streamers]
    host = engine.store.account
    return Stats(
        device_bytes=engine.device_nbytes,
        host_bytes=engine.store.nbytes,
        pinned_bytes=host.pinned,
        shared_bytes=host.shared,
        pageable_bytes=host.pageable,
        staging_bytes=host.staging,
        mapped_bytes=host.mapped,
        resident_bytes=engine.pool.residents_nbytes,
        passes=sum(tape.num_passes for tape in tapes),
        fills=sum(tape.num_fills for tape in tapes),
        skipped_fills=sum(tape.num_skipped for tape in tapes),
        copied_bytes=engine.transfer.copied_nbytes,
        gathered_bytes=engine.transfer.gathered_nbytes,
        exposed_ms=exposed_ms,
        transfer_ms=moved_ms,
        overlap=_overlap(exposed_ms, moved_ms),
        blocks=blocks,
        packed_ratio=_packed_ratio(engine),
        decode_ms=sum(blocks[number].decode_ms for number in ran),
        packed_reason=None if engine.choice is None else engine.choice.reason,
    )


def _packed_ratio(engine: Engine) -> float | None:
    if engine.pool.decoded is None:
        return None
    cuts = [(n, cut) for n, cut in enumerate(engine.shards) if isinstance(cut, PackedCut)]
    packed = sum(cut.padded_nbytes for _, cut in cuts)
    return packed / sum(engine.layouts[number].nbytes for number, _ in cuts)


def _is_packed(engine: Engine, number: int) -> bool:
    return isinstance(engine.shards[number], PackedCut)


def _block_stats(engine: Engine, number: int, ran: bool, *, moved: bool) -> BlockStats:
    times, layout = engine.blocks[number].times, engine.layouts[number]
    waited, decoded = ran and moved and times.waited, ran and _is_packed(engine, number)
    exposed_ms = (_elapsed(times.wait_start, times.wait_end) or 0.0) if waited else 0.0
    moved_ms = _moved_ms(engine, number) if moved else 0.0
    return BlockStats(
        name=layout.name,
        state=_state(engine, number),
        nbytes=layout.nbytes,
        exposed_ms=exposed_ms,
        transfer_ms=moved_ms,
        overlap=_overlap(exposed_ms, moved_ms) if ran else None,
        tier=engine.store.tiers[number],
        resident=number in engine.pool.residents,
        decode_ms=(_elapsed(times.wait_end, times.decode_end) or 0.0) if decoded else 0.0,
    )


def _overlap(exposed_ms: float, moved_ms: float) -> float | None:
    return max(0.0, 1.0 - exposed_ms / moved_ms) if moved_ms else None


def _moved_ms(engine: Engine, number: int) -> float:
    times = engine.blocks[number].times
    copied = _elapsed(times.copy_start, times.copy_end) or 0.0
    gathered = _elapsed(times.gather_start, times.gather_end) if engine.transfer.gathers else None
    return copied + (gathered or 0.0)


def _state(engine: Engine, number: int) -> BlockState:
    mine = engine.pool.residents.get(number)
    if mine is not None:
        there = any(
            number in streamer.residents.numbers
            for streamer in engine.streamers
            if streamer.residents.loaded
        )
        if mine.bound:
            return BlockState.BOUND
        return BlockState.RESIDENT if there else BlockState.WAITING
    state = BlockState.WAITING
    for slot in engine.pool.slots:
        if slot.tape is not None and slot.tape.block(slot.fill) == number:
            state = BlockState.BOUND if slot.bound else BlockState.FILLED
            if slot.bound:
                break
    return state


def _elapsed(start: Event, end: Event) -> float | None:
    """Return the milliseconds between two events, or None when they are not both there yet.

    Nor where their stream failed: the statistics of an offload that failed can be read.
    """
    try:
        return start.elapsed_time(end) if start.query() and end.query() else None
    except (ValueError, RuntimeError):
        return None
