"""The tables of several ranks, as Markdown; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ranks_report import WANTED, Row, crossing

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["tables"]


def tables(results: dict[str, Any], rows: Sequence[Row]) -> str:
    """Return everything as Markdown."""
    parts = [
        ", ".join(f"{key} {value}" for key, value in results["machine"].items()),
        _links_table(results),
        _steps_table(rows),
        _memory_table(results),
        _contention_table(results),
        _activity(results),
        _remarks(results, rows),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    if not lines:
        return ""
    rows = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in rows)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _links_table(results: dict[str, Any]) -> str:
    ranks = results["sections"].get("links", {}).get("ranks", {})
    names = list(dict.fromkeys(name for found in ranks.values() for name in found))
    lines = [[name, *(found.get(name) for found in ranks.values())] for name in names]
    return _table(["rate", *(f"rank {rank}" for rank in ranks)], lines)


def _steps_table(rows: Sequence[Row]) -> str:
    heads = ["section", "contender", "tokens", "step ms", "limit ms", "step / limit"]
    heads += ["simulated ms", "resident ms", "copy ms", "gather ms", "same bits"]
    heads += ["allocated GB", "reserved GB", "used GB", "energy J"]
    lines: list[list[object]] = []
    for row in rows:
        ratio = None if row.ratio is None else f"{row.ratio:.3f}"
        ms = [
            None if value is None else f"{value:.1f}"
            for value in (row.step_ms, row.limit_ms, row.simulated_ms)
        ]
        parts = [
            None if value is None else f"{value:.1f}"
            for value in (row.resident_ms, row.copy_ms, row.gather_ms)
        ]
        memory = [f"{gb:.2f}" for gb in (row.allocated_gb, row.reserved_gb, row.used_gb)]
        lines.append([row.section, row.contender, row.tokens, *ms[:2], ratio, ms[2], *parts])
        lines[-1] += [row.same_bits, *memory, row.energy_j]
    return _table(heads, lines)


def _memory_table(results: dict[str, Any]) -> str:
    """Return what the contenders hold on the host and how long they take to start."""
    heads = ["section", "contender", "host GB, all ranks (PSS)", "pinned GB, all ranks", "start s"]
    lines: list[list[object]] = []
    for section, found in results["sections"].items():
        for name, ranks in found.get("contenders", {}).items():
            each = [one for one in ranks.values() if "start_s" in one]
            if not each:
                continue
            host = [one.get("host_nbytes") for one in each]
            # What the ranks share is locked by each and there once.
            own = sum(
                max(one.get("pinned_nbytes", 0) - one.get("shared_nbytes", 0), 0) for one in each
            )
            once = max(
                min(one.get("pinned_nbytes", 0), one.get("shared_nbytes", 0)) for one in each
            )
            cells = [
                None if None in host else f"{sum(filter(None, host)) / 1e9:.2f}",
                f"{(own + once) / 1e9:.2f}",
                f"{max(one['start_s'] for one in each):.2f}",
            ]
            lines.append([section, name, *cells])
    return _table(heads, lines)


def _contention_table(results: dict[str, Any]) -> str:
    heads = [
        "beside matrix products, on rank 0",
        "ms alone",
        "ms beside",
        "GB/s",
        "products slower by",
        "right",
    ]
    lines: list[list[object]] = []
    ranks = results["sections"].get("contention", {}).get("ranks", {})
    for name, found in next(iter(ranks.values()), {}).items():
        if not isinstance(found, dict):
            lines.append([f"{name}: {found}", *[None] * 5])
            continue
        ways = {name: found} if "alone_ms" in found else found
        for way, figures in ways.items():
            label = name if way == name else f"{name}, {way.replace('_', ' ')}"
            slower = f"{(figures['slow_down'] - 1) * 100:.1f} %"
            cells = [figures["alone_ms"], figures["beside_ms"], figures.get("gb_s"), slower]
            lines.append([label, *cells, figures.get("right")])
    return _table(heads, lines)


def _activity(results: dict[str, Any]) -> str:
    """Return what the devices did in a pass, by kind, on rank 0."""
    lines = [
        f"- {name}, {tokens} tokens, a pass on rank 0: "
        + ", ".join(f"{kind} {count:g} in {ms:.2f} ms" for kind, (count, ms) in kinds.items())
        + _lane(run["activity"].get("lane", {}))
        for found in results["sections"].values()
        for name, ranks in found.get("contenders", {}).items()
        for tokens, run in ranks.get("0", {}).get("runs", {}).items()
        if (kinds := run.get("activity", {}).get("kinds"))
    ]
    return "\n".join(lines)


def _lane(lane: dict[str, float]) -> str:
    if not lane:
        return ""
    return (
        f"; the computing stream: {lane['kernels']:g} kernels in {lane['kernels_ms']:.2f} ms, "
        f"gaps {lane['gaps_ms']:.2f} ms, of which longer than 6 us {lane['long_gaps_ms']:.2f}"
    )


def _remarks(results: dict[str, Any], rows: Sequence[Row]) -> str:
    lines: list[str] = []
    for section, found in results["sections"].items():
        for key in ("skipped", "error"):
            if key in found:
                lines.append(f"- {section}: {found[key]}")
        for name, ranks in found.get("contenders", {}).items():
            for rank, each in ranks.items():
                for key in ("skipped", "errors"):
                    if key in each and rank == "0":
                        lines.append(f"- {section}, {name}: {each[key]}")
    gather = [row for row in rows if row.contender == "gather" and row.ratio is not None]
    for row in gather:
        word = "within" if row.ratio is not None and row.ratio <= WANTED else "**above**"
        lines.append(
            f"- {row.section}, gather, {row.tokens} tokens: {row.ratio:.3f} of its limit, {word} "
            f"{WANTED}"
        )
    if any(row.contender in ("local", "local_shared") for row in rows):
        points = crossing(rows)
        lines.append(
            f"- rank-local mode is within {WANTED} of gather mode from "
            f"{_cell(points['measured_tokens'])} tokens on; by the limits from "
            f"{_cell(points['limits_tokens'])}"
        )
    return "\n".join(lines)
