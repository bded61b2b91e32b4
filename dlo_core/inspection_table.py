"""The tables of an inspection, for a terminal of 80 columns or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from dlo_core.inspection_report import Inspection

__all__ = ["print_inspection"]

_STEPS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def print_inspection(found: Inspection, console: Console) -> None:
    """Print what was found."""
    console.print(Text(found.path), soft_wrap=True)
    console.print(
        f"{found.num_tensors:,} tensors, {_size(found.nbytes)} in {len(found.files)} "
        f"{'file' if len(found.files) == 1 else 'files'}: {_parts(found.dtypes)}"
    )
    if found.stacks:
        console.print(_blocks(found))
        console.print(
            f"in no block, stays on the device: {found.outside_tensors:,} tensors, "
            f"{_size(found.outside_nbytes)}"
        )
        console.print(_ranks(found))
    for title, lines, style in (
        ("would not be read", found.unread, ""),
        ("notes", found.notes, "yellow"),
        ("problems", found.problems, "bold red"),
    ):
        if lines:
            console.print(Text(f"{title}:", style=style))
            for line in lines:
                console.print(Text(f"  {line}"))
    if not found.problems:
        fits = f"; it fits {found.model}" if found.model else ""
        console.print(f"no problems{fits}")


def _blocks(found: Inspection) -> Table:
    table = Table(title="blocks", title_justify="left")
    for column in ("stack", "blocks", "tensors", "each", "dtypes of each"):
        right = column in ("tensors", "each")
        table.add_column(column, overflow="fold", justify="right" if right else "left")
    for stack in found.stacks:
        for number, layout in enumerate(stack.layouts):
            table.add_row(
                Text(stack.name) if number == 0 else "",
                f"{len(layout.numbers)} ({_ranges(layout.numbers)})",
                str(layout.num_tensors),
                _size(layout.nbytes),
                _parts(layout.dtypes),
            )
    return table


def _ranks(found: Inspection) -> Table:
    table = Table(title="bytes a rank, in gather mode", title_justify="left")
    for column in ("ranks", "host", "slots (2)", "stages (2)", "device, all"):
        table.add_column(column, justify="right")
    for row in found.ranks:
        device = row.slots_nbytes + row.stages_nbytes + found.outside_nbytes
        sizes = (row.host_nbytes, row.slots_nbytes, row.stages_nbytes, device)
        table.add_row(str(row.ranks), *map(_size, sizes))
    return table


def _size(nbytes: int) -> str:
    for step, unit in _STEPS:
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes} B"


def _parts(dtypes: dict[str, int]) -> str:
    return ", ".join(f"{name} {_size(nbytes)}" for name, nbytes in dtypes.items()) or "nothing"


def _ranges(numbers: Sequence[str]) -> str:
    """Return ``0-3, 7`` for the numbers of blocks."""
    runs: list[list[str]] = []
    for number in numbers:
        last = runs[-1][-1] if runs else ""
        if number.isdigit() and last.isdigit() and int(number) == int(last) + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
