"""The protocol as a finite machine: what the real tape and transfers queue, in every interleaving.

A trace runs the engine's own ``Tape`` and ``Transfer`` on a backend that only notes what is queued:
for each stream a list of operations with what they read and write and which others must be done
before. That list does not depend on timing, so all schedules of a device are the interleavings of
these lists, with the host as far ahead as can be (a slower host only forbids some). ``explore``
walks through all of them, each operation in two steps (it begins, it ends), and reports the first

- conflict: an operation begins while another one that is under way writes what it touches, or
  reads what it writes;
- wrong read: a gather or a block begins while its buffer holds another fill;
- deadlock: nothing can begin or end, but not all is done.

Ranks are coupled through collectives alone: a gather ends on a rank when it has begun on all.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import dlo_core.engine as engine_module
from dlo_core.interface import Check, Collective
from dlo_core.shard import ShardPlan
from dlo_core.slots import Pool, Slot, Stage
from dlo_core.tape import FirstPass, Tape
from dlo_core.travelling import BlockTimes, TravellingBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Found", "Op", "Shape", "Trace", "Violation", "explore", "trace"]

COPY, COMM, COMPUTE = 0, 1, 2
Program = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is explored: blocks, slots, stages, ranks."""

    blocks: int
    depth: int
    stages: int
    ranks: int = 1


@dataclass(slots=True)
class Op:
    """One operation on one stream.

    Attributes:
        name: For messages.
        reads: Buffers that it reads.
        writes: Buffers that it writes.
        expects: What a buffer that it reads must hold: (buffer, fill of which tape).
        makes: What its written buffers hold afterwards.
        needs: How many operations of each stream must be done before it begins.
        gather: Number of the collective, or -1.
    """

    name: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    expects: tuple[tuple[str, int], ...] = ()
    makes: int = -1
    needs: list[int] = field(default_factory=lambda: [0, 0, 0])
    gather: int = -1


@dataclass(slots=True)
class Trace:
    """What one rank queued: three streams of operations."""

    streams: tuple[list[Op], list[Op], list[Op]] = field(default_factory=lambda: ([], [], []))

    @property
    def gathers(self) -> list[str]:
        """The collectives in order."""
        return [op.name for op in self.streams[COMM] if op.gather >= 0]


class Violation(AssertionError):
    """Raised with the first thing that is wrong."""


@dataclass(frozen=True, slots=True)
class Found:
    """How much was explored."""

    states: int
    steps: int


class _Event:
    """Where each stream stood when it was recorded."""

    def __init__(self) -> None:
        self.mark: tuple[int, int] | None = None

    def record(self, stream: Any = None) -> None:
        raise NotImplementedError

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise AssertionError("the hot path must not wait on the host")

    def elapsed_time(self, end_event: Any) -> float:
        return 0.0


class _Stream:
    def __init__(self, tracer: _Tracer, number: int) -> None:
        self._tracer = tracer
        self.number = number

    def wait_event(self, event: _Event) -> None:
        if event.mark is not None:
            stream, count = event.mark
            needs = self._tracer.pending[self.number]
            needs[stream] = max(needs[stream], count)

    def record_event(self, event: _Event) -> _Event:
        event.mark = (self.number, len(self._tracer.trace.streams[self.number]))
        return event

    def synchronize(self) -> None:
        raise AssertionError("the hot path must not wait on the host")


class _Tracer:
    """A backend, a collective and an unpack step that only note."""

    def __init__(self) -> None:
        self.trace = Trace()
        # What the next operation of each stream must wait for; a stream's waits add up.
        self.pending = [[0, 0, 0] for _ in range(3)]
        self._streams = 0
        self.side = [_Stream(self, number) for number in range(3)]
        self._current = self.side[COMPUTE]
        self.names: dict[int, str] = {}
        self.filling: tuple[int, int] = (-1, -1)
        self.num_gathers = 0
        self.gathers = False

    def new_stream(self, priority: int = 0) -> _Stream:
        self._streams += 1
        return self.side[self._streams - 1]

    def current_stream(self) -> _Stream:
        return self._current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def new_event(self, *, timing: bool = False) -> _Event:
        return _Event()

    def new_seal(self) -> None:
        return None

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        block, name = int(self._name(src)), self._name(dst)
        makes = part_of(block) if self.gathers and name.startswith("slot") else block
        self.add(Op(f"copy of {block}", writes=(name,), makes=makes))

    def add(self, op: Op) -> None:
        number = self._current.number
        op.needs = list(self.pending[number])
        self.trace.streams[number].append(op)

    def _name(self, tensor: torch.Tensor) -> str:
        return self.names[tensor.untyped_storage().data_ptr()]


