"""The run: ``dlo demo`` from its options to its exit code."""

from __future__ import annotations

import json
import tempfile
import time
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from dlo_core.config import OffloadConfig
from dlo_core.demo.job import Job
from dlo_core.demo.launch import RankError, run_ranks
from dlo_core.demo.pictures import PicturesUnavailable, write_digits, write_timeline
from dlo_core.demo.proof import find_differences
from dlo_core.demo.report import Report
from dlo_core.errors import BackendError, ConfigError
from dlo_core.registry import get_backend

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlo_core.demo.result import RankResult, Step

__all__ = ["demo"]

LIMIT_S = 180.0
FAILED = 1
MISUSED = 2


def demo(
    ranks: int, depth: int, use_allgather: bool, out: Path, json: bool, *, device: str = "cpu"
) -> int:
    """Run the demo and return the exit code.

    Args:
        ranks: Processes of the group, at least 1.
        depth: Slots on the device, at least 2.
        use_allgather: Whether to run gather mode before rank-local mode.
        out: Folder of the pictures; made when it is not there.
        json: Whether to print JSON instead of the table; all else then goes to standard error.
        device: Where blocks compute.

    Returns:
        0 when every image of every rank and mode is bit-identical to the resident run; 1 when one
        is not or a rank failed; 2 when an option cannot be honoured.
    """
    console = Console(stderr=json, highlight=False)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        job = check_options(ranks, depth, use_allgather, out, device)
    except (ConfigError, BackendError) as error:
        errors.print(f"dlo demo: {error}", markup=False, style="red")
        return MISUSED
    console.print(introduction(job), markup=False)
    start = time.monotonic()
    try:
        results = run_with_progress(job, console)
    except RankError as error:
        # Ranks that fail alike have the same traceback; once is enough.
        for text in dict.fromkeys(error.tracebacks):
            errors.print(text, markup=False, style="dim")
        errors.print(f"dlo demo: {error}", markup=False, style="red")
        return FAILED
    seconds = time.monotonic() - start
    differences = find_differences(results)
    files = write_pictures(job, results, out, console)
    report = Report(job, results, differences, files, seconds)
    show(report, console, as_json=json)
    for difference in differences:
        errors.print(f"dlo demo: {difference}", markup=False, style="red")
    return FAILED if differences else 0


def check_options(
    ranks: int, depth: int, use_allgather: bool, out: Path, device: str = "cpu"
) -> Job:
    """Return the job.

    Raises:
        ConfigError: An option cannot be honoured; nothing was started.
        BackendError: A rank has no device.
    """
    if ranks < 1:
        raise ConfigError(f"--ranks must be at least 1; got {ranks}")
    OffloadConfig(depth=depth, use_allgather=use_allgather)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(f"--out must be a folder that can be written to: {error}") from error
    job = Job(ranks=ranks, depth=depth, use_allgather=use_allgather, device=device)
    if ranks > 1 and job.device_of(0) == job.device_of(1) != "cpu":
        raise ConfigError(
            f"--device {device} is one device, and --ranks is {ranks}: each rank needs one of its "
            f"own; give --device {device.partition(':')[0]}"
        )
    for rank in range(ranks):
        get_backend(job.device_of(rank))
    return job


def introduction(job: Job) -> str:
    """Return what is about to happen."""
    who = "One rank draws" if job.ranks == 1 else f"{job.ranks} ranks draw"
    modes = " and in ".join(job.streamed_modes)
    return (
        f"{who} {job.num_images} digits each on {job.device} with a trained diffusion transformer: "
        f"first with all weights resident, then in {modes} mode, its blocks streaming through "
        f"{job.depth} slots. "
        "Every image must come out the same, bit for bit.\n"
    )


def run_with_progress(job: Job, console: Console) -> tuple[RankResult, ...]:
    """Run all ranks beside one progress bar for each."""
    columns = (
        TextColumn("rank {task.fields[rank]}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [
            progress.add_task("starting", total=job.total_steps, rank=rank)
            for rank in range(job.ranks)
        ]

        def on_step(step: Step) -> None:
            progress.update(bars[step.rank], advance=1, description=f"{step.mode:10}")

        return run_ranks(job, limit_s=LIMIT_S, on_step=on_step)


def write_pictures(
    job: Job, results: Sequence[RankResult], out: Path, console: Console
) -> tuple[str, ...]:
    """Write both pictures and return their paths; without matplotlib say how to get it."""
    digits, timeline = out / "digits.png", out / "timeline.png"
    runs = [result.streamed[0] for result in results]
    try:
        write_digits(
            [torch.from_numpy(run.images) for run in runs],
            [job.labels(result.rank) for result in results],
            digits,
        )
        write_timeline(runs[0].spans, timeline)
    except (PicturesUnavailable, OSError) as error:
        # The proof does not depend on pictures.
        console.print(f"no pictures: {error}", markup=False, style="yellow")
        return ()
    return (str(digits), str(timeline))


def show(report: Report, console: Console, *, as_json: bool) -> None:
    """Print the report."""
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
        return
    console.print(report.table())
    for file in report.files:
        console.print(f"wrote {file}", markup=False)
