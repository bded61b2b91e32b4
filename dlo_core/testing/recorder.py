"""The recorder: every access of every slot, stage and host shard, and the races among them.

Two accesses race when they touch a common byte, one of them writes, and neither happened before the
other by the vector clocks: then the events of the engine do not order them, whatever the schedule
of the present run was. What the host itself writes is seen at the next thing that the engine does,
and counts as one write of the whole buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from dlo_core.layout import span_nbytes
from dlo_core.testing.clocks import Clocks, Stamp
from dlo_core.testing.device_memory import storage_of
from dlo_core.testing.host_writes import HostWrites

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from dlo_core.layerwise import LayerwiseOffload
    from dlo_core.testing.backend import SimBackend
    from dlo_core.testing.streams import SimEvent

__all__ = ["Access", "Race", "Recorder"]

_HOST = "host slab"
_HOME = "home of all blocks"
# The event that should have ordered two accesses of a buffer, by what came first and second.
_MISSING = {
    ("host", "read", "write"): "the host's wait for the copy",
    ("host", "write", "write"): "the host's wait for the copy",
    ("slot", "write", "read"): "slot.filled",
    ("slot", "read", "write"): "slot.drained",
    ("slot", "write", "write"): "slot.filled or slot.copied",
    ("resident", "write", "read"): "slot.filled",
    ("resident", "read", "write"): "slot.drained",
    ("home", "write", "read"): "home.drained",
    ("home", "read", "write"): "home.drained",
    ("home", "write", "write"): "home.drained",
    ("stage", "write", "read"): "stage.filled",
    ("stage", "read", "write"): "stage.drained",
    ("stage", "write", "write"): "stage.drained",
}


@dataclass(frozen=True, slots=True)
class Access:
    """One access.

    Attributes:
        op: ``copy``, ``gather``, ``check``, ``decode``, ``compute`` or ``host``.
        timeline: The stream, or the host.
        buffer: Such as ``slot 0``.
        what: The block and the fill that the buffer is to hold.
        write: Whether it writes.
        start: First byte in the buffer.
        stop: End.
        stamp: When.
    """

    op: str
    timeline: str
    buffer: str
    what: str
    write: bool
    start: int
    stop: int
    stamp: Stamp

    def __str__(self) -> str:
        """Say it in a line."""
        verb = "writes" if self.write else "reads"
        return f"{self.op} on {self.timeline} {verb} {self.buffer} ({self.what})"


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses that nothing orders.

    Attributes:
        first: The one that was queued first.
        second: The other.
        missing: The event that should order them.
    """

    first: Access
    second: Access
    missing: str

    def __str__(self) -> str:
        """Say it in a line."""
        return f"{self.first} and {self.second} are not ordered; missing: {self.missing}"


