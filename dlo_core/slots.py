"""Slots and stages: the few device buffers through which all blocks stream, and who owns them."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import torch

    from dlo_core.diagnosis import Diagnosis
    from dlo_core.interface import Backend, Check, Event

__all__ = ["Pool", "Slot", "Stage"]


@dataclass(slots=True, eq=False)
class Slot:
    """One device buffer as large as the largest block, and what it holds.

    Attributes:
        index: Number in the pool.
        buffer: The bytes; empty in a pool that only counts (tests of the tape).
        filled: Reached when the bytes of the last fill are there; another event after each fill.
        drained: Reached when nobody reads them any more; another event after each call.
        copied: Reached when this rank's own part is there (only where the gather is in place).
        rest: Stands for ``drained`` behind what is no call of one block.
        check: Compares the trailers of a gathered block.
        tape: Whose fill it holds; None when nothing is held.
        fill: Number of that fill.
        reader: The stream that read this fill last, and recorded ``drained``; None: nobody yet.
        bound: How many calls of a block use it now.
        stays: Whether it belongs to one block, which stays in it.
        turn: How often it was filled.
        raw: Whether what it holds computes in it, even where other blocks are decoded first.
    """

    index: int
    buffer: torch.Tensor
    filled: Event
    drained: Event
    copied: Event
    rest: Event
    check: Check
    tape: Any = None
    fill: int = -1
    reader: Any = None
    bound: int = 0
    stays: bool = False
    turn: int = 0
    raw: bool = False

    @classmethod
    def new(
        cls, backend: Backend, index: int, buffer: torch.Tensor, *, stays: bool = False
    ) -> Slot:
        """Return a slot over ``buffer`` with new events."""
        return cls(
            index,
            buffer,
            filled=backend.new_event(),
            drained=backend.new_event(),
            copied=backend.new_event(),
            rest=backend.new_event(),
            check=backend.new_check(),
            stays=stays,
        )

    def twin(self, backend: Backend) -> Slot:
        """Return a slot over the same buffer, with events of its own; it holds nothing."""
        return Slot(
            self.index,
            self.buffer,
            filled=backend.new_event(),
            drained=backend.new_event(),
            copied=backend.new_event(),
            rest=backend.new_event(),
            check=self.check,
            stays=self.stays,
            raw=self.raw,
        )

    def __repr__(self) -> str:
        """Show what the slot holds."""
        holds = "empty" if self.tape is None else f"fill {self.fill}"
        if self.stays:
            holds = f"resident, {self.buffer.nbytes:,} bytes"
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
        residents: The slots of the blocks that stay, by block number; one without bytes is dropped.
        decoded: Where blocks that travel packed compute; None where they compute in their slots.
        nested: The same for those that are called inside of others.
        owner: The tape whose fills they hold now.
        lock: Held by the thread that is inside a pass.
        failure: What closed the pool for good, if anything did.
        spoiled: Whether gathers were given up on which the device computes all the same.
        explain: Says which rank is to blame when a transfer went wrong, or some ranks did not come;
            None: nobody watches.
        torn: Names of the tensors that an update which failed had begun to write, by their keys.
    """

    slots: tuple[Slot, ...]
    stages: tuple[Stage, ...] = ()
    residents: dict[int, Slot] = field(default_factory=dict)
    decoded: Slot | None = None
    nested: tuple[Slot, ...] = ()
    owner: Any = None
    failure: BaseException | None = None
    spoiled: bool = False
    explain: Callable[[Sequence[int]], Diagnosis] | None = None
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
        residents: Mapping[int, int] | None = None,
        decoded_nbytes: int = 0,
        landing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> Pool:
        """Allocate the buffers and make their events.

        Args:
            backend: Of the device.
            num_slots: Slots that blocks stream through.
            slot_nbytes: Bytes of each.
            num_stages: Stages.
            stage_nbytes: Bytes of each.
            residents: Bytes of each block that stays, by block number.
            decoded_nbytes: Bytes of the largest block decoded; 0: nothing travels packed.
            landing: Returns a context in which slots and stages are allocated, and nothing else.
        """
        with landing():
            buffers = [backend.empty(slot_nbytes) for _ in range(num_slots)]
            sources = [backend.empty(stage_nbytes) for _ in range(num_stages)]
        slots = tuple(Slot.new(backend, index, buffer) for index, buffer in enumerate(buffers))
        stages = tuple(
            Stage(index, buffer, filled=backend.new_event(), drained=backend.new_event())
            for index, buffer in enumerate(sources)
        )
        staying = {
            number: Slot.new(backend, num_slots + number, backend.empty(nbytes), stays=True)
            for number, nbytes in (residents or {}).items()
        }
        decoded = Slot.new(backend, -1, backend.empty(decoded_nbytes)) if decoded_nbytes else None
        return cls(slots, stages, staying, decoded)

    def twin(self, backend: Backend) -> Pool:
        """Return a pool over the same slots' buffers, with events of its own; it holds nothing."""
        slots = tuple(slot.twin(backend) for slot in self.slots)
        residents = {number: slot.twin(backend) for number, slot in self.residents.items()}
        home = None if self.decoded is None else self.decoded.twin(backend)
        nested = tuple(each.twin(backend) for each in self.nested)
        return Pool(
            slots, residents=residents, decoded=home, nested=nested, torn=self.torn, lock=self.lock
        )

    @property
    def busy(self) -> bool:
        """Whether a block is being computed."""
        return any(slot.bound for slot in (*self.slots, *self.residents.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all slots and stages that blocks stream through, and of decoded blocks."""
        buffers = [part.buffer for part in self.slots] + [part.buffer for part in self.stages]
        buffers += [home.buffer for home in self.homes]
        return sum(buffer.nbytes for buffer in buffers)

    @property
    def homes(self) -> tuple[Slot, ...]:
        """Where blocks that travel packed compute, one behind the other while they are nested."""
        return () if self.decoded is None else (self.decoded, *self.nested)

    @property
    def residents_nbytes(self) -> int:
        """Bytes of the blocks that stay and are there."""
        return sum(slot.buffer.nbytes for slot in self.residents.values())

    def fail(self, error: BaseException) -> BaseException:
        """Close the pool for good, unless it is already; return what closed it."""
        if self.failure is None:
            self.failure = error
        return self.failure

    def release(self) -> None:
        """Let the buffers go; work that is under way keeps its own alive."""
        self.slots = ()
        self.stages = ()
        self.residents = {}
        self.decoded = None
        self.nested = ()
        self.owner = None
