"""Slots and stages: the few device buffers through which all blocks stream, and who owns them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from dlo_core.interface import Backend, Check, Event

__all__ = ["Pool", "Slot", "Stage"]


@dataclass(slots=True, eq=False)
class Slot:
    """One device buffer as large as the largest block, and what it holds.

    Attributes:
        index: Number in the pool.
        buffer: The bytes; empty in a pool that only counts (tests of the tape).
        filled: Reached when the bytes of the last fill are there.
        drained: Reached when nobody reads them any more.
        copied: Reached when this rank's own part is there (only where the gather is in place).
        check: Compares the trailers of a gathered block.
        tape: Whose fill it holds; None when nothing is held.
        fill: Number of that fill.
        reader: The stream that read this fill last, and recorded ``drained``; None: nobody yet.
        bound: How many calls of a block use it now.
    """

    index: int
    buffer: torch.Tensor
    filled: Event
    drained: Event
    copied: Event
    check: Check
    tape: Any = None
    fill: int = -1
    reader: Any = None
    bound: int = 0

    def __repr__(self) -> str:
        """Show what the slot holds."""
        holds = "empty" if self.tape is None else f"fill {self.fill}"
        return f"Slot({self.index}, {holds}, bound={self.bound})"


@dataclass(slots=True, eq=False)
class Stage:
    """A device buffer of shard size, so that copies and gathers overlap.

    Attributes:
        index: Number in the pool.
        buffer: The bytes.
        filled: Reached when the shard's copy is there.
        drained: Reached when the gather has read it.
    """

    index: int
    buffer: torch.Tensor
    filled: Event
    drained: Event


@dataclass(slots=True, eq=False)
class Pool:
    """The slots and stages, shared by all models of one offload.

    Attributes:
        slots: At most ``depth`` of them.
        stages: Two or none.
        owner: The tape whose fills they hold now.
        lock: Held by the thread that is inside a pass.
        failure: What closed the pool for good, if anything did.
        torn: Names of the tensors that an update which failed had begun to write, by their keys.
    """

    slots: tuple[Slot, ...]
    stages: tuple[Stage, ...] = ()
    owner: Any = None
    failure: BaseException | None = None
    torn: dict[Any, str] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    @classmethod
    def allocate(
        cls,
        backend: Backend,
        *,
        num_slots: int,
        slot_nbytes: int,
        num_stages: int,
        stage_nbytes: int,
    ) -> Pool:
        """Allocate the buffers and make their events."""
        slots = tuple(
            Slot(
                index,
                backend.empty(slot_nbytes),
                filled=backend.new_event(),
                drained=backend.new_event(),
                copied=backend.new_event(),
                check=backend.new_check(),
            )
            for index in range(num_slots)
        )
        stages = tuple(
            Stage(
                index,
                backend.empty(stage_nbytes),
                filled=backend.new_event(),
                drained=backend.new_event(),
            )
            for index in range(num_stages)
        )
        return cls(slots, stages)

    def twin(self, backend: Backend) -> Pool:
        """Return a pool over the same slots' buffers, with events of its own; it holds nothing."""
        slots = tuple(
            Slot(
                slot.index,
                slot.buffer,
                filled=backend.new_event(),
                drained=backend.new_event(),
                copied=backend.new_event(),
                check=slot.check,
            )
            for slot in self.slots
        )
        return Pool(slots, torn=self.torn, lock=self.lock)

    @property
    def busy(self) -> bool:
        """Whether a block is being computed."""
        return any(slot.bound for slot in self.slots)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [part.buffer for part in self.slots] + [part.buffer for part in self.stages]
        return sum(buffer.nbytes for buffer in buffers)

    def release(self) -> None:
        """Let the buffers go; work that is under way keeps its own alive."""
        self.slots = ()
        self.stages = ()
        self.owner = None
