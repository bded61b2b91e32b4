"""Steps: a pass against the limits of the machine, and device memory against what it must be."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checks import Findings, Options

__all__ = ["equal", "residents", "unequal"]

_GB = 1e9


def equal(options: Options, found: Findings) -> None:
    """Run 40 equal blocks of 340 MB at 4k, 10k and 24k tokens."""
    report, resident = _bench(options, halves=0, tokens=(4096, 10240, 24576))
    _steps(found, report, bound="bound_ms", limit=1.01)
    _memory(found, report, resident)


def unequal(options: Options, found: Findings) -> None:
    """Run 19 blocks of 340 MB with two of 170 MB after each, against the simulation."""
    report, resident = _bench(options, halves=2, tokens=(4096, 10240))
    _steps(found, report, bound="simulated_ms", limit=1.02)
    _memory(found, report, resident)


def residents(options: Options, found: Findings) -> None:
    """Keep 10, 20 and 28 of 40 blocks on the device, evenly spread."""
    counts = (1, 2) if options.small else (10, 20, 28)
    tokens, alone = (4096, 10240), None
    for count in counts:
        report, alone = _bench(
            options, halves=0, tokens=tokens, resident=alone, settings={"resident_layers": count}
        )
        rank = report.streamed[0]
        num = len(rank.blocks_nbytes)
        rest_ms = sum(rank.blocks_nbytes) * (num - count) / num / rank.link_gb_s / 1e6
        for row, limit in zip(report.rows, (1.015, 1.025), strict=True):
            name = f"step / max(T_c, T_x ({num} - {count}) / {num}), {row.tokens} tokens"
            figures = dataclasses.asdict(row) | {"rest_ms": rest_ms}
            found.note(**{f"row {count} {row.tokens}": figures})
            ratio = row.step_ms / max(row.compute_ms, rest_ms)
            found.at_most(name, ratio, _slack(options, limit))
        found.true(f"same bits, {count} residents", report.bit_identical)
        _memory(found, report, alone, what=f"slots + {count} residents + activations")


def _bench(
    options: Options,
    *,
    halves: int,
    tokens: tuple[int, ...],
    settings: dict[str, Any] | None = None,
    resident: Any = None,
) -> tuple[Any, Any]:
    """Measure in processes of their own; return the report and the resident runs."""
    from dlo_core.bench.job import BenchJob
    from dlo_core.bench.launch import run_ranks
    from dlo_core.bench.measure import measure_resident, measure_streamed
    from dlo_core.bench.model import Shape
    from dlo_core.bench.report import BenchReport

    num = 19 if halves else 40
    shape = Shape(3072, 24, num, halves)
    if options.small:
        shape, tokens = Shape(64, 4, 4, halves, "float32"), (8, 32)
    job = BenchJob(shape, tokens, settings or {}, num_passes=3 if options.small else 8)
    run = partial(run_ranks, device=options.device, limit_s=options.limit_s)
    resident = resident or run(measure_resident, (job,))
    return BenchReport(job, resident, run(measure_streamed, (job,))), resident


def _steps(found: Findings, report: Any, *, bound: str, limit: float) -> None:
    found.note(about=report.lines())
    for row in report.rows:
        found.note(**{f"row {row.tokens}": dataclasses.asdict(row) | {"bound_ms": row.bound_ms}})
        ratio = row.step_ms / getattr(row, bound)
        found.at_most(f"step / {bound}, {row.tokens} tokens", ratio, _slack(found.options, limit))
    found.true("same bits", report.bit_identical)


def _slack(options: Options, limit: float) -> float:
    """A tiny model on a CPU shows that the figures come out, not how good they are."""
    return 1000.0 if options.small else limit


def _memory(found: Findings, report: Any, resident: Any, what: str = "slots + activations") -> None:
    rank = report.streamed[0]
    weights = rank.host_nbytes
    found.note(
        pinned_gb=rank.pinned_nbytes / _GB,
        weights_gb=weights / _GB,
        enable_s=rank.enable_s,
        enable_gb_s=weights / rank.enable_s / _GB,
    )
    if found.options.cuda:
        found.at_most("pinned / weights", rank.pinned_nbytes / weights, 1.01)
        found.at_least("pinned / weights, all of it", rank.pinned_nbytes / weights, 1.0)
    whole = sum(rank.blocks_nbytes)
    rest = rank.device_nbytes - rank.ring_nbytes - rank.residents_nbytes
    for alone, row in zip(resident[0], report.rows, strict=True):
        activations = max(alone.reserved_nbytes - whole - rest, 0)
        allowed = rank.device_nbytes + activations
        found.note(
            **{
                f"memory {row.tokens}, {what}": {
                    "allocated_gb": row.allocated_nbytes / _GB,
                    "reserved_gb": row.reserved_nbytes / _GB,
                    "resident_reserved_gb": alone.reserved_nbytes / _GB,
                    "weights_on_device_gb": rank.device_nbytes / _GB,
                    "activations_gb": activations / _GB,
                }
            }
        )
        if found.options.cuda:
            name = f"reserved / ({what}), {row.tokens} tokens"
            found.at_most(name, row.reserved_nbytes / allowed, 1.05)
