"""Unpacking: the step of a fill from what was gathered to what the slot holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from dlo_core.shard import TRAILER_NBYTES, ShardPlan

if TYPE_CHECKING:
    from dlo_core.interface import Backend
    from dlo_core.slots import Slot
    from dlo_core.travelling import TravellingBlock

__all__ = ["PackedUnpack", "RawUnpack", "Unpack", "UnpackEach"]


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
