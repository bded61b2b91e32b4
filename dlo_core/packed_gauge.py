"""The gauge: what the last pass with times took, in the figures by which the form is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.packed_cut import PackedCut
from dlo_core.packed_figures import Figures
from dlo_core.packed_switch import more_residents

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from dlo_core.engine import Engine
    from dlo_core.interface import Event
    from dlo_core.packed_switch import Switch
    from dlo_core.streamer import Streamer

__all__ = ["PackedGauge", "nbytes_of"]


class PackedGauge:
    """Reads the events of passes.

    Attributes:
        trial: What a trial gave: bytes packed to raw, and milliseconds of decoding a raw byte.
        link_ms_per_byte: Of the last pass in which anything was copied, or of the slowest rank's.
    """

    def __init__(self, switch: Switch) -> None:
        """Begin without a trial.

        Args:
            switch: Knows how blocks are cut, and which stay while they are raw.
        """
        self.trial: tuple[float, float] | None = None
        self.link_ms_per_byte = 0.0
        self._switch = switch

    def figures(self, engine: Engine, streamer: Streamer) -> Figures | None:
        """Return what the last pass with times took; None where the device is still at it.

        Args:
            engine: Of the offload.
            streamer: Of the model.
        """
        assert self.trial is not None
        ratio, decode_ms_per_byte = self.trial
        staying, ran = self._switch.staying, streamer.last_waited
        compute = 0.0
        for number in ran:
            times = engine.blocks[number].times
            start = times.decode_end if _is_packed(engine, number) else times.wait_end
            spent = _elapsed(start, times.compute_end)
            if spent is None:
                return None
            compute += spent
        mine = range(streamer.first_block, streamer.first_block + len(streamer.names))
        # Ranks that gather make all fills, whatever they run.
        moved = mine if engine.transfer.gathers else ran
        moves = self._moves(engine, mine, moved)
        if moves is None:
            return None
        decode_nbytes = nbytes_of(engine, ran, without=staying)
        return Figures(
            compute_ms=compute,
            link_ms=moves[0],
            decode_ms=decode_nbytes * decode_ms_per_byte,
            ratio=ratio,
            stay_decode_ms=(nbytes_of(engine, ran) - decode_nbytes) * decode_ms_per_byte,
            spared=self._spared(engine, streamer, mine, ratio),
            gathers_ms=moves[1],
        )

    def _moves(
        self, engine: Engine, mine: Sequence[int], moved: Sequence[int]
    ) -> tuple[float, tuple[float, ...]] | None:
        """Return the time of the copies, and of each gather, of a pass with raw weights.

        Args:
            engine: Of the offload.
            mine: All blocks of the model.
            moved: Those that a pass loads if they do not stay.

        Returns:
            As if those streamed that stream while the weights are raw; None where what was queued
            has not come yet.
        """
        staying = self._switch.staying
        nbytes = nbytes_of(engine, moved, without=staying)
        if not nbytes or _loads_once(engine, len(set(mine) - staying)):
            return 0.0, ()
        streamed = [number for number in moved if number not in engine.pool.residents]
        streamed_nbytes = nbytes_of(engine, streamed)
        if not streamed or _loads_once(engine, len(set(mine) - engine.pool.residents.keys())):
            # Nothing is loaded any more.
            return self.link_ms_per_byte * nbytes, ()
        assert self.trial is not None
        copied, gathers = 0.0, []
        for number in streamed:
            times = engine.blocks[number].times
            scale = (
                nbytes / streamed_nbytes / (self.trial[0] if _is_packed(engine, number) else 1.0)
            )
            spent = _elapsed(times.copy_start, times.copy_end)
            if engine.transfer.gathers and spent is not None:
                gather = _elapsed(times.gather_start, times.gather_end)
                gathers.append(gather * scale if gather is not None else -1.0)
            if spent is None or (gathers and gathers[-1] < 0):
                return None
            copied += spent * scale
        self.link_ms_per_byte = copied / nbytes
        return copied, tuple(gathers)

    def _spared(
        self, engine: Engine, streamer: Streamer, mine: Sequence[int], ratio: float
    ) -> float:
        """Return which part of the link's bytes stays on the device when all blocks are packed."""
        staying = self._switch.staying
        if not all(each.tape.num_passes for each in engine.streamers):
            # One whose ring order is not known yet.
            return 0.0
        stay = [number for number in mine if number in staying]
        streamed = [number for number in mine if number not in staying]
        nbytes = {number: self._packed_nbytes(engine, number, ratio) for number in mine}
        more = more_residents(stay, streamed, nbytes, streamer.residents.run_nbytes)
        if more and _loads_once(engine, len(streamed) - len(more)):
            return 1.0
        return nbytes_of(engine, more) / max(nbytes_of(engine, streamed), 1)

    def _packed_nbytes(self, engine: Engine, number: int, ratio: float) -> int:
        """Return the bytes of a block on the device when it is packed and stays, about."""
        known, cut = engine.shards[number], self._switch.cut(number)
        if isinstance(known, PackedCut):
            return known.padded_nbytes
        return cut.measured(int(cut.part_nbytes * ratio)).padded_nbytes


def nbytes_of(engine: Engine, numbers: Iterable[int], without: Collection[int] = ()) -> int:
    """Return the bytes of these blocks, decoded."""
    layouts = engine.layouts
    return sum(layouts[number].nbytes for number in numbers if number not in without)


def _loads_once(engine: Engine, num_streamed: int) -> bool:
    """Return whether each block that streams has a slot to itself."""
    return len(engine.streamers) == 1 and num_streamed <= len(engine.pool.slots)


def _is_packed(engine: Engine, number: int) -> bool:
    return isinstance(engine.shards[number], PackedCut)


def _elapsed(start: Event, end: Event) -> float | None:
    if not (start.query() and end.query()):
        return None
    try:
        return max(start.elapsed_time(end), 0.0)
    except (ValueError, RuntimeError):
        return None
