"""The report of several ranks: every step against its limit and the simulation; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ranks_contenders import CONTENDERS, Contender

from dlo_core.planner import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["WANTED", "Row", "crossing", "rows_of"]

WANTED = 1.03
"""What a step in gather mode may be of its limit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one length; of the ranks the slowest counts.

    Attributes:
        section: Where it was measured.
        contender: Its name.
        tokens: Of a rank.
        resident_ms: A step with all weights on the device.
        copy_ms: The link's time for what a rank copies, while all ranks copy.
        gather_ms: The gathers' time; 0 where nothing is gathered.
        step_ms: The median step.
        simulated_ms: What the planner makes of the rates; None where it does not know the order.
        same_bits: Whether every pass on every rank gave the resident run's bits; None: unknown.
        allocated_gb: The most device memory in tensors, on any rank.
        reserved_gb: The most that the allocator held.
        used_gb: What was gone of the device at the end, the comm library's and the driver's too.
        energy_j: Of a step, all ranks together; None where the driver does not tell.
    """

    section: str
    contender: str
    tokens: int
    resident_ms: float | None
    copy_ms: float | None
    gather_ms: float | None
    step_ms: float
    simulated_ms: float | None
    same_bits: bool | None
    allocated_gb: float
    reserved_gb: float
    used_gb: float
    energy_j: float | None

    @property
    def limit_ms(self) -> float | None:
        """What no order of copies, gathers and computation can beat."""
        parts = (self.resident_ms, self.copy_ms, self.gather_ms)
        known = [part for part in parts if part is not None]
        return max(known) if len(known) == len(parts) else None

    @property
    def ratio(self) -> float | None:
        """The step over its limit."""
        return self.step_ms / self.limit_ms if self.limit_ms else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, the ratio included."""
        return asdict(self) | {"limit_ms": self.limit_ms, "ratio": self.ratio}


def rows_of(results: dict[str, Any]) -> list[Row]:
    """Return a row for everything that was measured so far."""
    rows: list[Row] = []
    for section, found in results["sections"].items():
        for name, ranks in found.get("contenders", {}).items():
            rows += [_row(results, section, name, tokens) for tokens in _lengths(ranks)]
    return rows


def reference_of(results: dict[str, Any], section: str) -> dict[str, Any]:
    """Return what the ranks found for the resident run that ``section`` is held against."""
    for where in (section, results["sections"][section].get("reference", section)):
        contenders = results["sections"].get(where, {}).get("contenders", {})
        if "resident" in contenders:
            found: dict[str, Any] = contenders["resident"]
            return found
    return {}


def crossing(rows: Sequence[Row]) -> dict[str, float | None]:
    """Return from which length on rank-local mode is within ``WANTED`` of gather mode.

    Beside it the length at which the limits cross: the link brings the model in a resident step.

    Both between the lengths that were measured, in proportion; None where they do not cross there.
    """
    shared, local, gather = (
        {row.tokens: row for row in rows if row.section == "modes" and row.contender == name}
        for name in ("local_shared", "local", "gather")
    )
    local = local or shared
    lengths = sorted(local.keys() & gather.keys())
    steps = [(n, local[n].step_ms / gather[n].step_ms - WANTED) for n in lengths]
    limits = []
    for n in lengths:
        row = local[n]
        if row.copy_ms is not None and row.resident_ms is not None:
            limits.append((n, row.copy_ms - row.resident_ms))
    return {"measured_tokens": _zero(steps), "limits_tokens": _zero(limits)}


