"""The planner: what a pass takes when blocks are copied, gathered, decoded and computed; pure.

[Note: the simulation]
Three lanes work in order, each one item after the other: copies, gathers, computation. An item
starts as soon as its lane is free and what it needs is there, exactly the waits of
[Note: two events] in ``transfer.py``:

- copy k      a stage that is free again; without stages, the slot
- gather k    copy k, and a slot that is free again
- compute k   fill k

A block that travels packed is decoded in the lane of computation, right before it computes. So its
slot is free again as soon as that is done, and a step of *n* equal blocks comes to the longer of
their transfers, in fewer bytes, and of computation and *n* decodings.

There is no jitter and no cost of the host, so a measured step is never shorter than the simulated
one but for noise. ``bound_ms`` is what no order can beat: the busiest lane's work. ``lockstep_ms``
is what this order never exceeds: if all lanes waited for each other at every block, block k would
take as long as the longest of its computation and the transfers that run beside it. So a step of
unequal blocks lies between the two, and of equal blocks where the lanes overlap fully, on both.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dlo_core.errors import ConfigError
from dlo_core.residency import PLACEMENTS, resident_positions

__all__ = ["Simulation", "simulate"]

_NBYTES_PER_MS = 1e6
_MOST_PASSES = 60


@dataclass(frozen=True, slots=True)
class Simulation:
    """What one pass takes once it has settled, in milliseconds.

    Attributes:
        step_ms: From the end of one pass to the end of the next.
        exposed_ms: Part of ``step_ms`` in which computation waits for weights.
        compute_ms: Computation of all blocks, without decoding.
        copy_ms: Copies of all streamed blocks.
        gather_ms: Gathers of all streamed blocks; 0 where nothing is gathered.
        lockstep_ms: What ``step_ms`` never exceeds. See [Note: the simulation].
        ends_ms: When each block of the very first pass, which starts with nothing loaded, ended.
        decode_ms: Decoding of all blocks that travel packed.
    """

    step_ms: float
    exposed_ms: float
    compute_ms: float
    copy_ms: float
    gather_ms: float
    lockstep_ms: float
    ends_ms: tuple[float, ...]
    decode_ms: float = 0.0

    @property
    def bound_ms(self) -> float:
        """What no order of copies, gathers and computation can beat."""
        return max(self.compute_ms + self.decode_ms, self.copy_ms, self.gather_ms)

    @property
    def interval_ms(self) -> float:
        """Mean time between the ends of neighbouring blocks in the first pass."""
        return (self.ends_ms[-1] - self.ends_ms[0]) / max(len(self.ends_ms) - 1, 1)


def simulate(
    blocks: Sequence[int],
    t_compute: float | Sequence[float],
    link: float,
    gather: float | None = None,
    *,
    depth: int = 2,
    stages: int = 2,
    residents: int | Collection[int] = 0,
    size: int = 1,
    placement: str = "spread",
    host_blocks: bool = False,
    copies_ahead: bool = True,
    t_decode: float | Sequence[float] | None = None,
) -> Simulation:
    """Return what a pass over ``blocks`` takes.

    Args:
        blocks: Bytes of each block as it travels, in the order in which they run.
        t_compute: Milliseconds that a block computes, or one number a block.
        link: GB/s from this rank's host memory to its device.
        gather: GB/s at which a gather writes whole blocks, as they travel; None: nothing is
            gathered.
        depth: Slots, at least 2.
        stages: Stages of gather mode; 0: gather in place.
        residents: How many blocks stay on the device, or the places of those that do.
        size: Ranks over which a block is cut; each copies ``1/size`` of it.
        placement: Where a number of residents lie: ``"spread"`` or ``"leading"``.
        host_blocks: Whether a wait blocks the host, as on a CPU: then a fill is only queued when
            its turn comes, at the end of an earlier block.
        copies_ahead: Whether the copy into a stage is queued one fill ahead of its gather.
        t_decode: Milliseconds in which a block that travels packed is decoded, or one number a
            block, 0 for blocks that stay raw; None: nothing is packed, and blocks compute in their
            slots.

    Raises:
        ConfigError: A value is out of range; names it.
    """
    computes = _times(len(blocks), "t_compute", t_compute)
    decodes = _times(len(blocks), "t_decode", 0.0 if t_decode is None else t_decode)
    _check(blocks, {"link": link, "gather": gather}, depth=depth, stages=stages, size=size)
    stay = _residents(len(blocks), residents, placement)
    streamed = [place for place in range(len(blocks)) if place not in stay]
    copies = [blocks[place] / size / link / _NBYTES_PER_MS for place in streamed]
    gathers = [0.0 if gather is None else blocks[n] / gather / _NBYTES_PER_MS for n in streamed]
    shape = _Shape(
        slots=min(depth, max(len(streamed), 1)),
        stages=0 if gather is None else stages,
        host_blocks=host_blocks,
        copies_ahead=copies_ahead and stages > 0 and gather is not None,
        # With a slot for each block every block is loaded once and for all.
        loads_once=len(streamed) <= depth,
        packed=t_decode is not None,
    )
    lanes = _Lanes(shape, copies, gathers)
    once = _decoded_once(decodes, streamed if not shape.loads_once else ())
    step_ms, ends = _settle(lanes, computes, decodes, streamed=set(streamed), once=once)
    if shape.loads_once:
        copies = gathers = [0.0] * len(streamed)
    if once:
        decodes = [0.0] * len(blocks)
    busy = [compute + decode for compute, decode in zip(computes, decodes, strict=True)]
    return Simulation(
        step_ms=step_ms,
        exposed_ms=max(step_ms - sum(busy), 0.0),
        compute_ms=sum(computes),
        copy_ms=sum(copies),
        gather_ms=sum(gathers),
        lockstep_ms=_lockstep(shape, busy, streamed, copies, gathers),
        ends_ms=ends,
        decode_ms=sum(decodes),
    )


def _decoded_once(decodes: Sequence[float], anew: Collection[int]) -> bool:
    """Return whether one block alone is decoded and never loaded ``anew``: it stays decoded."""
    packed = [place for place, decode_ms in enumerate(decodes) if decode_ms]
    return len(packed) == 1 and packed[0] not in anew


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the lanes depend on each other."""

    slots: int
    stages: int
    host_blocks: bool
    copies_ahead: bool
    loads_once: bool
    packed: bool


