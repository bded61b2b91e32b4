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
called in this file and nowhere else.

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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch

from dlo_core.errors import UseError, text_of
from dlo_core.feed import DirectFeed
from dlo_core.shard import TRAILER_NBYTES, ShardPlan, trailer
from dlo_core.slots import Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.feed import Feed, Part
    from dlo_core.interface import Backend, Codec, Collective, Event, Stream
    from dlo_core.packed_cut import PackedCut
    from dlo_core.slots import Pool, Stage

__all__ = [
    "BlockTimes",
    "DecodedHome",
    "InPlaceTransfer",
    "LocalTransfer",
    "PackedUnpack",
    "RawUnpack",
    "StagedTransfer",
    "Transfer",
    "TravellingBlock",
    "Unpack",
    "UnpackEach",
    "reached",
]


@dataclass(slots=True)
class BlockTimes:
    """The timing events of one block: its last fill and its last call.

    Attributes:
        waited: Whether the last call waited, so that ``wait_start`` is of that call.
    """

    copy_start: Event
    copy_end: Event
    gather_start: Event
    gather_end: Event
    wait_start: Event
    wait_end: Event
    decode_end: Event
    compute_end: Event
    waited: bool = field(default=True, init=False)

    @classmethod
    def new(cls, backend: Backend) -> BlockTimes:
        """Make the events, unrecorded."""
        return cls(*(backend.new_event(timing=True) for _ in range(8)))


@dataclass(frozen=True, slots=True, eq=False)
class TravellingBlock:
    """What a transfer knows of one block.

    Attributes:
        plan: How it is cut.
        shard: This rank's bytes on the host: whole, or in parts; nothing where the feed reads them
            for each copy.
        expected: Trailers of all ranks, ``size`` rows, on the device; None where nothing is
            gathered.
        times: Its timing events.
        parts: The shard as places in it and the bytes that lie there.
        raw: Whether it travels as it computes.
    """

    plan: ShardPlan | PackedCut
    shard: torch.Tensor | Sequence[Part]
    expected: torch.Tensor | None
    times: BlockTimes
    parts: Sequence[Part] = field(init=False)
    raw: bool = field(init=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.shard, torch.Tensor)
        object.__setattr__(self, "parts", ((0, self.shard),) if whole else self.shard)
        object.__setattr__(self, "raw", isinstance(self.plan, ShardPlan))


class Unpack(Protocol):
    """The step from what travels to what computes."""

    def __call__(self, slot: Slot, block: TravellingBlock) -> None:
        """Queue the unpacking of what ``slot`` received on the current stream."""


class RawUnpack:
    """The unpack step of a raw gathered block: compare the trailers, put the spill back.

    See [Note: trailer and spill] in ``shard.py``.
    """

    def __init__(self, backend: Backend) -> None:
        """Copy and compare on ``backend``."""
        self._backend = backend

    def __call__(self, slot: Slot, block: TravellingBlock) -> None:
        """Queue the comparison and the copy of the spill."""
        plan = block.plan
        if block.expected is None or not isinstance(plan, ShardPlan):
            return
        rows = slot.buffer[: plan.padded_nbytes].view(plan.size, plan.nbytes)
        ends = rows[:, plan.nbytes - TRAILER_NBYTES :]
        slot.check.compare(ends, block.expected)
        spill = slot.buffer[plan.spill_start : plan.padded_nbytes - TRAILER_NBYTES]
        self._backend.copy(ends[:-1], spill.view(plan.size - 1, TRAILER_NBYTES))


class PackedUnpack:
    """The unpack step of a packed gathered block: compare the trailers; it is decoded later."""

    def __call__(self, slot: Slot, block: TravellingBlock) -> None:
        """Queue the comparison."""
        plan = block.plan
        if block.expected is not None:
            rows = slot.buffer[: plan.padded_nbytes].view(plan.size, plan.nbytes)
            slot.check.compare(rows[:, plan.nbytes - TRAILER_NBYTES :], block.expected)


