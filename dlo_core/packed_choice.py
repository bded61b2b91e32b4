"""The choice between raw and packed weights, from what the passes take; where nothing is gathered.

[Note: raw or packed]
Packed weights take less of the link's time and add the decoding to the computation. So they are
faster where the link is the bound, and slower where the computation is. The weights are loaded raw.
After some passes one block is packed for trial, which gives the ratio and the time of decoding; the
events of the last pass give the rest. When packing wins, all shards are packed in the memory in
which they lie, between two passes; when the passes change and it loses, they are decoded there
again. Both take about as long as copying all weights to the device and back.

The price of this freedom is memory: that of raw shards on the host, and on the device that of raw
slots and of one block more while the weights are packed.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dlo_core.packed_cut import PackedCut, packed_tensors
from dlo_core.packed_store import PackedStore
from dlo_core.slots import Slot

if TYPE_CHECKING:
    from dlo_core.coder import Coder
    from dlo_core.engine import Engine
    from dlo_core.interface import Backend, Event
    from dlo_core.streamer import Streamer

__all__ = ["Figures", "PackedChoice"]

_logger = logging.getLogger("dlo")
# Passes before the first look: in the first ones kernels are chosen and compiled.
_WARM = 3
_EVERY = 8
_MOST_SWITCHES = 6
# A gain that is worth the switch, and a loss that is.
_GAIN = 0.97
_LOSS = 0.99


@dataclass(frozen=True, slots=True)
class Figures:
    """What a pass takes.

    Attributes:
        compute_ms: Computation of all blocks.
        link_ms: Copies of all blocks that stream, raw.
        decode_ms: Decoding of all blocks.
        ratio: Bytes packed to bytes raw.
    """

    compute_ms: float
    link_ms: float
    decode_ms: float
    ratio: float

    @property
    def raw_ms(self) -> float:
        """The limit of a pass with raw weights."""
        return max(self.compute_ms, self.link_ms)

    @property
    def packed_ms(self) -> float:
        """The limit of a pass with packed weights."""
        return max(self.compute_ms + self.decode_ms, self.link_ms * self.ratio)

    def wants_packed(self, *, packed: bool) -> bool:
        """Return whether the weights should be packed, given whether they are."""
        if packed:
            return self.raw_ms >= _LOSS * self.packed_ms
        room = self.compute_ms + self.decode_ms < self.link_ms
        return room and self.packed_ms < _GAIN * self.raw_ms

    def __str__(self) -> str:
        """Say what was compared."""
        return (
            f"computation {self.compute_ms:.2f} ms, link {self.link_ms:.2f} ms raw and "
            f"{self.link_ms * self.ratio:.2f} ms packed, decoding {self.decode_ms:.2f} ms a pass"
        )


class PackedChoice:
    """Looks at the passes and switches between them; see [Note: raw or packed].

    Attributes:
        packed: Whether the weights are packed now.
        reason: Why.
    """

    def __init__(self, engine: Engine, coder: Coder, backend: Backend) -> None:
        """Begin with raw weights.

        Args:
            engine: Whose weights they are.
            coder: Packs and decodes.
            backend: Of the device.
        """
        self.packed = False
        self.reason = f"raw until {_WARM} passes were measured"
        # Which has this object.
        self._owner = weakref.ref(engine)
        self._coder = coder
        self._backend = backend
        self._raw_store = engine.store
        self._raw_shards = list(engine.shards)
        self._trial: tuple[float, float] | None = None
        self._last = 0
        self._switches = 0
        self._doubts = 0

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    def before_pass(self, streamer: Streamer) -> None:
        """Look at the last pass of a model, and switch when it is time; between two passes."""
        done = streamer.tape.num_passes
        if self._engine.pool.busy or self._switches >= _MOST_SWITCHES:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._trial is None:
                if done >= _WARM:
                    self._stand_still()
                    why_not = self._try_one()
                    if why_not is None:
                        self._look(streamer, sure=True)
                    else:
                        self._stay(why_not)
            elif done - self._last >= _EVERY:
                self._look(streamer, sure=False)

    def _look(self, streamer: Streamer, *, sure: bool) -> None:
        """Compare, and switch when two looks agree; never waits."""
        figures = self.figures(streamer)
        if figures is None:
            # The device is not so far; the next pass will do.
            return
        self._last = streamer.tape.num_passes
        if figures.wants_packed(packed=self.packed) == self.packed:
            self._doubts = 0
            self.reason = f"{'packed' if self.packed else 'raw'}: {figures}"
            return
        self._doubts += 1
        if sure or self._doubts > 1:
            self._doubts = 0
            self._switch(figures)

    def figures(self, streamer: Streamer) -> Figures | None:
        """Return what the last pass took; None where the device has not come to its end."""
        engine, trial = self._engine, self._trial
        assert trial is not None
        ratio, decode_ms_per_byte = trial
        compute = link = decode = 0.0
        for number in streamer.last_waited:
            times = engine.blocks[number].times
            start = times.decode_end if self.packed else times.wait_end
            spent = _elapsed(start, times.compute_end)
            if spent is None:
                return None
            compute += spent
            decode += engine.layouts[number].nbytes * decode_ms_per_byte
            if number not in engine.pool.residents:
                copied = _elapsed(times.copy_start, times.copy_end)
                if copied is None:
                    return None
                link += copied / (ratio if self.packed else 1.0)
        return Figures(compute, link, decode, ratio)

    def _try_one(self) -> str | None:
        """Pack the largest block for trial; return why it cannot be."""
        layouts = self._engine.layouts
        number = max(range(len(layouts)), key=lambda each: layouts[each].nbytes)
        run = self._raw_store.whole(number)
        try:
            nbytes, decode_ms = self._coder.trial(run, self._tensors(number))
        except RuntimeError as error:
            return _no_room("pack a block for trial", error)
        self._trial = nbytes / run.nbytes, decode_ms / run.nbytes
        self._coder.release()
        return None

    def _tensors(self, number: int) -> list[tuple[int, int]]:
        return packed_tensors(self._engine.layouts[number], self._cut(number), 0)

    def _cut(self, number: int) -> PackedCut:
        alignment = self._backend.capabilities.alignment
        return PackedCut.cut(self._engine.layouts[number].nbytes, 1, alignment)

    def _stay(self, why_not: str) -> None:
        """Look no more."""
        self._switches = _MOST_SWITCHES
        self._coder.release()
        self.reason = f"{'packed' if self.packed else 'raw'}: {why_not}"
        _logger.info("the weights stay %s", self.reason)

    def _switch(self, figures: Figures) -> None:
        self._switches += 1
        self._stand_still()
        why_not = self._unpack() if self.packed else self._pack()
        if why_not is not None:
            self._stay(why_not)
            return
        self._coder.release()
        self.packed = not self.packed
        self.reason = f"{'packed' if self.packed else 'raw'}: {figures}"
        _logger.info("the weights are %s", self.reason)

    def _pack(self) -> str | None:
        """Pack all shards where they lie; return why it cannot be, having changed nothing."""
        engine, store = self._engine, self._raw_store
        cuts = []
        try:
            for number, raw in enumerate(self._raw_shards):
                taken = self._coder.measure(store.whole(number), self._tensors(number))
                if taken > raw.nbytes:
                    return f"block {engine.layouts[number].name!r} does not get smaller"
                cut = self._cut(number).measured(taken)
                cuts.append(replace(cut, nbytes=min(cut.nbytes, raw.nbytes)))
            largest = max(cut.decoded_nbytes for cut in cuts)
            self._coder.reserve(largest, max(cut.nbytes for cut in cuts), packs=True)
            home = Slot.new(self._backend, -1, self._backend.empty(largest))
        except RuntimeError as error:
            return _no_room("pack the blocks", error)
        packed = PackedStore(
            store, self._coder, engine.layouts, cuts, backend=self._backend, rank=0
        )
        for number in range(len(cuts)):
            packed.pack(number, store.whole(number))
        engine.change_form(packed, cuts, home)
        return None

    def _unpack(self) -> str | None:
        """Decode all shards where they lie; return why it cannot be, having changed nothing."""
        engine, store = self._engine, self._raw_store
        packed, cuts = engine.store, engine.shards
        try:
            largest = max(cut.decoded_nbytes for cut in cuts)
            self._coder.reserve(largest, max(cut.nbytes for cut in cuts), packs=False)
        except RuntimeError as error:
            return _no_room("decode all blocks back", error)
        for number, raw in enumerate(self._raw_shards):
            store.write(number, 0, packed.whole(number)[: raw.nbytes])
        engine.change_form(store, self._raw_shards, None)
        return None

    def _stand_still(self) -> None:
        """Wait until nothing is copied, so that shards may change."""
        engine = self._engine
        if engine.pool.owner.open:
            engine.pool.owner.end_pass()
        engine.transfer.settle()
        engine.transfer.stand_still()

    def __repr__(self) -> str:
        """Show what was chosen, and why."""
        return f"PackedChoice({self.reason})"


def _no_room(what: str, error: RuntimeError) -> str:
    return f"there is no room on the device to {what}: {error}"


def _elapsed(start: Event, end: Event) -> float | None:
    if not (start.query() and end.query()):
        return None
    try:
        return max(start.elapsed_time(end), 0.0)
    except (ValueError, RuntimeError):
        return None
