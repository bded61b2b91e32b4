"""The command ``dlo``: what a machine can do, and a demonstration."""

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
from dlo_core.interface import Backend, MemoryInfo
from dlo_core.registry import BackendStatus, installed

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
        str, typer.Option(help="Where blocks compute: cpu, cuda, npu; each rank takes one.")
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder for digits.png and timeline.png.")] = Path(),
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Draw digits with a trained diffusion transformer, streamed, and prove that no bit changed."""
    from dlo_core.demo.run import demo as run_demo

    raise typer.Exit(run_demo(ranks, depth, use_allgather, out, json, device=device))


def main() -> None:
    """Run the command line."""
    app()