class Recorder:
    """Keeps the clocks and accesses of one rank."""

    def __init__(self) -> None:
        """Start with nothing; ``watch`` an offload once it is enabled."""
        self.backend: SimBackend | None = None
        self._races: list[Race] = []
        self._host_writes = HostWrites()
        self.num_accesses = 0
        self.log: list[Access] = []
        self._clocks = Clocks()
        self._events: dict[int, tuple[Any, Stamp]] = {}
        self._offload: LayerwiseOffload | None = None
        self._buffers: dict[int, tuple[str, Any]] = {}
        self._nbytes: dict[int, int] = {}
        self._live: dict[int, list[Access]] = {}

    @property
    def races(self) -> list[Race]:
        """The races so far."""
        self._look()
        return self._races

    def watch(self, offload: LayerwiseOffload) -> Recorder:
        """Name the buffers of an enabled offload; from now on their accesses are compared."""
        engine = offload.engine
        assert engine is not None
        self._offload = offload
        for slot in engine.pool.slots:
            self._name(slot.buffer, f"slot {slot.index}", slot)
        for home in engine.pool.homes:
            self._name(home.buffer, _HOME, home)
        for stage in engine.pool.stages:
            self._name(stage.buffer, f"stage {stage.index}", stage)
        for run in engine.store.runs:
            self._name(run, _HOST, engine.store)
        return self

    def _name(self, buffer: torch.Tensor, name: str, owner: Any) -> None:
        self._buffers[storage_of(buffer)] = (name, owner)
        self._nbytes[storage_of(buffer)] = buffer.nbytes
        self._host_writes.watch(buffer, on_host=name == _HOST)

    def check(self) -> None:
        """Raise when there was a race.

        Raises:
            AssertionError: Lists the first ones.
        """
        races = self.races
        if races:
            shown = "\n".join(str(race) for race in races[:5])
            raise AssertionError(f"{len(races)} races:\n{shown}")

    # --- what the backend tells ---------------------------------------------------------------

    def records(self, timeline: str, event: SimEvent) -> None:
        """Note that ``event`` marks this moment of ``timeline``."""
        self._look()
        self._events[id(event)] = (event, self._clocks.tick(timeline))

    def waits(self, timeline: str, event: SimEvent) -> None:
        """Note that later work of ``timeline`` waits for ``event``."""
        self._look()
        recorded = self._events.get(id(event))
        if recorded is not None:
            self._clocks.join(timeline, recorded[1])

    def host_waits(self, event: SimEvent) -> None:
        """Note that the host waited for ``event``."""
        self.waits("host", event)

    def host_waits_for_all(self) -> None:
        """Note that the host waited for everything."""
        self._look()
        self._clocks.join_all("host")

    def accesses(
        self,
        timeline: str,
        op: str,
        *,
        reads: Iterable[torch.Tensor] = (),
        writes: Iterable[torch.Tensor] = (),
    ) -> None:
        """Note accesses, and compare those of watched buffers with earlier ones."""
        self._look()
        stamp = self._clocks.tick(timeline)
        for write, tensors in ((False, reads), (True, writes)):
            for tensor in tensors:
                storage = storage_of(tensor)
                if not self._knows(storage):
                    self._look_among_residents(storage)
                if storage in self._buffers and tensor.numel():
                    self._note(self._access(op, timeline, tensor, write, stamp), storage)
                    if write and op == "compute":
                        self._host_writes.expect(storage)

    def of_device(
        self, work: Callable[[], object], writes: Iterable[torch.Tensor]
    ) -> Callable[[], object]:
        """Return ``work`` of the device such that what it writes is not taken for the host's."""
        return partial(self._run, work, tuple(map(storage_of, writes)))

    def _run(self, work: Callable[[], object], storages: tuple[int, ...]) -> None:
        on_host = [storage for storage in storages if self._host_writes.has_bytes(storage)]
        if on_host:
            # The host's own come first, or they would be taken for the device's.
            self._look()
        work()
        for storage in on_host:
            self._host_writes.accept(storage)

    def _look(self) -> None:
        """Note what the host has written since the last look, as of now."""
        for storage in self._host_writes.look():
            name, buffer = self._buffers[storage]
            stamp = self._clocks.tick("host", after=self._computes())
            what, stop = self._what(buffer), self._nbytes[storage]
            self._note(Access("host", "host", name, what, True, 0, stop, stamp), storage)

    def _computes(self) -> list[str]:
        """Return the compute streams that are the host itself."""
        backend = self.backend
        return backend.host_streams() if backend is not None else []

    def _knows(self, storage: int) -> bool:
        """Return whether a watched buffer lies there; memory that was let go may be another's."""
        memory = getattr(self._buffers.get(storage, ("", None))[1], "buffer", None)
        if memory is None:
            return storage in self._buffers
        return bool(memory.nbytes) and storage_of(memory) == storage

    def _look_among_residents(self, storage: int) -> None:
        """Name the buffer of a block that stays, which may be loaded anew, or a new home."""
        engine = None if self._offload is None else self._offload.engine
        for home in () if engine is None else engine.pool.homes:
            if storage_of(home.buffer) == storage:
                self._buffers[storage] = (_HOME, home)
        residents = {} if engine is None else engine.pool.residents
        for number, slot in residents.items():
            if slot.buffer.nbytes and storage_of(slot.buffer) == storage:
                self._buffers[storage] = (f"resident {number}", slot)

    def _access(
        self, op: str, timeline: str, tensor: torch.Tensor, write: bool, stamp: Stamp
    ) -> Access:
        name, buffer = self._buffers[storage_of(tensor)]
        start = int(tensor.storage_offset()) * tensor.element_size()
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        stop = start + span_nbytes(shape, stride, tensor.element_size())
        return Access(op, timeline, name, self._what(buffer), write, start, stop, stamp)

    def _what(self, buffer: Any) -> str:
        tape = getattr(buffer, "tape", None)
        if tape is None:
            return "no fill known"
        return f"fill {buffer.fill} of {self._names()[tape.block(buffer.fill)]!r}"

    def _names(self) -> tuple[str, ...]:
        assert self._offload is not None
        return self._offload.blocks

    def _note(self, access: Access, storage: int) -> None:
        self.num_accesses += 1
        self.log.append(access)
        live = self._live.setdefault(storage, [])
        kept = []
        for other in live:
            ordered = other.stamp.before(access.stamp)
            overlap = other.start < access.stop and access.start < other.stop
            if (
                overlap
                and (other.write or access.write)
                and not ordered
                and not _same(other, access)
            ):
                self._report(other, access)
            covered = access.write and access.start <= other.start and other.stop <= access.stop
            if not (covered and ordered):
                kept.append(other)
        kept.append(access)
        self._live[storage] = kept

    def _report(self, first: Access, second: Access) -> None:
        kind = first.buffer.split()[0]
        verb, then = ("write" if access.write else "read" for access in (first, second))
        self._races.append(Race(first, second, _MISSING.get((kind, verb, then), "an event")))


def _same(first: Access, second: Access) -> bool:
    """Return whether both belong to one operation (a gather in place reads what it writes)."""
    return first.stamp is second.stamp