class UnpackEach:
    """The unpack step where some gathered blocks are raw and others packed."""

    def __init__(self, backend: Backend) -> None:
        """Copy and compare on ``backend``."""
        self._raw, self._packed = RawUnpack(backend), PackedUnpack()

    def __call__(self, slot: Slot, block: TravellingBlock) -> None:
        """Queue the block's own step."""
        (self._raw if isinstance(block.plan, ShardPlan) else self._packed)(slot, block)


class DecodedHome:
    """The buffers in which blocks that travel packed are decoded and compute.

    There is one, and one more for each block that is called inside of another one: those are
    allocated when they are wanted first.
    """

    def __init__(self, pool: Pool, codec: Codec, backend: Backend) -> None:
        """Take the parts.

        Args:
            pool: Has the buffers.
            codec: Of the device.
            backend: Allocates.
        """
        assert pool.decoded is not None
        self._pool = pool
        self._codec = codec
        self._backend = backend
        # By the buffer: the slot and turn that it holds, and the stream that decoded it.
        self._held: dict[int, tuple[tuple[int, int], Stream]] = {}
        # By the slot: where its block is decoded.
        self._of: dict[int, Slot] = {}

    def forget(self) -> None:
        """Forget what the buffers hold: they were written."""
        self._held.clear()

    def of(self, slot: Slot) -> Slot:
        """Return where the block in ``slot`` computes, which has entered."""
        return self._of[slot.index]

    def enter(self, stream: Stream, slot: Slot, block: TravellingBlock, *, timed: bool) -> None:
        """Queue the decoding on the current ``stream``, unless it is what the buffer holds.

        Args:
            stream: The current stream.
            slot: Has the block's bytes.
            block: The block.
            timed: Whether its times are kept.

        Raises:
            UseError: The block is called inside of another one, and there is no memory for it.
        """
        home = self._choose(slot)
        self._wait(home, stream)
        if timed:
            stream.record_event(block.times.wait_end)
        holds, decoder = self._held.get(home.index, (None, None))
        if holds != (slot.index, slot.turn):
            plan = block.plan
            assert not isinstance(plan, ShardPlan)
            rows = slot.buffer[: plan.padded_nbytes].view(plan.size, plan.nbytes)
            self._held.pop(home.index, None)
            if slot.reader is not None and slot.reader != stream:
                # It was decoded elsewhere, too, when it was called inside of another one.
                stream.wait_event(slot.drained)
            self._codec.decode(rows, home.buffer[: plan.decoded_nbytes])
            self._held[home.index] = (slot.index, slot.turn), stream
            # See [Note: two events].
            stream.record_event(slot.drained)
            slot.reader = stream
        elif decoder != stream:
            # The block may have been called inside of itself, so that nobody has left.
            stream.wait_event(slot.drained)
        if timed:
            stream.record_event(block.times.decode_end)

    def _choose(self, slot: Slot) -> Slot:
        """Return the buffer for the block in ``slot``: the first in which no other one computes."""
        known = self._of.get(slot.index)
        others = (*self._pool.slots, *self._pool.residents.values())
        taken = [other for other in others if other.bound and other is not slot and not other.raw]
        if slot.bound > 1 and known is not None:
            # It is called inside of itself.
            return known
        if not taken:
            home = self._pool.homes[0]
        else:
            used = [self._of.get(other.index) for other in taken]
            free = (each for each in self._pool.homes if each not in used)
            home = next(free, None) or self._add()
        self._of[slot.index] = home
        return home

    def _add(self) -> Slot:
        nbytes = self._pool.homes[0].buffer.nbytes
        problem = "a graph is recorded, which holds no allocation of dlo's own"
        if not self._backend.recording():
            try:
                home = Slot.new(
                    self._backend, -1 - len(self._pool.homes), self._backend.empty(nbytes)
                )
                self._pool.nested = (*self._pool.nested, home)
                return home
            # Not every device's allocator has the error of its own.
            except RuntimeError as error:
                # Not the error itself: it would keep this frame and the caller's tensors.
                problem = text_of(error)
        raise UseError(
            "a block was called inside of another one, which takes another buffer of "
            f"{nbytes:,} bytes where weights travel packed; it cannot be had: {problem}; free "
            "device memory, or use packed=False; where the form is chosen (by default, and with "
            "packed='auto' on a rank alone) the next call has raw weights"
        )

    def _wait(self, home: Slot, stream: Stream) -> None:
        # See [Note: two events].
        if home.reader is not None and home.reader != stream:
            stream.wait_event(home.drained)

    def twin(self, pool: Pool) -> DecodedHome:
        """Return the home of the blocks in ``pool``; it holds nothing."""
        return DecodedHome(pool, self._codec, self._backend)

    def before_graph(self, stream: Stream) -> None:
        """Let ``stream`` wait for the buffers: a graph that holds a pass comes next."""
        for home in self._pool.homes:
            self._wait(home, stream)

    def after_graph(self, stream: Stream) -> None:
        """Say that the graph on ``stream`` is the last to use the buffers."""
        self._held.clear()
        for home in self._pool.homes:
            self._leave(home, stream)

    def leave(self, stream: Stream, slot: Slot) -> None:
        """Record that the work of ``stream`` so far is the last that uses the block's buffer."""
        self._leave(self._of[slot.index], stream)

    def _leave(self, home: Slot, stream: Stream) -> None:
        # See [Note: two events]. The block may have been called inside of itself, elsewhere.
        self._wait(home, stream)
        stream.record_event(home.drained)
        home.reader = stream


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


