"""The cells of the compatibility matrix, and what each must do."""

from __future__ import annotations

from dataclasses import dataclass

from dlo_core.parallel import Sizes

__all__ = ["CELLS", "Cell", "cell_id"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One topology, in gather mode where the rules allow it or in rank-local mode.

    Attributes:
        sizes: Ranks of each dimension, as ``Topology.from_sizes`` takes them; here also those that
            ``Sizes`` refuses, so these are plain numbers: dp, sp, tp, replicas, shards.
        use_allgather: The setting.
        shares: Ranks that share the weights, 1 in rank-local mode; 0: the cell is rejected.
        rejected: What the message of a rejected cell says.
        quick: Whether it is in the fast tests too.
    """

    sizes: tuple[int, int, int, int, int]
    use_allgather: bool
    shares: int
    rejected: str = ""
    quick: bool = False

    @property
    def world(self) -> int:
        """Ranks of the job."""
        dp, sp, tp, replicas, shards = self.sizes
        return replicas * shards if replicas * shards > 1 else dp * sp * tp

    @property
    def name(self) -> str:
        """The topology's name, as ``Sizes`` shows it."""
        dp, sp, tp, replicas, shards = self.sizes
        parts = [f"HSDP{replicas}x{shards}"] if replicas * shards > 1 else []
        parts += [f"{n}{size}" for n, size in (("DP", dp), ("SP", sp), ("TP", tp)) if size > 1]
        return " x ".join(parts)

    def of(self) -> Sizes:
        """Return the sizes.

        Raises:
            ConfigError: They are always rejected.
        """
        dp, sp, tp, replicas, shards = self.sizes
        return Sizes(dp, sp, tp, (replicas, shards))


def cell_id(cell: Cell) -> str:
    """Return a name for pytest."""
    mode = "gather" if cell.use_allgather else "no-gather"
    return f"{cell.name.replace(' ', '')}-{mode}"


_SECOND_TIME = "would shard them a second time; pass use_allgather=False"

CELLS = [
    Cell((2, 1, 1, 1, 1), True, 2, quick=True),
    Cell((2, 1, 1, 1, 1), False, 1),
    Cell((4, 1, 1, 1, 1), True, 4),
    Cell((4, 1, 1, 1, 1), False, 1),
    Cell((1, 2, 1, 1, 1), True, 2, quick=True),
    Cell((1, 2, 1, 1, 1), False, 1),
    Cell((1, 4, 1, 1, 1), True, 4),
    Cell((1, 4, 1, 1, 1), False, 1),
    # TP alone has nobody to share with, whatever the setting.
    Cell((1, 1, 2, 1, 1), True, 1),
    Cell((1, 1, 2, 1, 1), False, 1, quick=True),
    Cell((1, 1, 1, 2, 2), True, 0, _SECOND_TIME, quick=True),
    Cell((1, 1, 1, 2, 2), False, 1, quick=True),
    Cell((1, 1, 1, 1, 2), True, 0, _SECOND_TIME),
    Cell((1, 1, 1, 1, 2), False, 1),
    Cell((2, 2, 1, 1, 1), True, 2),
    Cell((2, 2, 1, 1, 1), False, 1),
    Cell((2, 1, 2, 1, 1), True, 2, quick=True),
    Cell((2, 1, 2, 1, 1), False, 1),
    Cell((1, 2, 2, 1, 1), True, 2),
    Cell((1, 2, 2, 1, 1), False, 1),
    Cell((1, 2, 1, 2, 2), True, 0, _SECOND_TIME),
    Cell((1, 2, 1, 2, 2), False, 1),
    Cell((2, 2, 2, 1, 1), True, 2),
    Cell((2, 2, 2, 1, 1), False, 1),
    Cell((2, 1, 1, 1, 2), True, 0, "HSDP cannot be combined with DP"),
    Cell((2, 1, 1, 1, 2), False, 0, "HSDP cannot be combined with DP"),
    Cell((1, 1, 2, 1, 2), True, 0, "HSDP cannot be combined with TP"),
    Cell((1, 1, 2, 1, 2), False, 0, "HSDP cannot be combined with TP"),
]
