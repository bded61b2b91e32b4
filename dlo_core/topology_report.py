"""The report of a topology: who shards with whom and why, as text and as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlo_core.errors import ConfigError
from dlo_core.parallel import Dim, Sizes, choose, ranks_along, split_by_node

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["RankPlace", "TopologyReport", "report_all"]


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank, its groups, and the ranks that it shares weights with.

    Attributes:
        rank: Global rank.
        node: Name of its node; "" where that is not known.
        groups: Global ranks of its group in every dimension that is in use.
        shard: Global ranks of its shard group, in the order of their group ranks.
    """

    rank: int
    node: str
    groups: dict[Dim, tuple[int, ...]]
    shard: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TopologyReport:
    """Who shards with whom, and why. ``str()`` is a table, ``to_dict()`` is for JSON.

    Attributes:
        sizes: Ranks of each dimension.
        mode: ``"gather"``, ``"rank-local"`` or ``"rejected"``.
        dim: The dimension whose group shards; None: none does.
        reason: Why; for what is rejected, the reason and the remedy.
        shard_within: ``"node"`` or None.
        ranks: The ranks that are known: all, or the one that was asked.
    """

    sizes: Sizes
    mode: str
    dim: Dim | None
    reason: str
    shard_within: str | None
    ranks: tuple[RankPlace, ...]

    @classmethod
    def of(
        cls,
        sizes: Sizes,
        places: Sequence[tuple[int, str, dict[Dim, tuple[int, ...]]]],
        *,
        use_allgather: bool,
        shard_within: str | None,
        nodes: dict[int, str],
    ) -> TopologyReport:
        """Apply the rules to ranks, given as (rank, node, groups).

        ``nodes`` names the nodes of all ranks that are known to lie on one.
        """
        try:
            choice = choose(sizes, use_allgather=use_allgather)
        except ConfigError as error:
            ranks = tuple(RankPlace(*place, shard=()) for place in places)
            return cls(sizes, "rejected", None, str(error), shard_within, ranks)
        rows = []
        for rank, node, groups in places:
            shard = (rank,) if choice.dim is None else groups[choice.dim]
            if shard_within == "node" and all(other in nodes for other in shard):
                shard = split_by_node(shard, [nodes[other] for other in shard], node)
            rows.append(RankPlace(rank, node, groups, shard))
        mode = "rank-local" if choice.dim is None else "gather"
        return cls(sizes, mode, choice.dim, choice.reason, shard_within, tuple(rows))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return {
            "world": self.sizes.world,
            "sizes": {
                "dp": self.sizes.dp,
                "sp": self.sizes.sp,
                "tp": self.sizes.tp,
                "hsdp": list(self.sizes.hsdp),
            },
            "mode": self.mode,
            "dim": None if self.dim is None else self.dim.value,
            "reason": self.reason,
            "shard_within": self.shard_within,
            "ranks": [
                {
                    "rank": place.rank,
                    "node": place.node,
                    "groups": {dim.value: list(ranks) for dim, ranks in place.groups.items()},
                    "shard": list(place.shard),
                }
                for place in self.ranks
            ],
        }

    def __str__(self) -> str:
        """Show a sentence and a table."""
        lines = [f"{self.sizes}: {self.sizes.world} rank{'s' if self.sizes.world > 1 else ''}"]
        if self.mode == "rejected":
            return "\n".join([*lines, f"rejected: {self.reason}"])
        over = f" over {self.dim.value.upper()}" if self.dim is not None else ""
        within = ", within each node" if self.shard_within == "node" and over else ""
        lines.append(f"{self.mode} mode{over}{within}: {self.reason}")
        dims = [dim for dim in Dim if any(dim in place.groups for place in self.ranks)]
        head = ["rank", "node", *(f"{dim.value} ranks" for dim in dims), "shares weights with"]
        rows = [head, *(self._row(place, dims) for place in self.ranks)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines += ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def _row(self, place: RankPlace, dims: Sequence[Dim]) -> list[str]:
        others = [str(rank) for rank in place.shard if rank != place.rank]
        shares = f"{' '.join(others)} (1/{len(place.shard)} each)" if others else "nobody"
        groups = [" ".join(map(str, place.groups.get(dim, ()))) for dim in dims]
        return [str(place.rank), place.node or "-", *groups, shares]


def report_all(
    sizes: Sizes,
    *,
    use_allgather: bool = True,
    shard_within: str | None = None,
    ranks_per_node: int | None = None,
) -> TopologyReport:
    """Report on all ranks of a job that ``Topology.from_sizes`` would set up.

    Args:
        sizes: Ranks of each dimension.
        use_allgather: As in ``OffloadConfig``.
        shard_within: As in ``OffloadConfig``.
        ranks_per_node: Neighbours that are on one node; None: all are on one.

    Raises:
        ConfigError: ``ranks_per_node`` does not divide the ranks.
    """
    world = sizes.world
    each = ranks_per_node or world
    if each < 1 or world % each:
        raise ConfigError(f"{world} ranks cannot lie on nodes of {each} ranks each")
    nodes = {rank: f"node{rank // each}" for rank in range(world)}
    used = [dim for dim in Dim if _size_of(sizes, dim) > 1]
    places = [
        (rank, nodes[rank], {dim: ranks_along(sizes, dim, rank) for dim in used})
        for rank in range(world)
    ]
    return TopologyReport.of(
        sizes, places, use_allgather=use_allgather, shard_within=shard_within, nodes=nodes
    )


def _size_of(sizes: Sizes, dim: Dim) -> int:
    return sizes.num_hsdp if dim is Dim.HSDP else int(getattr(sizes, dim.value))
