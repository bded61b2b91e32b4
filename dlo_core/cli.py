"""The command ``dlo``: what a machine can do, who shares weights, and a demonstration."""

from __future__ import annotations

import json as json_
import platform
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from dlo_core._version import __version__
from dlo_core.config import OffloadConfig
from dlo_core.errors import ConfigError
from dlo_core.interface import Backend, MemoryInfo
from dlo_core.parallel import Sizes
from dlo_core.registry import BackendStatus, installed
from dlo_core.topology_report import report_all

__all__ = ["app", "main"]

app = typer.Typer(
    name="dlo",
    help="Distributed Layerwise Offload for diffusion transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_GB = 1e9


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"dlo {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Distributed Layerwise Offload for diffusion transformers."""


@app.command()
def info(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the backends that are installed, whether each can be used, and memory."""
    statuses = installed()
    if json:
        typer.echo(json_.dumps(_info(statuses), indent=2))
        return
    console = Console()
    console.print(_backends_table(statuses))
    for status in statuses:
        if settings := _settings_of(status.backend):
            console.print(_settings_table(status.name, settings))
    memory = psutil.virtual_memory()
    console.print(
        f"host memory: {memory.available / _GB:.1f} GB available of {memory.total / _GB:.1f} GB\n"
        f"dlo {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )


def _backends_table(statuses: tuple[BackendStatus, ...]) -> Table:
    table = Table(title="backends", title_justify="left")
    for column in ("device", "usable", "from", "memory free / total", "comm library", "reason"):
        table.add_column(column, overflow="fold")
    for status in statuses:
        memory = comm = "-"
        if status.backend is not None:
            now = _memory_of(status.backend)
            if now is not None:
                memory = f"{now.free / _GB:.1f} / {now.total / _GB:.1f} GB"
            comm = status.backend.comm_library
        usable = "yes" if status.reason is None else "no"
        table.add_row(status.name, usable, status.distribution, memory, comm, status.reason or "-")
    return table


def _settings_table(name: str, settings: dict[str, str]) -> Table:
    table = Table(title=f"settings of {name}", title_justify="left", show_header=False)
    for row in settings.items():
        table.add_row(*row)
    return table


def _settings_of(backend: Backend | None) -> dict[str, str]:
    """Return a backend's settings, or none: a table of backends must not fail by one of them."""
    try:
        return {} if backend is None else dict(backend.settings())
    except Exception as error:
        return {"settings": f"cannot be read: {type(error).__name__}: {error}"}


def _info(statuses: tuple[BackendStatus, ...]) -> dict[str, Any]:
    memory = psutil.virtual_memory()
    return {
        "dlo": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host_memory": {"available_nbytes": memory.available, "total_nbytes": memory.total},
        "backends": [_backend_info(status) for status in statuses],
    }


def _backend_info(status: BackendStatus) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": status.name,
        "distribution": status.distribution,
        "usable": status.reason is None,
        "reason": status.reason,
    }
    if status.backend is not None:
        now = _memory_of(status.backend)
        facts["device"] = str(status.backend.device)
        facts["comm_library"] = status.backend.comm_library
        facts["pinned_memory"] = status.backend.capabilities.pinned_memory
        facts["settings"] = _settings_of(status.backend)
        if now is not None:
            facts["memory"] = {"free_nbytes": now.free, "total_nbytes": now.total}
    return facts


def _memory_of(backend: Backend) -> MemoryInfo | None:
    """Return the device's memory, or None: a table of backends must not fail by one of them."""
    try:
        return backend.memory()
    except Exception:
        return None


@app.command()
def demo(
    ranks: Annotated[int, typer.Option(help="Processes that shard the weights.")] = 2,
    depth: Annotated[int, typer.Option(help="Slots on the device, at least 2.")] = 2,
    use_allgather: Annotated[
        bool,
        typer.Option(
            "--use-allgather/--no-use-allgather",
            help="Run gather mode and then rank-local mode, or rank-local mode only.",
        ),
    ] = True,
    *,
    device: Annotated[
        str, typer.Option(help="Where blocks compute, by torch's name; each rank takes one.")
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for digits.png and timeline.png.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Draw digits with a trained diffusion transformer, streamed, and prove that no bit changed."""
    from dlo_core.demo.run import demo as run_demo

    raise typer.Exit(run_demo(ranks, depth, use_allgather, out, json, device=device))


@app.command()
def topology(
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    sp: Annotated[int, typer.Option(help="Sequence-parallel ranks.")] = 1,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    hsdp: Annotated[
        str, typer.Option(metavar="RxS", help="Replicas of fully_shard x ranks that shard one.")
    ] = "1x1",
    use_allgather: Annotated[
        bool,
        typer.Option(
            "--use-allgather/--no-use-allgather",
            help="Share the weights where the rules say so, or nowhere.",
        ),
    ] = True,
    shard_within: Annotated[
        str | None, typer.Option(metavar="node", help="Share them within a node only.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Neighbouring ranks on one node; all of them if left out.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show which ranks of a job would share weights with which, and why; starts no process.

    The exit status is 1 when the combination is rejected.
    """
    try:
        config = OffloadConfig(use_allgather=use_allgather, shard_within=shard_within)
        report = report_all(
            Sizes(dp, sp, tp, _pair(hsdp)),
            use_allgather=config.use_allgather,
            shard_within=config.shard_within,
            ranks_per_node=ranks_per_node,
        )
    except ConfigError as error:
        rejected = {"mode": "rejected", "reason": str(error)}
        typer.echo(json_.dumps(rejected, indent=2) if json else f"rejected: {error}")
        raise typer.Exit(1) from None
    typer.echo(json_.dumps(report.to_dict(), indent=2) if json else str(report))
    raise typer.Exit(int(report.mode == "rejected"))


def _pair(text: str) -> tuple[int, int]:
    """Return the two sizes of a text like ``2x4``."""
    left, x, right = text.partition("x")
    if not (x and left.isdecimal() and right.isdecimal()):
        raise ConfigError(f"--hsdp must be replicas x shards, as in 2x4; got {text!r}")
    return int(left), int(right)


@app.command()
def inspect(
    checkpoint: Annotated[
        Path, typer.Argument(help="A safetensors file, a folder with one or several, or an index.")
    ],
    ranks: Annotated[
        list[int] | None,
        typer.Option(help="Size of a group; may be given several times.  [default: 1, 2, 4, 8]"),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(help="Name of a container of blocks; may be given several times."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Class in diffusers, built from the folder's config.json to compare."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a checkpoint holds: blocks, layouts, dtypes, bytes a rank, and problems.

    Reads headers only. The exit status is 1 when the checkpoint cannot be loaded.
    """
    from dlo_core.errors import ConfigError
    from dlo_core.inspection import inspect_checkpoint
    from dlo_core.inspection_table import print_inspection

    try:
        found = inspect_checkpoint(
            checkpoint, ranks=tuple(ranks or (1, 2, 4, 8)), blocks=tuple(blocks or ()), model=model
        )
    except ConfigError as error:
        typer.echo(f"dlo inspect: {error}", err=True)
        raise typer.Exit(2) from error
    if json:
        typer.echo(json_.dumps(found.to_dict(), indent=2))
    else:
        print_inspection(found, Console())
    raise typer.Exit(1 if found.problems else 0)


@app.command()
def pack(
    checkpoint: Annotated[
        Path, typer.Argument(help="A safetensors file, a folder with one or several, or an index.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="The packed copy; beside the source if left out.")
    ] = None,
    *,
    device: Annotated[str, typer.Option(help="Where the tensors are coded.")] = "cpu",
    verify: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Decode each tensor and compare.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Write a packed copy of a checkpoint: two thirds of the bytes where it is bf16, and every bit.

    Nothing is replaced. The exit status is 1 when the copy could not be written.
    """
    from dlo_core.errors import DloError
    from dlo_core.pack import pack_checkpoint

    try:
        made = pack_checkpoint(checkpoint, out, device=device, verify=verify, progress=True)
    except DloError as error:
        typer.echo(f"dlo pack: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    if json:
        typer.echo(json_.dumps(made.to_dict(), indent=2))
        return
    typer.echo(
        f"{made.path}: {made.num_packed} of {made.num_tensors} tensors packed, "
        f"{made.nbytes / _GB:.3f} GB in {made.packed_nbytes / _GB:.3f} GB ({made.ratio:.3f})"
        + (", each decoded and compared" if made.verified else "")
    )


@app.command()
def probe(
    device: Annotated[
        str | None, typer.Option(help="Kind of device, or one device; the first usable one.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that copy and gather together.")] = 1,
    size_mb: Annotated[
        int | None, typer.Option("--size-mb", help="Megabytes of each copy.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure what this machine's links, memory and arithmetic do."""
    from dlo_core.bench.run import probe as run_probe

    raise typer.Exit(run_probe(device, ranks=ranks, size_mb=size_mb, json=json))


@app.command()
def bench(
    *,
    device: Annotated[
        str | None, typer.Option(help="Kind of device, or one device; the first usable one.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Processes that shard the weights.")] = 1,
    width: Annotated[int | None, typer.Option(help="Features of a token.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Whole blocks.")] = None,
    half_blocks: Annotated[
        int | None, typer.Option(help="Blocks of half the size after each whole one.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(help="Lengths, with commas between; a row of the table each.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="module:function that returns (model, args, kwargs), on the host.")
    ] = "",
    passes: Annotated[int | None, typer.Option(help="Passes that are timed.")] = None,
    depth: Annotated[int, typer.Option(help="Slots on the device, at least 2.")] = 2,
    stages: Annotated[int, typer.Option(help="Stages of gather mode; 0 gathers in place.")] = 2,
    gather_by: Annotated[
        str, typer.Option(help="What gathers: kernels of the comm library, or copies.")
    ] = "kernels",
    use_allgather: Annotated[
        bool, typer.Option("--use-allgather/--no-use-allgather", help="Shard the weights.")
    ] = True,
    resident_layers: Annotated[
        str | None, typer.Option(help="Blocks that stay on the device: a number, or auto.")
    ] = None,
    resident_placement: Annotated[
        str, typer.Option(help="Which ones: spread evenly, or leading.")
    ] = "spread",
    device_budget_bytes: Annotated[
        int | None, typer.Option(help="The most bytes of weights on the device; auto fills them.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of any other setting; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for bench.png; none: no plot.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time a model with streamed weights against the machine's limits, and compare the bits."""
    from dlo_core.bench import run
    from dlo_core.bench.job import BenchJob

    def change(job: BenchJob) -> BenchJob:
        settings = {
            "depth": depth,
            "stages": stages,
            "gather_by": gather_by,
            "use_allgather": use_allgather,
            "resident_placement": resident_placement,
            "device_budget_bytes": device_budget_bytes,
        }
        if resident_layers is not None:
            settings |= run.parse_settings([f"resident_layers={resident_layers}"])
        return run.changed(
            job,
            {
                "width": width,
                "num_heads": heads,
                "num_blocks": blocks,
                "num_half_blocks": half_blocks,
            },
            {
                "tokens": run.parse_tokens(tokens),
                "num_passes": passes,
                "model": model,
                "settings": settings | run.parse_settings(setting or ()),
            },
        )

    raise typer.Exit(run.bench(device, change, ranks=ranks, out=out, json=json))


def main() -> None:
    """Run the command line."""
    app()