def part_of(block: int) -> int:
    """Return what a slot holds that has one rank's part of ``block`` and no more."""
    return block + 1000


class _Gather(Collective):
    def __init__(self, tracer: _Tracer, size: int) -> None:
        self._tracer = tracer
        self.rank, self.size = 0, size

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        tracer = self._tracer
        block = tracer.filling[0]
        source, target = tracer._name(shard), tracer._name(out)
        # In place the slot holds this rank's part and nothing else.
        expected = part_of(block) if source == target else block
        op = Op(
            f"gather of {block}",
            reads=(source,),
            writes=(target,),
            expects=((source, expected),),
            makes=block,
            gather=tracer.num_gathers,
        )
        tracer.num_gathers += 1
        tracer.add(op)

    def close(self) -> None:
        """Nothing to give back."""


def _events(tracer: _Tracer) -> dict[str, Any]:
    return {"filled": tracer.new_event(), "drained": tracer.new_event()}


def trace(
    shape: Shape,
    program: Program,
    *,
    order: Sequence[int] | None = None,
    transfers: Any = engine_module,
    tape_class: type[Tape] = Tape,
) -> Trace:
    """Return what one rank queues for a program: passes, each a list of blocks as they are called.

    Args:
        shape: Of the offload; ``ranks`` above 1 means gather mode.
        program: Passes; a pass that is cut short by an exception is one that calls fewer blocks.
        order: Registration order, where it differs from 0, 1, 2, ...
        transfers: Has the transfer classes; another module than the real one to plant faults.
        tape_class: The tape; another one to plant faults.
    """
    tracer, size = _Tracer(), shape.ranks
    tracer.gathers = size > 1
    slots, stages, blocks = [], [], []
    for index in range(min(shape.depth, shape.blocks)):
        buffer = torch.empty(256 * size, dtype=torch.uint8)
        tracer.names[buffer.untyped_storage().data_ptr()] = f"slot {index}"
        parts: Any = _events(tracer)
        more: Any = {name: tracer.new_event() for name in ("copied", "rest")}
        slots.append(Slot(index, buffer, check=_NeverFails(), **parts, **more))
    for index in range(shape.stages if size > 1 else 0):
        buffer = torch.empty(256, dtype=torch.uint8)
        tracer.names[buffer.untyped_storage().data_ptr()] = f"stage {index}"
        stages.append(Stage(index, buffer, **_events(tracer)))
    backend: Any = tracer
    for number in range(shape.blocks):
        host = torch.empty(256, dtype=torch.uint8)
        tracer.names[host.untyped_storage().data_ptr()] = str(number)
        plan = ShardPlan(256, size, 256)
        blocks.append(TravellingBlock(plan, host, None, BlockTimes.new(backend)))
    pool = Pool(tuple(slots), tuple(stages))
    transfer = _transfer(shape, backend, pool, blocks, transfers)
    tape = tape_class(order or range(shape.blocks), pool, transfer, agree=_Alone())
    _run(tape, transfer, tracer, program)
    return tracer.trace


class _NeverFails(Check):
    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        raise AssertionError("there are no trailers here")

    def failed(self) -> bool:
        return False


class _Alone:
    def __call__(self, mine: FirstPass, serve: Any) -> FirstPass:
        return mine

    def announce(self, wanted: int) -> None:
        """Tell nobody."""


def _transfer(
    shape: Shape, backend: Any, pool: Pool, blocks: list[TravellingBlock], transfers: Any
) -> Any:
    if shape.ranks == 1:
        return transfers.LocalTransfer(backend, pool, blocks)
    kind = transfers.StagedTransfer if shape.stages else transfers.InPlaceTransfer
    gather = _Gather(backend, shape.ranks)

    class Traced(kind):  # type: ignore[misc, valid-type]
        """Tells the collective which block it gathers, which a real one does not ask."""

        def _gather(self, slot: Slot, block: int, shard: torch.Tensor) -> None:
            backend.filling = (block, slot.fill)
            super()._gather(slot, block, shard)

    return Traced(backend, pool, blocks, collective=gather, unpack=lambda slot, block: None)


