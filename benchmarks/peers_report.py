"""The report of a comparison: tables, pictures, and whether the bits are the resident run's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["compare", "plot", "summary", "table"]

_SAME = {True: "yes", False: "**no**", None: "?"}


def compare(found: dict[str, Any], resident: dict[str, Any]) -> None:
    """Add whether every pass of every length gave the resident run's bits; None: not known."""
    if found.get("runs"):
        known = resident.get("runs", {})
        same = {
            tokens: run["digests"] == known[tokens]["digests"] and len(run["digests"]) == 1
            for tokens, run in found["runs"].items()
            if tokens in known
        }
        unknown = None if same.keys() != found["runs"].keys() else True
        found["bit_identical"] = unknown if all(same.values()) else False


def summary(found: dict[str, Any]) -> str:
    """Return one line about a contender."""
    if "runs" not in found or not found["runs"]:
        end = found.get("log", "").strip().splitlines()[-1:]
        return " ".join([found.get("skipped") or found.get("error", "?"), *end])
    steps = ", ".join(f"{tokens}: {run['step_ms']} ms" for tokens, run in found["runs"].items())
    error = f"; {found['error']}" if "error" in found else ""
    same = _SAME[found.get("bit_identical")]
    return f"{steps}; same bits: {same}; {found.get('seconds', '?')} s{error}"


def table(results: dict[str, Any], lengths: list[int]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| contender | "
        + " | ".join(f"{tokens} tokens, ms (× limit)" for tokens in lengths)
        + " | peak allocated / reserved GB | pinned GB | host added GB | set-up s | same bits |",
        "|---|" + "---|" * (len(lengths) + 5),
    ]
    limits = limits_ms(results)
    for name, found in results["contenders"].items():
        if not found.get("runs"):
            rows.append(f"| {name} | {summary(found)[:200]} |" + " |" * (len(lengths) + 4))
            continue
        cells = [name]
        for tokens in map(str, lengths):
            run = found["runs"].get(tokens)
            ratio = f" ({run['step_ms'] / limits[tokens]:.3f})" if run and tokens in limits else ""
            cells.append(f"{run['step_ms']:.1f}{ratio}" if run else "–")
        peaks = [
            f"{run['allocated_gb']:.2f} / {run['reserved_gb']:.2f}"
            for run in found["runs"].values()
            if "allocated_gb" in run
        ]
        cells += [peaks[-1] if peaks else "–"]
        cells += [str(found.get(key, "–")) for key in ("pinned_gb", "host_added_gb", "setup_s")]
        cells.append(_SAME[found.get("bit_identical")])
        rows.append("| " + " | ".join(cells) + " |")
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    limit = "The limit is the longer of a resident step and of the link's time for all blocks: "
    limit += ", ".join(f"{tokens} tokens {ms:.1f} ms" for tokens, ms in limits.items())
    earlier = [
        f"{name}: measured {found['from']}, at least in part"
        for name, found in results["contenders"].items()
        if "from" in found
    ]
    end = [*against_peers(results, lengths), *earlier]
    return "\n".join([about, "", limit, "", *rows, "", *end, ""])


def limits_ms(results: dict[str, Any]) -> dict[str, float]:
    """Return what no offload of all blocks can beat, by length."""
    resident = results["contenders"].get("resident", {})
    if "link_gb_s" not in resident:
        return {}
    copy_ms = resident["blocks_gb"] / resident["link_gb_s"] * 1e3
    return {tokens: max(run["step_ms"], copy_ms) for tokens, run in resident["runs"].items()}


def against_peers(results: dict[str, Any], lengths: list[int]) -> list[str]:
    """Return dlo's step against the fastest peer's, a line for each length."""
    lines = []
    for tokens in map(str, lengths):
        steps = {
            name: found["runs"][tokens]["step_ms"]
            for name, found in results["contenders"].items()
            if found.get("runs", {}).get(tokens)
        }
        peers = {k: v for k, v in steps.items() if k != "resident" and not k.startswith("dlo")}
        if "dlo" in steps and peers:
            best = min(peers, key=lambda name: peers[name])
            lines.append(
                f"{tokens} tokens: dlo takes {steps['dlo'] / peers[best]:.3f} of the fastest "
                f"peer's time ({best})"
            )
    return lines


def plot(results: dict[str, Any], lengths: list[int], path: Path) -> str:
    """Draw every contender's step as a multiple of the limit; return what came of it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no picture: {error}"
    limits = limits_ms(results)
    rows = {
        name: found["runs"]
        for name, found in results["contenders"].items()
        if found.get("runs") and name != "resident"
    }
    if not rows or not limits:
        return "no picture: nothing was measured"
    figure = Figure(figsize=(9.0, 0.6 * len(rows) + 1.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(lengths)
    for index, tokens in enumerate(map(str, lengths)):
        places, values = [], []
        for place, runs in enumerate(rows.values()):
            if tokens in runs and tokens in limits:
                places.append(place + index * height - 0.4 + height / 2)
                values.append(runs[tokens]["step_ms"] / limits[tokens])
        bars = axes.barh(places, values, height, label=f"{tokens} tokens")
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=7)
    axes.axvline(1.0, color="0.3", lw=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlabel("step / max(resident step, time of the link for all blocks)")
    axes.legend()
    figure.savefig(path)
    return f"wrote {path}"
