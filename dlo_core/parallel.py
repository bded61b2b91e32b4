"""The rules: which of a job's parallel dimensions carries dlo's all-gather, and why.

Pure: sizes and ranks only. dlo makes no parallelism, it uses what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Choice", "Dim", "Sizes", "choose", "ranks_along", "split_by_node"]


class Dim(str, Enum):
    """One way in which a job is parallel."""

    DP = "dp"
    """Data parallel: each rank has a request of its own and all weights."""
    SP = "sp"
    """Sequence parallel: the ranks share one sequence; each has all weights."""
    TP = "tp"
    """Tensor parallel: the ranks share one sequence; each has its part of every weight."""
    HSDP = "hsdp"
    """FSDP2 or HSDP: torch's ``fully_shard`` shards and gathers the weights."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks each dimension has; a combination that no setting allows is refused.

    Attributes:
        dp: Data-parallel ranks.
        sp: Sequence-parallel ranks.
        tp: Tensor-parallel ranks.
        hsdp: Replicas, and ranks over which one replica is sharded; (1, 1): no HSDP. HSDP spans
            the whole job, so sequence-parallel ranks are among its ranks.
    """

    dp: int = 1
    sp: int = 1
    tp: int = 1
    hsdp: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Refuse what is no size, and combinations that are always rejected.

        Raises:
            ConfigError: Holds the reason and the remedy.
        """
        for name in ("dp", "sp", "tp"):
            _check_size(name, getattr(self, name))
        if not isinstance(self.hsdp, tuple | list) or len(self.hsdp) != 2:
            raise ConfigError(
                "hsdp must be two sizes, (replicas, ranks that shard one); got "
                f"{self.hsdp!r}: (1, 4) is FSDP over 4 ranks"
            )
        for size in self.hsdp:
            _check_size("hsdp", size)
        object.__setattr__(self, "hsdp", tuple(self.hsdp))
        if self.has_hsdp:
            self._check_hsdp()

    def _check_hsdp(self) -> None:
        for name, size in (("DP", self.dp), ("TP", self.tp)):
            if size > 1:
                raise ConfigError(
                    f"{self}: HSDP cannot be combined with {name}: its replicas are the "
                    "data-parallel dimension already, and what it shards are whole weights. Use "
                    f"HSDP (with SP, if wanted) and use_allgather=False, or {name} without HSDP"
                )
        if self.num_hsdp % self.sp:
            raise ConfigError(
                f"HSDP over {self.hsdp[0]} x {self.hsdp[1]} ranks cannot have sequence-parallel "
                f"groups of {self.sp}: the groups lie inside of HSDP's ranks, so {self.sp} must "
                f"divide {self.num_hsdp}"
            )

    @property
    def num_hsdp(self) -> int:
        """Ranks of HSDP."""
        return self.hsdp[0] * self.hsdp[1]

    @property
    def has_hsdp(self) -> bool:
        """Whether ``fully_shard`` is in use."""
        return self.num_hsdp > 1

    @property
    def world(self) -> int:
        """Ranks of the whole job."""
        if self.has_hsdp:
            return self.num_hsdp
        return self.dp * self.sp * self.tp

    def __str__(self) -> str:
        """Show the dimensions that are in use."""
        sizes = (("DP", self.dp), ("SP", self.sp), ("TP", self.tp))
        parts = [f"{name}{size}" for name, size in sizes if size > 1]
        if self.has_hsdp:
            parts.insert(0, f"HSDP{self.hsdp[0]}x{self.hsdp[1]}")
        return " x ".join(parts) or "one rank"


@dataclass(frozen=True, slots=True)
class Choice:
    """Which dimension carries dlo's all-gather.

    Attributes:
        dim: The dimension; None: rank-local mode.
        reason: Why.
    """

    dim: Dim | None
    reason: str


def choose(sizes: Sizes, *, use_allgather: bool = True) -> Choice:
    """Return which group shards the weights.

    DP where it has more than one rank, else SP where it has, else none; TP never.

    Raises:
        ConfigError: The combination is rejected; holds the reason and the remedy.
    """
    if sizes.has_hsdp:
        return _choose_hsdp(sizes, use_allgather)
    if not use_allgather:
        return Choice(
            None,
            "use_allgather=False: each rank keeps its own weights on its host and streams them "
            "without a collective of dlo's; the model's own collectives stay as they are",
        )
    tp = "; TP ranks hold different weights and never share a shard group" if sizes.tp > 1 else ""
    if sizes.dp > 1:
        sp = "; SP keeps its own group for activations" if sizes.sp > 1 else ""
        return Choice(Dim.DP, f"DP has {sizes.dp} ranks, which hold the same weights{sp}{tp}")
    if sizes.sp > 1:
        return Choice(
            Dim.SP, f"DP has one rank, and SP has {sizes.sp}, which hold the same weights{tp}"
        )
    if sizes.tp > 1:
        return Choice(
            None,
            "only TP has more than one rank, and it is never the shard group: its ranks hold "
            "different weights already, so each streams its own",
        )
    return Choice(None, "there is one rank: nothing to share")


def _choose_hsdp(sizes: Sizes, use_allgather: bool) -> Choice:
    if use_allgather:
        raise ConfigError(
            f"{sizes}: HSDP has sharded the parameters already, and dlo's all-gather would shard "
            "them a second time; pass use_allgather=False (dlo then streams each rank's own "
            "shards and HSDP gathers them), or leave fully_shard() out and use DP or SP with "
            "dlo's all-gather"
        )
    return Choice(
        None,
        "HSDP owns the sharding of the parameters and its own gathers; dlo streams each rank's "
        "shards to the device and adds no collective",
    )


def ranks_along(sizes: Sizes, dim: Dim, rank: int) -> tuple[int, ...]:
    """Return the global ranks of ``rank``'s group of ``dim``, as ``Topology.from_sizes`` has them.

    TP ranks are neighbours, then SP, then DP. HSDP's shards are neighbours; a group of ``HSDP`` is
    the ranks that shard one replica.
    """
    if dim is Dim.HSDP:
        first = rank - rank % sizes.hsdp[1]
        return tuple(range(first, first + sizes.hsdp[1]))
    size = {Dim.DP: sizes.dp, Dim.SP: sizes.sp, Dim.TP: sizes.tp}[dim]
    step = {Dim.DP: sizes.sp * sizes.tp, Dim.SP: sizes.tp, Dim.TP: 1}[dim]
    first = rank - rank // step % size * step
    return tuple(first + step * number for number in range(size))


def split_by_node(ranks: Sequence[int], nodes: Sequence[str], mine: str) -> tuple[int, ...]:
    """Return those of ``ranks`` whose entry of ``nodes`` is ``mine``, in their order."""
    return tuple(rank for rank, node in zip(ranks, nodes, strict=True) if node == mine)


def _check_size(name: str, size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{name} must be a whole number of ranks, at least 1; got {size!r}")