class GatheringTransfer(Transfer):
    """What the two transfers with a gather share."""

    gathers = True

    def __init__(
        self,
        backend: Backend,
        pool: Pool,
        blocks: Sequence[TravellingBlock],
        *,
        collective: Collective,
        unpack: Unpack,
        home: DecodedHome | None = None,
        feed: Feed | None = None,
    ) -> None:
        """Make the side streams.

        Args:
            backend: Whose streams and copies are used.
            pool: The slots and stages.
            blocks: What travels, by block number.
            collective: Gathers the shards.
            unpack: What is done to the gathered bytes.
            home: Where packed blocks compute; None: blocks compute in their slots.
            feed: Brings the shards to where they are copied from; None: they are there.
        """
        super().__init__(backend, pool, blocks, home=home, feed=feed)
        # A gather takes a few of the units that compute; queued behind them it would come late.
        self._comm_stream = backend.new_stream(priority=-1)
        self._collective = collective
        self._unpack = unpack
        self._seal = backend.new_seal()

    def seal(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let what a pass returns be NaN if gathers are given up before the device is there."""
        if self._seal is not None:
            self._seal.apply(tensors)

    def give_up(self) -> None:
        """Say that gathers are about to be given up; from any thread."""
        seal = self._seal
        if seal is not None:
            seal.give_up()

    def close(self) -> None:
        """Forget what travels, and the seal, which holds device memory."""
        super().close()
        self._seal = None

    def _streams(self) -> tuple[Stream, ...]:
        return (self._copy_stream, self._comm_stream)

    def _bring(self, slot: Slot, block: int) -> None:
        """Queue the copy of this rank's shard into its own part of the slot, and the gather."""
        plan = self._blocks[block].plan
        rank = self._collective.rank
        part = slot.buffer[rank * plan.nbytes : (rank + 1) * plan.nbytes]
        self._send(block, slot.copied, partial(self._part_copy, slot, self._times(block), part))
        self._feed.catch_up(slot.copied)
        # See [Note: two events].
        with self._backend.stream(self._comm_stream):
            self._comm_stream.wait_event(slot.copied)
            self._gather(slot, block, part)
            self._finish(slot, block)
            self._comm_stream.record_event(slot.filled)

    def _part_copy(
        self, slot: Slot, times: BlockTimes | None, part: torch.Tensor, parts: Sequence[Part]
    ) -> None:
        # See [Note: two events]. Two streams write the slot here, so a fill that nobody computed
        # (a skipped block) is ordered before this copy by slot.filled and not by slot.drained.
        with self._backend.stream(self._copy_stream):
            self._copy_stream.wait_event(slot.filled)
            self._copy_stream.wait_event(slot.drained)
            self._copy(times, part, parts)
            if times is not None:
                self._copy_stream.record_event(times.copy_end)
            self._copy_stream.record_event(slot.copied)

    def _gather(self, slot: Slot, block: int, shard: torch.Tensor) -> None:
        """Queue the gather into ``slot``, with its timing events."""
        travelling = self._blocks[block]
        out = slot.buffer[: travelling.plan.padded_nbytes]
        if self.timed:
            self._comm_stream.record_event(travelling.times.gather_start)
        self._collective.all_gather(out, shard)
        self.gathered_nbytes += out.nbytes

    def _finish(self, slot: Slot, block: int) -> None:
        travelling = self._blocks[block]
        slot.raw = travelling.raw
        self._unpack(slot, travelling)
        # See [Note: one event for both].
        slot.filled = filled = self._ends_of(slot, block)[0]
        if self.timed:
            travelling.times.gather_end = filled


class StagedTransfer(GatheringTransfer):
    """The shard is copied into a stage and gathered from there into the slot.

    Copies may run one fill ahead of gathers: a copy is no collective, so this is safe, and it
    hides jitter of the host.
    """

    staged = True
    _ahead: tuple[int, int] | None = None

    def copy_ahead(self, block: int, fill: int) -> None:
        """Queue the copy of ``fill`` now."""
        if self._ahead != (block, fill):
            stage = self._stage(fill)
            queue = partial(self._stage_copy, stage, self._times(block))
            self._send(block, stage.filled, queue)
            self._ahead = (block, fill)

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Queue the copy, unless it runs ahead already, and the gather."""
        stage = self._stage(fill)
        self.copy_ahead(block, fill)
        self._ahead = None
        self._feed.catch_up(stage.filled)
        # See [Note: two events].
        with self._backend.stream(self._comm_stream):
            self._comm_stream.wait_event(stage.filled)
            self._comm_stream.wait_event(slot.drained)
            self._gather(slot, block, stage.buffer[: self._blocks[block].plan.nbytes])
            self._comm_stream.record_event(stage.drained)
            self._finish(slot, block)
            self._comm_stream.record_event(slot.filled)

    def forget_staged(self) -> None:
        """Forget the copy that runs ahead; its stage counts as drained once it is there."""
        self._ahead = None

    def _stage(self, fill: int) -> Stage:
        return self._pool.stages[fill % len(self._pool.stages)]

    def _stage_copy(self, stage: Stage, times: BlockTimes | None, parts: Sequence[Part]) -> None:
        # See [Note: two events].
        with self._backend.stream(self._copy_stream):
            self._copy_stream.wait_event(stage.drained)
            self._copy(times, stage.buffer, parts)
            if times is not None:
                self._copy_stream.record_event(times.copy_end)
            self._copy_stream.record_event(stage.filled)


class InPlaceTransfer(GatheringTransfer):
    """The shard is copied into its own part of the slot and gathered in place; no stage."""

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Queue the copy and the gather."""
        self._bring(slot, block)


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


def expected_trailers(digest: bytes, block: int, size: int) -> torch.Tensor:
    """Return the trailers of all ranks for ``block`` as a host tensor of ``size`` rows."""
    rows = b"".join(trailer(digest, block, rank) for rank in range(size))
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(size, TRAILER_NBYTES)