class _Lanes:
    """The fills so far: when each was copied, gathered and computed."""

    def __init__(self, shape: _Shape, copies: Sequence[float], gathers: Sequence[float]) -> None:
        self._shape = shape
        self._copies = copies
        self._gathers = gathers
        self._copied: list[float] = []
        self._filled: list[float] = []
        self._drained: list[float] = []
        self._reached: list[float] = []

    def fill(self, host_ms: float) -> float:
        """Return when the next fill is there; its block is reached by the host at ``host_ms``."""
        shape, fill = self._shape, len(self._filled)
        turn = fill % len(self._copies)
        moves = not shape.loads_once or fill < len(self._copies)
        copy_ms, gather_ms = (self._copies[turn], self._gathers[turn]) if moves else (0.0, 0.0)
        self._reached.append(host_ms)
        free_ms = _nth(self._drained, fill - shape.slots)
        buffer_ms = _nth(self._filled, fill - shape.stages) if shape.stages else free_ms
        start = max(_nth(self._copied, fill - 1), buffer_ms, self._queued(fill, shape.copies_ahead))
        self._copied.append(start + copy_ms)
        if shape.stages:
            start = max(self._copied[fill], free_ms, self._queued(fill, False))
        else:
            start = self._copied[fill]
        self._filled.append(max(start, _nth(self._filled, fill - 1)) + gather_ms)
        return self._filled[fill]

    def computed(self, start_ms: float, end_ms: float) -> None:
        """Note when the block of the last fill computed; its slot is free then, or decoded."""
        self._drained.append(start_ms if self._shape.packed else end_ms)

    def _queued(self, fill: int, ahead: bool) -> float:
        """Return when the host queued a fill: when it reached the block ``slots - 1`` before."""
        if not self._shape.host_blocks:
            return 0.0
        return _nth(self._reached, fill - self._shape.slots + (0 if ahead else 1))


