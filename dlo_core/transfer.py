"""Transfers: how a block's bytes get into its slot, and the events that order it.

[Note: two events]
Every buffer that streams write in turn, slot and stage alike, has two events: *filled* (the bytes
are there) and *drained* (nobody reads them any more). They order everything:

- copy k      waits stage.drained,               records stage.filled
- gather k    waits stage.filled, slot.drained,  records stage.drained, slot.filled
- compute k   waits slot.filled,                 records slot.drained

A compute stream that reads a fill which another one has read waits for that one's slot.drained.

A block that stays is loaded by the same steps into a slot of its own, between two passes. Its
memory may be what a computation used last, so the load first records slot.drained on the current
stream. Nothing writes the slot while it is read, so each stream waits for slot.filled once a load.

A block that travels packed is decoded by the stream that computes, right before: into the one
buffer where all blocks compute, which is their *home*; a block that is called inside of another one
has a home of its own. So the slot is drained as soon as this is done, and the home has one event,
drained, recorded behind each computation; another stream waits for it before it decodes or computes
there. One that computes from what another stream has decoded waits for that, too: for the slot's
drained, which is recorded right behind it.

A pass that is captured as a graph runs over other events: see [Note: a captured pass] in
``capture.py``. Outside of it *drained* stands for the whole graph.

A feed may queue the copy later, in a thread of its own; then the host catches up with it before it
lets anything wait for the event behind the copy. See [Note: staging] in ``staging.py``.

Where nothing is gathered the copy takes the gather's place; where the gather is in place the slot
itself is the stage, and *copied* stands for stage.filled. ``wait_event`` and ``record_event`` are
called here, in ``gather_transfer.py`` and in ``decoded_home.py``, and nowhere else.

[Note: one event for both]
Where a fill or a computation ends, the block's timing event would be recorded right beside the
slot's, and each takes a moment of the stream. So a slot's *filled* and *drained* are events of that
slot and its present block; the block's times take them over. They belong to a slot and a block
together: as the block's alone, one could be recorded again for another slot while somebody is still
to wait for it here.

[Note: times of some passes]
An event that keeps the time takes the host twice as long as one that does not, and in a trace of an
H200 the gaps between kernels were 18 us a block longer with the five that a block then has.
So most passes keep no times, see ``OffloadConfig.time_every``: they record *filled* and *drained*
alone, over events of their own, and the times stay those of the last pass that kept them. What a
fill or a call begins with is what it ends with, whenever it is queued.

A fill is up to three steps: copy, gather, unpack. Unpack and home are objects, so that what travels
and what computes can differ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING

from dlo_core.feed import DirectFeed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from dlo_core.decoded_home import DecodedHome
    from dlo_core.feed import Feed, Part
    from dlo_core.interface import Backend, Event, Stream
    from dlo_core.slots import Pool, Slot
    from dlo_core.travelling import BlockTimes, TravellingBlock

__all__ = ["LocalTransfer", "Transfer", "reached"]


class Transfer(ABC):
    """Queues the steps of a fill on the copy and comm streams, ordered by two events a buffer."""

    gathers = False
    staged = False

    def __init__(
        self,
        backend: Backend,
        pool: Pool,
        blocks: Sequence[TravellingBlock],
        *,
        home: DecodedHome | None = None,
        feed: Feed | None = None,
    ) -> None:
        """Make the side streams.

        Args:
            backend: Whose streams and copies are used.
            pool: The slots and stages.
            blocks: What travels, by block number; of all models of the pool.
            home: Where packed blocks compute; None: blocks compute in their slots.
            feed: Brings the shards to where they are copied from; None: they are there.
        """
        self._feed: Feed = feed or DirectFeed()
        self._direct = type(self._feed) is DirectFeed
        self._home = home
        self._backend = backend
        self._pool = pool
        self._blocks = blocks
        self._copy_stream = backend.new_stream()
        self._graph_streams: list[Stream] = []
        self._edge = backend.new_event()
        self.timed = True
        # By slot and block: filled and drained. See [Note: one event for both].
        self._ends: dict[tuple[int, int], tuple[Event, Event]] = {}
        # The same of passes that keep no times.
        self._bare_ends: dict[tuple[int, int], tuple[Event, Event]] = {}
        # What is reached when the device is done with a block's last call.
        self._done: dict[int, Event] = {}
        self.copied_nbytes = 0
        self.gathered_nbytes = 0

    @property
    def recorded(self) -> bool:
        """Whether what is queued now is recorded in a graph, and does not run."""
        return self._backend.recording()

    @property
    def feed(self) -> Feed:
        """What brings the shards."""
        return self._feed

    def copy_ahead(self, block: int, fill: int) -> None:  # noqa: B027 - nothing to do by default
        """Queue the copy of a later fill into its stage, where there are stages."""

    @abstractmethod
    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Queue all steps of fill number ``fill``, which loads ``block`` into ``slot``."""

    def forget_staged(self) -> None:  # noqa: B027 - nothing to do by default
        """Forget copies that wait in a stage for their gather."""

    def load(self, slot: Slot, block: int) -> None:
        """Queue all steps that bring ``block`` into the slot in which it stays."""
        # See [Note: two events].
        slot.reader = None
        slot.turn += 1
        self._backend.current_stream().record_event(slot.drained)
        self._bring(slot, block)

    @abstractmethod
    def _bring(self, slot: Slot, block: int) -> None:
        """Queue all steps that bring ``block`` into ``slot`` without a stage."""

    def acquire_resident(self, slot: Slot, block: int) -> bool:
        """Let the current stream wait until a block that stays is there.

        Returns:
            Whether it waits: the first time after a load.
        """
        stream, timed = self._backend.current_stream(), self.timed
        waits = _is_first_read(slot, stream)
        if timed:
            times = self._blocks[block].times
            times.waited = waits
            if waits:
                stream.record_event(times.wait_start)
        if waits:
            self._wait_for_load(slot, stream)
        if (home := self._home_of(slot)) is not None:
            home.enter(stream, slot, self._blocks[block], timed=timed)
        elif timed:
            stream.record_event(times.wait_end)
        return waits

    def _wait_for_load(self, slot: Slot, stream: Stream) -> None:
        self._feed.catch_up(slot.filled)
        # See [Note: two events].
        stream.wait_event(slot.filled)
        slot.reader = stream

    def use(self, home: DecodedHome | None) -> None:
        """Let blocks compute elsewhere from now on; nothing is under way."""
        self._home = home
        for slot in self._pool.slots:
            # A block's times keep the event that it was. See [Note: one event for both].
            slot.drained = slot.rest

    def forget_decoded(self) -> None:
        """Forget what was decoded: its buffers were written."""
        if self._home is not None:
            self._home.forget()

    def home(self, slot: Slot) -> Slot:
        """Return what the block in ``slot`` computes from, once it is acquired."""
        home = self._home_of(slot)
        return slot if home is None else home.of(slot)

    def _home_of(self, slot: Slot) -> DecodedHome | None:
        return None if slot.raw else self._home

    def acquire(self, slot: Slot, block: int) -> None:
        """Let the current stream wait until ``slot`` is filled."""
        self._feed.catch_up(slot.filled)
        # See [Note: two events].
        stream, timed = self._backend.current_stream(), self.timed
        times = self._blocks[block].times
        if timed:
            # It may have stayed before.
            times.waited = True
            stream.record_event(times.wait_start)
        stream.wait_event(slot.filled)
        if (home := self._home_of(slot)) is not None:
            home.enter(stream, slot, self._blocks[block], timed=timed)
            return
        self._wait_for_reader(slot, stream)
        if timed:
            stream.record_event(times.wait_end)

    def _wait_for_reader(self, slot: Slot, stream: Stream) -> None:
        if slot.reader is not None and slot.reader != stream:
            # Another stream reads the same fill: its drained is about to be recorded anew here, so
            # ours must come after it.
            stream.wait_event(slot.drained)

    def release(self, slot: Slot, block: int) -> None:
        """Say that the current stream's work so far is the last that reads ``slot``."""
        # See [Note: two events].
        stream = self._backend.current_stream()
        if (home := self._home_of(slot)) is not None:
            home.leave(stream, slot)
        elif not slot.stays:
            # The block may have been called inside of itself, on another stream.
            self._wait_for_reader(slot, stream)
            # See [Note: one event for both].
            slot.drained = self._done[block] = self._ends_of(slot, block)[1]
            stream.record_event(slot.drained)
            slot.reader = stream
            if self.timed:
                self._blocks[block].times.compute_end = slot.drained
            return
        if self.timed:
            times = self._blocks[block].times
            stream.record_event(times.compute_end)
            self._done[block] = times.compute_end
        elif self.gathers:
            # Orders nothing. The slot's event, if one was recorded, says nothing of the
            # computation, and the watch must see that the device gets on.
            self._done[block] = self._ends_of(slot, block)[1]
            stream.record_event(self._done[block])

    def _ends_of(self, slot: Slot, block: int) -> tuple[Event, Event]:
        """Return *filled* and *drained* of a slot and the block in it, for this kind of pass."""
        known = self._ends if self.timed else self._bare_ends
        ends = known.get((slot.index, block))
        if ends is None:
            new_event, timed = self._backend.new_event, self.timed
            ends = known[slot.index, block] = new_event(timing=timed), new_event(timing=timed)
        return ends

    def mark(self, event: Event) -> None:
        """Record a timing ``event`` on the current stream, if times are kept."""
        if self.timed:
            self._backend.current_stream().record_event(event)

    def seal(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 - nothing by default
        """Let what a pass returns be NaN if gathers are given up before the device is there."""

    def give_up(self) -> None:  # noqa: B027 - as above
        """Say that gathers are about to be given up; from any thread."""

    def num_computed(self) -> int:
        """Return how many blocks' last calls the device is done with; asks and never waits.

        Where nothing is gathered nobody watches, and some blocks count only where times are kept.
        """
        return sum(map(reached, list(self._done.values())))

    def twin(self, pool: Pool) -> Transfer:
        """Return a transfer of the same blocks into other slots, by streams of its own.

        It keeps no times. Nothing is gathered: see ``capture.py``.
        """
        home = None if self._home is None else self._home.twin(pool)
        made = type(self)(self._backend, pool, self._blocks, home=home, feed=self._feed)
        made.timed = False
        return made

    def fork(self) -> None:
        """Let the side streams begin behind the current one; see [Note: a captured pass]."""
        current = self._backend.current_stream()
        current.record_event(self._edge)
        for side in self._streams():
            side.wait_event(self._edge)

    def join(self) -> None:
        """Let the current stream go on behind the side streams; see [Note: a captured pass]."""
        current = self._backend.current_stream()
        for side in self._streams():
            side.record_event(self._edge)
            current.wait_event(self._edge)

    def before_graph(self) -> None:
        """Let the current stream wait for all slots: a graph that holds a pass comes next."""
        # See [Note: two events].
        stream = self._backend.current_stream()
        for slot in self._pool.slots:
            stream.wait_event(slot.filled)
            stream.wait_event(slot.drained)
        for slot in self._pool.residents.values():
            if _is_first_read(slot, stream):
                self._wait_for_load(slot, stream)
        if self._home is not None:
            self._home.before_graph(stream)

    def after_graph(self, copied_nbytes: int) -> None:
        """Say that the graph on the current stream is the last to fill and read all slots.

        Args:
            copied_nbytes: Bytes that it copies from the host.
        """
        # See [Note: two events].
        stream = self._backend.current_stream()
        for slot in self._pool.slots:
            # A block's times have the event that it was.
            slot.drained = slot.rest
            # Also for what was filled: who reads it on another stream waits for it.
            stream.record_event(slot.drained)
            slot.reader = stream
        if self._home is not None:
            self._home.after_graph(stream)
        # It copies from the host, too, which must stay until it is done.
        if stream not in self._graph_streams:
            self._graph_streams.append(stream)
        self.copied_nbytes += copied_nbytes

    def close(self) -> None:
        """Forget what travels, without waiting for anything that waits for another rank."""
        self._feed.close()
        self._blocks = ()
        # It has the decoded block's memory.
        self._home = None

    def settle(self) -> None:
        """Block the host until every queued transfer is done."""
        self._feed.settle()
        for stream in (*self._streams(), *self._graph_streams):
            stream.synchronize()

    def stand_still(self) -> None:
        """Block the host until every queued transfer is done, and all compute."""
        self._backend.synchronize()

    def _streams(self) -> tuple[Stream, ...]:
        return (self._copy_stream,)

    def _times(self, block: int) -> BlockTimes | None:
        """Return the block's times, if they are kept now."""
        return self._blocks[block].times if self.timed else None

    def _send(self, block: int, filled: Event, queue: Callable[[Sequence[Part]], None]) -> None:
        """Have the feed ``queue`` the copy of the block's shard, which records ``filled``."""
        travelling = self._blocks[block]
        self.copied_nbytes += travelling.plan.nbytes
        self._feed.send(block, travelling.parts, filled, queue)

    def _copy(self, times: BlockTimes | None, dst: torch.Tensor, parts: Sequence[Part]) -> None:
        """Queue the copy of a block's shard to ``dst``, behind the first of its ``times``."""
        if times is not None:
            self._copy_stream.record_event(times.copy_start)
        for at, part in parts:
            nbytes = part.numel()
            # A slice takes as long as an event, and most blocks are as large as their slot.
            whole = at == 0 and nbytes == dst.numel()
            self._backend.copy(dst if whole else dst[at : at + nbytes], part)


class LocalTransfer(Transfer):
    """Nothing is gathered: the copy goes straight into the slot."""

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Queue the copy."""
        self._bring(slot, block)

    def _bring(self, slot: Slot, block: int) -> None:
        # See [Note: one event for both].
        slot.filled = filled = self._ends_of(slot, block)[0]
        travelling = self._blocks[block]
        slot.raw = travelling.raw
        if self._direct:
            # What the feed would do, at once.
            self.copied_nbytes += travelling.plan.nbytes
            self._fill_copy(slot, filled, self._times(block), travelling.parts)
            return
        self._send(block, filled, partial(self._fill_copy, slot, filled, self._times(block)))

    def _fill_copy(
        self, slot: Slot, filled: Event, times: BlockTimes | None, parts: Sequence[Part]
    ) -> None:
        # See [Note: two events].
        with self._backend.stream(self._copy_stream):
            self._copy_stream.wait_event(slot.drained)
            self._copy(times, slot.buffer, parts)
            # The slot may have the next fill's by now, where a worker comes to this later. So the
            # times keep the last copy's until then.
            if times is not None:
                times.copy_end = filled
            self._copy_stream.record_event(filled)

    def close(self) -> None:
        """Wait for copies under way, which wait for nobody else, and forget what travels."""
        self._feed.close()
        streams = (*self._streams(), *self._graph_streams) if self._blocks else ()
        for stream in streams:
            # One that failed raises, and has nothing under way; the others may have.
            with nullcontext() if self._pool.failure is None else suppress(Exception):
                stream.synchronize()
        super().close()


def _is_first_read(slot: Slot, stream: Stream) -> bool:
    """Return whether ``stream`` has not waited for what a block that stays was loaded with."""
    return slot.reader is None or bool(slot.reader != stream)


def reached(event: Event) -> bool:
    """Return whether nobody need wait for ``event``, which may have failed; never waits."""
    try:
        return event.query()
    # Of the stream; whoever waits for the event gets it.
    except Exception:
        return True
