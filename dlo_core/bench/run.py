"""The run: ``dlo probe`` and ``dlo bench`` from their options to their exit codes."""

from __future__ import annotations

import json as json_
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from dlo_core.bench.job import BenchJob
from dlo_core.bench.launch import RankError, run_ranks
from dlo_core.bench.measure import measure_resident, measure_streamed
from dlo_core.bench.model import Shape
from dlo_core.bench.plot import PlotUnavailable, write_plot
from dlo_core.bench.probe import Rates, probe_rank
from dlo_core.bench.report import BenchReport, probe_table
from dlo_core.errors import ConfigError, DloError
from dlo_core.registry import device_type, get_backend, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

__all__ = [
    "bench",
    "changed",
    "default_device",
    "default_job",
    "parse_settings",
    "parse_tokens",
    "probe",
]

FAILED, MISUSED = 1, 2
_LARGE = Shape(width=3072, num_heads=24, num_blocks=40)
_SMALL = Shape(width=256, num_heads=4, num_blocks=8, dtype="float32")


def default_device() -> str:
    """Return the first usable device that is no CPU, else the CPU."""
    usable = [status.name for status in installed() if status.reason is None]
    return next((name for name in usable if name != "cpu"), "cpu")


def default_job(device: str) -> BenchJob:
    """Return what is measured when nothing is said: large blocks, or small ones on a CPU."""
    if device_type(device) == "cpu":
        return BenchJob(_SMALL, tokens=(16, 256))
    return BenchJob(_LARGE, tokens=(4096, 10240, 24576), num_passes=6)


def parse_settings(given: Sequence[str]) -> dict[str, Any]:
    """Return ``NAME=VALUE`` pairs as settings; a value is JSON, or else a string.

    Raises:
        ConfigError: A pair has no ``=``.
    """
    settings = {}
    for pair in given:
        name, found, value = pair.partition("=")
        if not found:
            raise ConfigError(f"--setting must be NAME=VALUE; got {pair!r}")
        try:
            settings[name.replace("-", "_")] = json_.loads(value)
        except ValueError:
            settings[name.replace("-", "_")] = value
    return settings


def parse_tokens(given: str | None) -> tuple[int, ...] | None:
    """Return lengths written with commas between.

    Raises:
        ConfigError: One is no number.
    """
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise ConfigError(f"--tokens must be lengths such as 4096,10240; got {given!r}") from None


def probe(
    device: str | None, *, ranks: int, size_mb: int | None, json: bool, limit_s: float = 300.0
) -> int:
    """Measure the machine's rates and print them; return the exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        device = device or default_device()
        _check(device, ranks)
        small = device_type(device) == "cpu"
        nbytes = (size_mb or (64 if small else 1024)) * 1_000_000
        if nbytes < 1:
            raise ConfigError(f"--size-mb must be at least 1; got {size_mb}")
        steps = 3 + 2 * (ranks > 1)
        rates: list[Rates] = _with_bars(
            errors,
            lambda tell: run_ranks(
                probe_rank,
                (nbytes, 512 if small else 8192),
                device=device,
                ranks=ranks,
                limit_s=limit_s,
                on_tell=tell,
            ),
            ranks=ranks,
            steps=steps,
        )
    except DloError as error:
        errors.print(f"dlo probe: {error}", markup=False, style="red")
        return FAILED if isinstance(error, RankError) else MISUSED
    if json:
        print(json_.dumps({"device": device, "ranks": [asdict(each) for each in rates]}, indent=2))
    else:
        Console(highlight=False).print(probe_table(rates))
    return 0


def bench(
    device: str | None,
    change: Callable[[BenchJob], BenchJob],
    *,
    ranks: int,
    out: Path | None,
    json: bool,
    limit_s: float = 1200.0,
) -> int:
    """Run a model resident and streamed, print how they compare, and return the exit code.

    Args:
        device: Where; None: the first usable one.
        change: Makes the job of the device's default one.
        ranks: Processes, which shard the weights.
        out: Folder of the plot; None: no plot.
        json: Whether to print JSON instead of the table.
        limit_s: After so many seconds each of the two runs is given up.

    Returns:
        0 when all bits are the resident run's; 1 when one is not or a rank failed; 2 when an option
        cannot be honoured.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        device = device or default_device()
        _check(device, ranks)
        job = change(default_job(device))
        report = _measure(device, job, ranks=ranks, limit_s=limit_s, console=errors)
    except DloError as error:
        errors.print(f"dlo bench: {error}", markup=False, style="red")
        return FAILED if isinstance(error, RankError) else MISUSED
    file = None if out is None else _plot(report, out, errors)
    if json:
        print(json_.dumps(report.to_dict() | {"device": device, "plot": file}, indent=2))
    else:
        console = Console(highlight=False)
        for line in report.lines():
            console.print(line, markup=False)
        console.print(*report.tables(), sep="\n")
        if file:
            console.print(f"wrote {file}", markup=False)
    if not report.bit_identical:
        errors.print("dlo bench: the streamed outputs differ from the resident ones", style="red")
    return 0 if report.bit_identical else FAILED


def _measure(
    device: str, job: BenchJob, *, ranks: int, limit_s: float, console: Console
) -> BenchReport:
    # A wait that blocks the host lets every pass be told of; else the passes are queued at once.
    tells = job.num_passes if get_backend(device).capabilities.host_blocks else 1

    def work(tell: Callable[[int, str], None]) -> BenchReport:
        resident, streamed = (
            run_ranks(measure, (job,), device=device, ranks=ranks, limit_s=limit_s, on_tell=tell)
            for measure in (measure_resident, measure_streamed)
        )
        return BenchReport(job, resident, streamed)

    report: BenchReport = _with_bars(
        console, work, ranks=ranks, steps=2 * tells * len(job.runs) + 3
    )
    return report


def _with_bars(
    console: Console,
    work: Callable[[Callable[[int, str], None]], Any],
    *,
    ranks: int,
    steps: int,
) -> Any:
    """Run ``work`` beside one progress bar for each rank."""
    columns = (
        TextColumn("rank {task.fields[rank]}"),
        BarColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bars = [progress.add_task("starting", total=steps, rank=rank) for rank in range(ranks)]
        return work(lambda rank, what: progress.update(bars[rank], advance=1, description=what))


def _check(device: str, ranks: int) -> None:
    if ranks < 1:
        raise ConfigError(f"--ranks must be at least 1; got {ranks}")
    get_backend(device)


def _plot(report: BenchReport, out: Path, errors: Console) -> str | None:
    path = out / "bench.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_plot(report.rows, report.lines()[0], path)
    except (PlotUnavailable, OSError) as error:
        # The figures do not depend on the picture.
        errors.print(f"no plot: {error}", markup=False, style="yellow")
        return None
    return str(path)


def changed(job: BenchJob, shape: dict[str, Any], rest: dict[str, Any]) -> BenchJob:
    """Return ``job`` with those values that are not None put in."""
    shape = {name: value for name, value in shape.items() if value is not None}
    rest = {name: value for name, value in rest.items() if value is not None}
    return replace(job, shape=replace(job.shape, **shape), **rest)