def _nth(times: Sequence[float], index: int) -> float:
    return times[index] if index >= 0 else 0.0


def _settle(
    lanes: _Lanes,
    computes: Sequence[float],
    decodes: Sequence[float],
    *,
    streamed: Collection[int],
    once: bool,
) -> tuple[float, tuple[float, ...]]:
    """Return the time of a pass once it repeats, and the ends of the first pass's blocks."""
    now, first, passes = 0.0, list[float](), [0.0]
    for turn in range(_MOST_PASSES):
        for place, compute_ms in enumerate(computes):
            ready_ms = lanes.fill(now) if place in streamed else now
            start = max(now, ready_ms) + (0.0 if once and turn else decodes[place])
            now = start + compute_ms
            if place in streamed:
                lanes.computed(start, now)
            if turn == 0:
                first.append(now)
        passes.append(now)
    # Passes repeat after as many as there are slots or stages: with an odd number of blocks and two
    # slots every other one is the same. So take the mean of the second half of them.
    half = _MOST_PASSES // 2
    return (passes[-1] - passes[half]) / half, tuple(first)


def _lockstep(
    shape: _Shape,
    computes: Sequence[float],
    streamed: Sequence[int],
    copies: Sequence[float],
    gathers: Sequence[float],
) -> float:
    """Return the time of a pass in which every lane waits for all others at every block."""
    if not streamed:
        return sum(computes)
    count = len(streamed)
    # One link, one slot to spare: beside block k the next fill is made.
    edges = [*streamed, streamed[0] + len(computes)]
    turns = [sum(computes[p % len(computes)] for p in range(a, b)) for a, b in pairwise(edges)]
    total = 0.0
    for number, compute_ms in enumerate(turns):
        after, later = (number + 1) % count, (number + 2) % count
        if shape.stages < 2 or (shape.host_blocks and not shape.copies_ahead):
            total += max(compute_ms, copies[after] + gathers[after])
        else:
            total += max(compute_ms, gathers[after], copies[later])
    return total


def _times(count: int, name: str, given: float | Sequence[float]) -> list[float]:
    times = list(given) if isinstance(given, Sequence) else [given] * count
    if not count or len(times) != count:
        raise ConfigError(
            f"simulate() needs at least one block and one {name} for each; got {count} blocks "
            f"and {len(times)} times"
        )
    if not all(math.isfinite(value) and value >= 0 for value in times):
        raise ConfigError(f"{name} must be milliseconds of at least 0; got {given!r}")
    return times


def _check(
    blocks: Sequence[int],
    rates: Mapping[str, float | None],
    *,
    depth: int,
    stages: int,
    size: int,
) -> None:
    if any(nbytes < 0 for nbytes in blocks):
        raise ConfigError(f"blocks must be byte counts; got {list(blocks)!r}")
    for name, rate in rates.items():
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            raise ConfigError(f"{name} must be a rate in GB/s above 0; got {rate!r}")
    for name, value, least in (("depth", depth, 2), ("stages", stages, 0), ("size", size, 1)):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}; got {value!r}")


def _residents(count: int, residents: int | Collection[int], placement: str) -> frozenset[int]:
    if placement not in PLACEMENTS:
        raise ConfigError(f"placement must be 'spread' or 'leading'; got {placement!r}")
    if isinstance(residents, int):
        if not 0 <= residents <= count:
            raise ConfigError(f"residents must be 0 to {count} blocks; got {residents}")
        return resident_positions(count, residents, placement) if residents else frozenset()
    if not all(0 <= place < count for place in residents):
        raise ConfigError(f"residents must be places 0 to {count - 1}; got {sorted(residents)}")
    return frozenset(residents)