def _row(results: dict[str, Any], section: str, name: str, tokens: str) -> Row:
    ranks = results["sections"][section]["contenders"][name]
    reference, contender = reference_of(results, section), CONTENDERS[name]
    runs, alone = _runs(ranks, tokens), _runs(reference, tokens)
    rates = _rates(results, contender)
    blocks = next(iter(ranks.values())).get("blocks_nbytes", [])
    streamed = _streamed(contender, blocks)
    size = results["ranks"] if contender.gathers else 1
    resident = max((run["step_ms"] for run in alone.values()), default=None)
    copy_ms = gather_ms = 0.0 if contender.kind == "resident" else None
    if contender.kind != "resident" and rates["link"]:
        copy_ms = streamed / size / rates["link"] / 1e6
        gather_ms = streamed / rates["gather"] / 1e6 if rates["gather"] else None
        gather_ms = gather_ms if contender.gathers else 0.0
    energies = [run.get("energy_j") for run in runs.values()]
    return Row(
        section=section,
        contender=name,
        tokens=int(tokens),
        resident_ms=resident,
        copy_ms=copy_ms,
        gather_ms=gather_ms,
        step_ms=max(run["step_ms"] for run in runs.values()),
        simulated_ms=_simulate(results, contender, blocks, alone, rates),
        same_bits=_same(runs, alone, results["ranks"]),
        allocated_gb=max(run["allocated_nbytes"] for run in runs.values()) / 1e9,
        reserved_gb=max(run["reserved_nbytes"] for run in runs.values()) / 1e9,
        used_gb=max(run["used_nbytes"] for run in runs.values()) / 1e9,
        energy_j=None if None in energies else round(sum(filter(None, energies)), 2),
    )


def _same(runs: dict[str, Any], alone: dict[str, Any], size: int) -> bool | None:
    if not alone:
        return None
    return len(runs) == size and all(
        len(run["digests"]) == 1 and run["digests"] == alone.get(rank, {}).get("digests")
        for rank, run in runs.items()
    )


def _simulate(
    results: dict[str, Any],
    contender: Contender,
    blocks: Sequence[int],
    alone: dict[str, Any],
    rates: dict[str, float | None],
) -> float | None:
    """Return the planner's step of the slowest rank, the rest of the model in the blocks' share."""
    link, gather = rates["link"], rates["gather"] if contender.gathers else None
    if not contender.ours or not alone or not link or (contender.gathers and not gather):
        return None
    slowest = 0.0
    for run in alone.values():
        share = run["step_ms"] / sum(run["block_ms"])
        made = simulate(
            blocks,
            [ms * share for ms in run["block_ms"]],
            link,
            gather,
            depth=contender.settings.get("depth", 2),
            stages=contender.settings.get("stages", 2),
            residents=contender.num_residents(len(blocks)),
            size=results["ranks"] if contender.gathers else 1,
            host_blocks=results["host_blocks"],
        )
        slowest = max(slowest, made.step_ms)
    return slowest


def _rates(results: dict[str, Any], contender: Contender) -> dict[str, float | None]:
    """Return the rates that hold for a contender, of the slowest rank, in GB/s."""
    ranks = results["sections"].get("links", {}).get("ranks", {})
    link = "link_all_gb_s"
    if contender.settings.get("host") == "shared":
        link = "link_all_shared_gb_s"

    def slowest(name: str) -> float | None:
        values = [found.get(name) for found in ranks.values()]
        numbers = [value for value in values if isinstance(value, float)]
        return min(numbers) if numbers and len(numbers) == len(values) else None

    return {"link": slowest(link), "gather": slowest("gather_gb_s")}


def _streamed(contender: Contender, blocks: Sequence[int]) -> int:
    """Return the bytes of the blocks that do not stay; which ones is the planner's rule."""
    from dlo_core.residency import resident_positions

    count = contender.num_residents(len(blocks))
    stay = resident_positions(len(blocks), count) if count else frozenset()
    return sum(nbytes for place, nbytes in enumerate(blocks) if place not in stay)


def _lengths(ranks: dict[str, Any]) -> list[str]:
    found = {tokens for each in ranks.values() for tokens in each.get("runs", {})}
    return sorted(found, key=int)


def _runs(ranks: dict[str, Any], tokens: str) -> dict[str, Any]:
    """Return the runs over one length, by rank."""
    found = {rank: each.get("runs", {}).get(tokens) for rank, each in ranks.items()}
    return {rank: run for rank, run in found.items() if run is not None}


def _zero(points: Sequence[tuple[int, float]]) -> float | None:
    """Return where a falling line through the points reaches 0; None: not among them."""
    if points and points[0][1] <= 0:
        return float(points[0][0])
    for (a, high), (b, low) in pairwise(points):
        if low <= 0 < high:
            return round(a + (b - a) * high / (high - low), 1)
    return None
