"""The footprint: the bytes that an offload takes, and which blocks stay; from plans alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlo_core.residency import Budget, Ring, choose_residents, ring_of
from dlo_core.shard import trailers_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.config import OffloadConfig
    from dlo_core.plan import ModelPlan

__all__ = [
    "Footprint",
    "decoded_nbytes",
    "plan_residents",
    "plan_ring",
    "predict",
    "resident_numbers",
]


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that an offload takes, predicted from layouts alone.

    Attributes:
        slots_nbytes: All slots.
        stages_nbytes: All stages.
        remainder_nbytes: What stays on the device.
        trailers_nbytes: What every shard's trailer must be, in gather mode.
        host_nbytes: Host memory for this rank's shards; memory that ranks share counts in whole,
            the checkpoint's own pages do not.
        blocks_nbytes: All blocks whole, as they would lie on the device.
        pinned_nbytes: Of ``host_nbytes``, what is to be page-locked.
        shared_nbytes: Of ``host_nbytes``, what the node's ranks have in common.
        pageable_nbytes: Of ``host_nbytes``, what is neither.
        staging_nbytes: Of ``host_nbytes``, buffers through which the mapped tier goes.
        residents_nbytes: Blocks that stay on the device; while they are there.
        decoded_nbytes: Where blocks that travel packed compute, or may come to.
    """

    slots_nbytes: int
    stages_nbytes: int
    remainder_nbytes: int
    trailers_nbytes: int
    host_nbytes: int
    blocks_nbytes: int
    pinned_nbytes: int = 0
    shared_nbytes: int = 0
    pageable_nbytes: int = 0
    staging_nbytes: int = 0
    residents_nbytes: int = 0
    decoded_nbytes: int = 0

    @property
    def device_nbytes(self) -> int:
        """All bytes on the device."""
        ring = self.slots_nbytes + self.stages_nbytes + self.decoded_nbytes
        return ring + self.residents_nbytes + self.remainder_nbytes + self.trailers_nbytes


def plan_residents(plans: Sequence[ModelPlan], config: OffloadConfig) -> tuple[frozenset[int], ...]:
    """Return the numbers of the blocks that stay, of each model.

    Raises:
        ConfigError: There are not so many, or the budget is too small.
    """
    fixed_nbytes = _remainder_nbytes(plans) + _trailers_nbytes(plans) + _most_decoded(plans, config)
    return choose_residents(
        [plan.shards for plan in plans],
        config.resident_layers,
        placement=config.resident_placement,
        depth=config.depth,
        stages=_num_stages(plans, config),
        budget=Budget(config.device_budget_bytes, fixed_nbytes),
    )


def resident_numbers(
    plans: Sequence[ModelPlan], residents: Sequence[frozenset[int]]
) -> tuple[int, ...]:
    """Return the numbers of the blocks that stay, counted over all models."""
    found: list[int] = []
    first = 0
    for plan, stay in zip(plans, residents, strict=True):
        found += [first + number for number in sorted(stay)]
        first += len(plan.layouts)
    return tuple(found)


def plan_ring(
    plans: Sequence[ModelPlan], config: OffloadConfig, residents: Sequence[frozenset[int]]
) -> Ring:
    """Return the slots and stages for the blocks that do not stay."""
    cuts = [plan.shards for plan in plans]
    return ring_of(cuts, residents, depth=config.depth, stages=_num_stages(plans, config))


def predict(
    plans: Sequence[ModelPlan], config: OffloadConfig, residents: Sequence[frozenset[int]]
) -> Footprint:
    """Return the bytes that an offload of ``plans`` takes.

    Args:
        plans: The models.
        config: The settings.
        residents: Of each model, the numbers of the blocks that stay.
    """
    ring = plan_ring(plans, config, residents)
    return Footprint(
        slots_nbytes=ring.num_slots * ring.slot_nbytes,
        stages_nbytes=ring.num_stages * ring.stage_nbytes,
        remainder_nbytes=_remainder_nbytes(plans),
        trailers_nbytes=_trailers_nbytes(plans),
        host_nbytes=sum(shard.nbytes for plan in plans for shard in plan.shards),
        blocks_nbytes=sum(layout.nbytes for plan in plans for layout in plan.layouts),
        residents_nbytes=sum(
            plan.shards[number].padded_nbytes
            for plan, stay in zip(plans, residents, strict=True)
            for number in stay
        ),
        decoded_nbytes=_most_decoded(plans, config),
    )


def decoded_nbytes(plans: Sequence[ModelPlan]) -> int:
    """Return the bytes of the largest block decoded; 0 where blocks travel as they compute."""
    return max(cut.decoded_nbytes for plan in plans for cut in plan.shards)


def _most_decoded(plans: Sequence[ModelPlan], config: OffloadConfig) -> int:
    """Return what ``decoded_nbytes`` is, or may become."""
    if config.packed == "auto":
        return max(cut.padded_nbytes for plan in plans for cut in plan.shards)
    return decoded_nbytes(plans)


def _num_stages(plans: Sequence[ModelPlan], config: OffloadConfig) -> int:
    return config.stages if any(shard.size > 1 for plan in plans for shard in plan.shards) else 0


def _remainder_nbytes(plans: Sequence[ModelPlan]) -> int:
    return sum(plan.remainder.nbytes + plan.attribute_layout.nbytes for plan in plans)


def _trailers_nbytes(plans: Sequence[ModelPlan]) -> int:
    shards = [shard for plan in plans for shard in plan.shards]
    return trailers_nbytes(len(shards), shards[0].size)
