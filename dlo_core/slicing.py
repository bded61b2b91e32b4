"""A cut: which part of a stored tensor a tensor-parallel rank has.

A checkpoint holds whole tensors. Which part of one a TP rank needs is known to the code that made
the model parallel and to nobody else, so the caller says it (``tp_plan=``), or the model's DTensors
do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dlo_core.dtensor import is_dtensor, shard_groups
from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.recipe import Recipe

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlo_core.inventory import Owned

__all__ = ["PLACEMENTS", "Cut", "Slicing", "TpPlan"]

PLACEMENTS = "placements"

TpPlan = Mapping[str, "int | tuple[int, int]"] | str


@dataclass(frozen=True, slots=True)
class Cut:
    """A slice along one dimension, of each of several equal parts that lie behind one another.

    Attributes:
        dim: The dimension.
        start: First index in each part.
        length: Indices in each part.
        parts: How many; 3 where query, key and value are one tensor.
    """

    dim: int
    start: int
    length: int
    parts: int = 1

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the slice of a tensor that has ``recipe``."""
        step = recipe.shape[self.dim] // self.parts
        places = range(self.start, self.start + step * self.parts, step or 1)[: self.parts]
        parts = [recipe.narrow(self.dim, place, self.length) for place in places]
        return Recipe.concat(parts, self.dim)


class Slicing:
    """How a tensor-parallel rank's tensors are cut out of a checkpoint."""

    def __init__(self, plan: TpPlan, *, rank: int, size: int) -> None:
        """Take the caller's plan.

        Args:
            plan: ``"placements"``: as the model's DTensors say. Or, by dotted name with ``*`` for
                anything, the dimension that is cut; or the dimension and the number of equal parts
                that lie in the tensor one behind the other. Other tensors are not cut.
            rank: In the TP group.
            size: Of the TP group.

        Raises:
            ConfigError: The plan is none, or there is no TP to cut for.
        """
        if not isinstance(plan, Mapping) and plan != PLACEMENTS:
            raise ConfigError(
                f"tp_plan must be a mapping from names to dimensions, or {PLACEMENTS!r}; got "
                f"{plan!r}"
            )
        rules: list[tuple[str, int, int]] = []
        for pattern, rule in plan.items() if isinstance(plan, Mapping) else ():
            dim, parts = rule if isinstance(rule, tuple) and len(rule) == 2 else (rule, 1)
            if not all(type(number) is int and number >= 0 for number in (dim, parts)) or not parts:
                raise ConfigError(
                    f"tp_plan[{pattern!r}] must be a dimension, or (dimension, parts); got {rule!r}"
                )
            rules.append((pattern, dim, parts))
        if rules and size == 1:
            raise ConfigError(
                "tp_plan= cuts tensors for the ranks of a TP group, and there is none; pass "
                "topology= with tp="
            )
        self._rules = rules
        self._unused = {pattern for pattern, _, _ in rules}
        self._by_placements = plan == PLACEMENTS
        self._rank, self._size = rank, size

    def cut_of(self, item: Owned, whole: Sequence[int]) -> Cut | None:
        """Return how ``item`` is cut out of a stored tensor of shape ``whole``; None: it is not.

        Raises:
            CheckpointError: It cannot be cut like this.
        """
        spread = item.original
        # Else an uneven cut would fit on some ranks, which then go on without the others.
        if is_dtensor(spread) and tuple(whole) != tuple(spread.shape):
            raise CheckpointError(
                f"{item.name!r} has shape {tuple(whole)} in the checkpoint, the model wants "
                f"{tuple(spread.shape)} (a DTensor, over all its ranks)"
            )
        if self._by_placements:
            return _cut_by_placements(item.original, whole)
        for pattern, dim, parts in self._rules:
            if any(fnmatchcase(name, pattern) for name in item.names):
                self._unused.discard(pattern)
                if dim >= len(whole) or whole[dim] % (parts * self._size):
                    raise CheckpointError(
                        f"{item.name!r} has shape {tuple(whole)} in the checkpoint, which "
                        f"tp_plan[{pattern!r}] cannot cut along dimension {dim} into {parts} x "
                        f"{self._size} equal parts"
                    )
                length = whole[dim] // parts // self._size
                return Cut(dim, self._rank * length, length, parts)
        return None

    def check_used(self) -> None:
        """Refuse names that match no tensor.

        Raises:
            ConfigError: Names them.
        """
        if self._unused:
            names = ", ".join(map(repr, sorted(self._unused)))
            raise ConfigError(f"tp_plan names {names}, which match no tensor of the model")


def _cut_by_placements(tensor: torch.Tensor, whole: Sequence[int]) -> Cut | None:
    cuts = list(_placed(tensor, whole)) if is_dtensor(tensor) else []
    if len(cuts) > 1:
        raise CheckpointError(
            f"a parameter is cut along {len(cuts)} dimensions of its mesh; dlo reads slices along "
            "one: pass a model that is parallel along one"
        )
    return cuts[0] if cuts else None


def _placed(tensor: torch.Tensor, whole: Sequence[int]) -> Iterator[Cut]:
    for dim, ranks in shard_groups(tensor):
        # As torch.chunk: equal parts but for the last ones.
        each = -(-whole[dim] // len(ranks))
        start = min(each * ranks.index(dist.get_rank()), whole[dim])
        yield Cut(dim, start, min(each, whole[dim] - start))
