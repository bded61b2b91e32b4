"""Transfers of ranks that gather: a copy of this rank's shard, then the gather into the slot.

What orders them is in [Note: two events] in ``transfer.py``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from dlo_core.decoded_home import DecodedHome
    from dlo_core.feed import Feed, Part
    from dlo_core.interface import Backend, Collective, Stream
    from dlo_core.slots import Pool, Slot, Stage
    from dlo_core.travelling import BlockTimes, TravellingBlock
    from dlo_core.unpack import Unpack

__all__ = ["InPlaceTransfer", "StagedTransfer"]


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
            backend: As for ``Transfer``.
            pool: As there.
            blocks: As there.
            collective: Gathers the shards.
            unpack: What is done to the gathered bytes.
            home: As there.
            feed: As there.
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
