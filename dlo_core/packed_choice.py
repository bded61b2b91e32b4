"""The choice between raw and packed weights, from what the passes take.

[Note: raw or packed]
The weights are loaded raw. After some passes one block is packed for trial, which gives the ratio
and the time of decoding; the events of the last pass with times give the rest. When packing wins
(see [Note: three forms] in ``packed_figures.py``), all shards are packed in the memory in which
they lie, between two passes; when the passes change and it loses, they are decoded there again.
Both take about as long as copying all weights to the device and back.

Ranks that gather decide together, before passes of the same numbers, by the figures of the slowest;
a look costs them an exchange and an idle device, so there are a few.

The price of this freedom is memory: that of raw shards on the host, and on the device that of raw
slots and of one block more while the weights are packed.

[Note: making way]
Packed shards cannot do all that raw ones can: new values may not fit, a graph copies what it was
recorded with, and a model that calls blocks inside of others, or that has run out of memory, wants
memory back. So before an update the weights are decoded where they lie, and the looks begin anew;
in the other cases, too, and the looks end. Ranks that gather see nested blocks at their next look.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from dlo_core.packed_cut import packed_tensors
from dlo_core.packed_figures import Figures, Form
from dlo_core.packed_gauge import PackedGauge, nbytes_of
from dlo_core.packed_switch import Switch, what_is_missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.coder import Coder
    from dlo_core.engine import Engine
    from dlo_core.interface import Backend
    from dlo_core.pass_agreement import PassAgreement
    from dlo_core.streamer import Streamer

__all__ = ["PackedChoice"]

_logger = logging.getLogger("dlo")
# Passes before the first look: in the first ones kernels are chosen and compiled.
_WARM = 3
# The same where nobody asked; see [Note: by default] in packed_default.py.
_WARM_DEFAULT = 50
_EVERY = 8
# Ranks that gather look at pass 3, 12, 48 and so on.
_TIMES = 4
_MOST_SWITCHES = 6
# By default at least one part in so many of the device stays free.
_SPARED = 10
_LEAST_SLOTS = 2
_NESTS = "blocks are called inside of others, each of which takes a decoded block's memory"


class PackedChoice:
    """Looks at the passes and switches between them; see [Note: raw or packed].

    Attributes:
        reason: What was chosen, and why.
        by_default: Whether nobody asked for it.
    """

    def __init__(
        self,
        engine: Engine,
        coder: Coder,
        backend: Backend,
        ranks: PassAgreement,
        *,
        by_default: bool = False,
    ) -> None:
        """Begin with raw weights.

        Args:
            engine: Whose weights they are.
            coder: Packs and decodes.
            backend: Of the device.
            ranks: Those that gather together, or this one alone.
            by_default: Whether nobody asked for it.
        """
        self.by_default = by_default
        self._warm = _WARM_DEFAULT if by_default else _WARM
        self.reason = f"raw until {self._warm} passes were measured"
        # Which has this object.
        self._owner = weakref.ref(engine)
        self._coder = coder
        self._backend = backend
        self._ranks = ranks
        self._switch = Switch(engine, coder, backend, ranks)
        self._gauge = PackedGauge(self._switch)
        self._next = self._warm
        self._switches = 0
        self._doubts = 0
        self._asked_back = False
        # Why nobody looks any more, where the choice was ended.
        self._ended = ""
        self._held = 0

    @property
    def _engine(self) -> Engine:
        engine = self._owner()
        assert engine is not None
        return engine

    def before_pass(self, streamer: Streamer) -> None:
        """Look at the last pass of a model, and switch when it is time; between two passes.

        Raises:
            DloError: A rank failed or did not come; the offload is closed.
        """
        done = streamer.tape.num_passes
        if self._engine.pool.busy or self._held:
            return
        if self.by_default and not self._backend.may_wait():
            return
        with torch.inference_mode(False), torch.no_grad():
            if self._ranks.size > 1:
                if done >= self._next and self._switches < _MOST_SWITCHES:
                    self._next = _TIMES * done
                    try:
                        self._look_together(streamer)
                    except BaseException as error:
                        # An interrupt, too: the other ranks wait for what this one says.
                        self._engine.pool.fail(error)
                        raise
                return
            if why := self._wants_memory():
                self._make_raw(why)
            if self._switches >= _MOST_SWITCHES or done < self._next:
                return
            if self._gauge.trial is None:
                self._look_together(streamer)
            else:
                self._look(streamer)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the form meanwhile, whatever passes come; all ranks alike."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    def make_way(self, why: str) -> bool:
        """Let the weights be raw, and look again after some passes; between two passes.

        All ranks alike; nothing is under way. See [Note: making way].

        Args:
            why: In words, for ``reason``.

        Returns:
            Whether they are raw.

        Raises:
            DloError: It failed half-way where ranks gather; the offload is closed.
        """
        # Of every model: the next pass may be of any. Until then some pass has times of this form.
        done = max(streamer.tape.num_passes for streamer in self._engine.streamers)
        self._next = max(self._next, done + max(self._warm, _EVERY))
        self._doubts = 0
        if self._switch.form is Form.RAW:
            return True
        with torch.inference_mode(False), torch.no_grad():
            try:
                return self._make_raw(why)
            except BaseException as error:
                if self._ranks.size > 1:
                    # An interrupt, too: the other ranks wait for what this one says.
                    self._engine.pool.fail(error)
                raise

    def stop(self, why: str) -> None:
        """Leave the form as it is from now on."""
        self._stay(why)

    def _wants_memory(self) -> str:
        """Return why the memory that packed weights take is wanted, if it is, once; look no more.

        Where they are raw, nothing is to be given back, and no look takes it.
        """
        if self._asked_back:
            return ""
        streamers = self._engine.streamers
        ran_out = next((each.ran_out for each in streamers if each.ran_out), "")
        why = _NESTS if any(each.nests for each in streamers) else ""
        if ran_out and self.by_default:
            why = f"a pass ran out of memory: {ran_out}"
        if why:
            self._asked_back = True
            self._switches = _MOST_SWITCHES
        return why

    def _make_raw(self, why: str) -> bool:
        """Decode the weights where they lie, and let the memory go; return whether it was done."""
        if self._switch.form is Form.RAW:
            self.reason = f"raw: {why}"
            return True
        self._stand_still()
        why_not = self._to(Form.RAW)
        if why_not is not None:
            self._stay(why_not)
            return False
        self.reason = f"raw: {why}"
        if self._ended:
            self.reason += f"; they stay so: {self._ended}"
        elif self._switches >= _MOST_SWITCHES and not self._asked_back:
            self.reason += "; they were packed so often that they stay so"
        _logger.info("the weights are %s", self.reason)
        return True

    def _look_together(self, streamer: Streamer) -> None:
        """Compare what the slowest rank takes, and switch; all ranks alike."""
        self._stand_still()
        why_not = self._no_room() or (self._try_one() if self._gauge.trial is None else None)
        # There is one buffer for the blocks of all models.
        if any(each.nests for each in self._engine.streamers):
            why_not = _NESTS
        figures = self.figures(streamer) if why_not is None else None
        told = self._ranks.exchange(
            (why_not, figures),
            f"the choice of packed weights before pass {streamer.tape.num_passes + 1}",
        )
        for rank, (problem, _) in enumerate(told):
            if problem is not None:
                why = problem if len(told) == 1 else f"{problem} (rank {rank})"
                if problem != _NESTS or self._make_raw(why):
                    self._stay(why)
                return
        known = [each for _, each in told if each is not None]
        if len(known) == len(told):
            self._look_later(streamer)
            slowest = Figures.slowest(known)
            if len(told) > 1:
                mine = range(streamer.first_block, streamer.first_block + len(streamer.names))
                nbytes = nbytes_of(self._engine, mine, without=self._switch.staying)
                self._gauge.link_ms_per_byte = slowest.link_ms / max(nbytes, 1)
            self._decide(slowest, sure=True)

    def _look(self, streamer: Streamer) -> None:
        """Compare, and switch when two looks agree; never waits."""
        figures = self.figures(streamer)
        # Else the device is not so far; the next pass will do.
        if figures is not None:
            self._look_later(streamer)
            self._decide(figures, sure=False)

    def _look_later(self, streamer: Streamer) -> None:
        if self._ranks.size == 1:
            self._next = streamer.tape.num_passes + _EVERY

    def _decide(self, figures: Figures, *, sure: bool) -> None:
        form = figures.choose(self._switch.form)
        if form is self._switch.form:
            self._doubts = 0
            self.reason = f"{form.value}: {figures}"
            return
        self._doubts += 1
        if sure or self._doubts > 1:
            self._doubts = 0
            self._change(form, figures)

    def figures(self, streamer: Streamer) -> Figures | None:
        """Return what the last pass with times took; None where the device is still at it."""
        return self._gauge.figures(self._engine, streamer)

    def _no_room(self) -> str | None:
        """Return why packing would take memory that the model may want, where nobody asked."""
        if not self.by_default:
            return None
        if len(self._engine.pool.slots) < _LEAST_SLOTS:
            return "there is one slot, and coding takes two"
        memory = self._backend.memory()
        nbytes = max(layout.nbytes for layout in self._engine.layouts)
        if memory.free >= nbytes + memory.total // _SPARED:
            return None
        return (
            f"the device has {memory.free:,} bytes free, and by default one block's "
            f"{nbytes:,} are taken only where a tenth of the device is left beside them; "
            "packed='auto' takes them anyway"
        )

    def _try_one(self) -> str | None:
        """Pack the largest block for trial; return why it cannot be."""
        layouts = self._engine.layouts
        # A slot holds one that streams.
        streamed = set(range(len(layouts))) - self._switch.staying
        number = max(streamed or range(len(layouts)), key=lambda each: layouts[each].nbytes)
        run, cut = self._switch.store.whole(number), self._switch.cut(number)
        try:
            tensors = packed_tensors(layouts[number], cut, self._ranks.rank)
            nbytes, decode_ms = self._coder.trial(run, tensors)
        # Also what a compiler of kernels lacks on this machine, whatever it raises.
        except Exception as error:
            return what_is_missing("pack a block for trial", error)
        finally:
            self._coder.release()
        self._gauge.trial = nbytes / run.nbytes, decode_ms / run.nbytes
        return None

    def _stay(self, why_not: str) -> None:
        """Look no more."""
        self._switches, self._ended = _MOST_SWITCHES, why_not
        self._coder.release()
        self.reason = f"{self._switch.form.value}: {why_not}"
        _logger.info("the weights stay %s", self.reason)

    def _change(self, form: Form, figures: Figures) -> None:
        self._switches += 1
        self._stand_still()
        nests = any(each.nests for each in self._engine.streamers)
        why_not = None
        if form is not Form.RAW and self._ranks.size == 1:
            why_not = _NESTS if nests else self._no_room()
        why_not = why_not or self._to(form)
        if why_not is not None:
            self._stay(why_not)
            return
        self.reason = f"{form.value}: {figures}"
        _logger.info("the weights are %s", self.reason)

    def _to(self, form: Form) -> str | None:
        try:
            return self._switch.to(form, self._engine)
        except BaseException:
            self._switches, self._ended = _MOST_SWITCHES, "a change of the form was interrupted"
            self.reason = f"{self._switch.form.value}: {self._ended}"
            raise
        finally:
            # Also when it was interrupted: what was lent must be free before the next fill.
            self._coder.release()

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
