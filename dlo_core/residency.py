"""Residency: which blocks stay on the device, and the slots and stages of those that do not; pure.

The blocks that stay are spread evenly, because the blocks between two of them hide the copies of
the next ones; leading ones leave the whole tail to the link alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["PLACEMENTS", "Budget", "Ring", "choose_residents", "resident_positions", "ring_of"]

PLACEMENTS = ("spread", "leading")

Chosen = tuple[frozenset[int], ...]
"""Of each model, the numbers of its blocks that stay."""


class Cut(Protocol):
    """The sizes of one block."""

    @property
    def nbytes(self) -> int:
        """Bytes of every rank's shard."""

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the whole block on the device."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The buffers through which the other blocks stream.

    Attributes:
        num_slots: At most ``depth``, and not more than one model streams.
        slot_nbytes: Bytes of the largest block that streams.
        num_stages: As set; none where nothing streams or nothing is gathered.
        stage_nbytes: Bytes of its shard.
    """

    num_slots: int
    slot_nbytes: int
    num_stages: int
    stage_nbytes: int

    @property
    def nbytes(self) -> int:
        """All bytes."""
        return self.num_slots * self.slot_nbytes + self.num_stages * self.stage_nbytes


@dataclass(frozen=True, slots=True)
class Budget:
    """What may be on the device.

    Attributes:
        nbytes: The most bytes; None: no limit.
        fixed_nbytes: Bytes of it that are taken whatever blocks stay.
    """

    nbytes: int | None
    fixed_nbytes: int


def resident_positions(count: int, num_residents: int, placement: str = "spread") -> frozenset[int]:
    """Return which of ``count`` blocks stay on the device: evenly spread, or the leading ones."""
    if placement == "leading":
        return frozenset(range(num_residents))
    return frozenset(int((n + 0.5) * count / num_residents) for n in range(num_residents))


def ring_of(
    cuts: Sequence[Sequence[Cut]], residents: Sequence[frozenset[int]], *, depth: int, stages: int
) -> Ring:
    """Return the slots and stages for the blocks of all models that are not resident.

    Args:
        cuts: The sizes of each model's blocks.
        residents: Of each model, the numbers of the blocks that stay.
        depth: Slots, as set.
        stages: Stages; 0 where nothing is gathered.
    """
    streamed = [
        [cut for number, cut in enumerate(model) if number not in stay]
        for model, stay in zip(cuts, residents, strict=True)
    ]
    most = max(map(len, streamed))
    every = [cut for model in streamed for cut in model]
    return Ring(
        num_slots=min(depth, most),
        slot_nbytes=max((cut.padded_nbytes for cut in every), default=0),
        num_stages=stages if every else 0,
        stage_nbytes=max((cut.nbytes for cut in every), default=0),
    )


def choose_residents(
    cuts: Sequence[Sequence[Cut]],
    wanted: int | Literal["auto"],
    *,
    placement: str,
    depth: int,
    stages: int,
    budget: Budget,
) -> Chosen:
    """Return which blocks of each model stay.

    A number is meant for every model. ``"auto"`` takes as many as the budget holds, of several
    models the same part of each; where it costs no more than a few of them, so many that every
    block that streams always lands in the same slot.

    Args:
        cuts: The sizes of each model's blocks.
        wanted: How many of each model, or ``"auto"``.
        placement: ``"spread"`` or ``"leading"``.
        depth: Slots, as set.
        stages: Stages; 0 where nothing is gathered.
        budget: What may be on the device.

    Raises:
        ConfigError: A model has not so many blocks, or the budget is too small; names the bytes.
    """
    counts = [len(model) for model in cuts]

    def needed(chosen: Chosen) -> int:
        stay = sum(
            model[number].padded_nbytes
            for model, numbers in zip(cuts, chosen, strict=True)
            for number in numbers
        )
        ring = ring_of(cuts, chosen, depth=depth, stages=stages)
        return budget.fixed_nbytes + ring.nbytes + stay

    if wanted != "auto":
        for number, count in enumerate(counts):
            if wanted > count:
                raise ConfigError(
                    f"resident_layers={wanted}, but model {number} has {count} blocks; give at "
                    f"most {min(counts)}, or 'auto' with device_budget_bytes="
                )
        chosen = _positions(counts, [wanted] * len(counts), placement)
        _check_budget(budget, needed(chosen), f"resident_layers={wanted} need")
        return chosen
    for nums in _candidates(counts, depth):
        chosen = _positions(counts, nums, placement)
        if budget.nbytes is None or needed(chosen) <= budget.nbytes:
            return chosen
    none = _positions(counts, [0] * len(counts), placement)
    _check_budget(budget, needed(none), "even without a resident block the weights take")
    return none


def _candidates(counts: Sequence[int], depth: int) -> Iterator[list[int]]:
    """Yield numbers of residents of each model, the most first; see ``choose_residents``.

    Those that give fixed addresses come before the others of about the same size.
    """
    total = sum(counts)
    for wanted in range(total, -1, -1):
        nums = _share(counts, wanted)
        fixed = [_fixed(count, num, depth) for count, num in zip(counts, nums, strict=True)]
        if None not in fixed:
            yield [num for num in fixed if num is not None]
        else:
            yield nums


def _share(counts: Sequence[int], wanted: int) -> list[int]:
    """Return how many of ``wanted`` residents fall to each model: as evenly as blocks go."""
    places = resident_positions(sum(counts), wanted) if wanted else frozenset()
    nums, start = [], 0
    for count in counts:
        nums.append(sum(start <= place < start + count for place in places))
        start += count
    return nums


def _fixed(count: int, num: int, depth: int) -> int | None:
    """Return the most residents up to ``num`` that leave a multiple of ``depth``; None: none do."""
    streamed = count - num
    if streamed > depth:
        streamed = -(-streamed // depth) * depth
    return count - streamed if streamed <= count else None


def _positions(counts: Sequence[int], nums: Sequence[int], placement: str) -> Chosen:
    return tuple(
        resident_positions(count, num, placement) if num else frozenset()
        for count, num in zip(counts, nums, strict=True)
    )


def _check_budget(budget: Budget, needed: int, what: str) -> None:
    if budget.nbytes is not None and needed > budget.nbytes:
        raise ConfigError(
            f"{what} {needed:,} bytes on the device, but device_budget_bytes={budget.nbytes:,}; "
            f"raise it by {needed - budget.nbytes:,}, or keep less resident, lower depth, or shard "
            "over more ranks"
        )