def _run(tape: Tape, transfer: Any, tracer: _Tracer, program: Program) -> None:
    tape.prefetch()
    for calls in program:
        tape.begin_pass()
        for block in calls:
            slot = tape.before(block)
            transfer.acquire(slot, block)
            held = tape.block(slot.fill)
            assert held == block
            name = f"slot {slot.index}"
            tracer.add(Op(f"compute {block}", reads=(name,), expects=((name, block),)))
            transfer.release(slot, block)
            tape.after(slot)
        tape.end_pass()


def explore(traces: Sequence[Trace]) -> Found:
    """Walk through every interleaving of the ranks' traces.

    Raises:
        Violation: The first conflict, wrong read or deadlock.
    """
    machine = _Machine(traces)
    start = machine.start()
    seen = {start}
    todo = [start]
    steps = 0
    while todo:
        state = todo.pop()
        following = list(machine.following(state))
        if not following and not machine.done(state):
            raise Violation(f"deadlock: {machine.describe(state)}")
        for after in following:
            steps += 1
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return Found(len(seen), steps)


# For each rank: how many operations of each stream ended, whether one is under way, and what each
# buffer holds.
State = tuple[tuple[tuple[int, int, int], tuple[bool, bool, bool], tuple[int, ...]], ...]


class _Machine:
    def __init__(self, traces: Sequence[Trace]) -> None:
        self._traces = traces
        names = {n for t in traces for s in t.streams for op in s for n in (*op.reads, *op.writes)}
        self._place = {name: place for place, name in enumerate(sorted(names))}

    def start(self) -> State:
        empty = tuple(-1 for _ in self._place)
        return tuple(((0, 0, 0), (False, False, False), empty) for _ in self._traces)

    def done(self, state: State) -> bool:
        return all(
            counts[s] == len(trace.streams[s])
            for (counts, _, _), trace in zip(state, self._traces, strict=True)
            for s in range(3)
        )

    def following(self, state: State) -> Iterator[State]:
        for rank, (counts, under_way, holds) in enumerate(state):
            for stream in range(3):
                operations = self._traces[rank].streams[stream]
                if counts[stream] == len(operations):
                    continue
                op = operations[counts[stream]]
                if under_way[stream]:
                    if op.gather < 0 or self._all_began(state, op.gather):
                        yield self._end(state, rank, stream, op)
                elif all(have >= need for have, need in zip(counts, op.needs, strict=True)):
                    self._check(rank, op, counts, under_way, holds)
                    flags = tuple(f or s == stream for s, f in enumerate(under_way))
                    yield _put(state, rank, (counts, flags, holds))

    def _all_began(self, state: State, gather: int) -> bool:
        for counts, under_way, _ in state:
            passed = counts[COMM] > gather
            here = counts[COMM] == gather and under_way[COMM]
            if not (passed or here):
                return False
        return True

    def _end(self, state: State, rank: int, stream: int, op: Op) -> State:
        counts, under_way, holds = state[rank]
        more = tuple(c + (s == stream) for s, c in enumerate(counts))
        flags = tuple(f and s != stream for s, f in enumerate(under_way))
        if op.writes:
            places = {self._place[name] for name in op.writes}
            holds = tuple(op.makes if p in places else h for p, h in enumerate(holds))
        return _put(state, rank, (more, flags, holds))

    def _check(self, rank: int, op: Op, counts: Any, under_way: Any, holds: Any) -> None:
        for stream in range(3):
            if not under_way[stream]:
                continue
            other = self._traces[rank].streams[stream][counts[stream]]
            touched = {*op.reads, *op.writes} & {*other.writes}
            touched |= {*op.writes} & {*other.reads}
            if touched:
                raise Violation(f"{op.name} and {other.name} at once on {sorted(touched)}")
        for name, wanted in op.expects:
            held = holds[self._place[name]]
            if held != wanted:
                raise Violation(f"{op.name} reads {name}, which holds block {held}")

    def describe(self, state: State) -> str:
        heads = []
        for rank, (counts, _, _) in enumerate(state):
            for stream in range(3):
                rest = self._traces[rank].streams[stream][counts[stream] :]
                if rest:
                    heads.append(f"rank {rank}: {rest[0].name}")
        return "; ".join(heads)


def _put(state: State, rank: int, mine: Any) -> State:
    return (*state[:rank], mine, *state[rank + 1 :])
