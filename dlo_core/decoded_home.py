"""The home of blocks that travel packed: where they are decoded and compute.

What orders it is in [Note: two events] in ``transfer.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.errors import UseError, text_of
from dlo_core.shard import ShardPlan
from dlo_core.slots import Slot

if TYPE_CHECKING:
    from dlo_core.interface import Backend, Codec, Stream
    from dlo_core.slots import Pool
    from dlo_core.travelling import TravellingBlock

__all__ = ["DecodedHome"]


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
