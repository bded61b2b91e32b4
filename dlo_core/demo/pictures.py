"""The pictures that the demo writes: the drawn digits, and the timeline of one pass.

matplotlib is optional; it is imported here, late.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from torch.nn import functional

from dlo_core._install import install_command
from dlo_core.errors import DloError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from dlo_core.trace import Span

__all__ = ["PicturesUnavailable", "write_digits", "write_timeline"]

# From the top down. Waiting is drawn in the lane of what waits.
LANES = ("compute", "gather", "copy")
WAIT_COLOR = "#d62728"
FEWEST_MS = 1e-6


class PicturesUnavailable(DloError):
    """Raised when matplotlib is not installed; the message says how to get it."""


def write_digits(images: Sequence[Tensor], labels: Sequence[Tensor], path: Path) -> None:
    """Write a contact sheet: a row of digits for each rank, each under its label.

    Args:
        images: For each rank ``[n, size, size]``, -1 for paper and 1 for ink.
        labels: For each rank ``[n]``, what was asked for.
        path: The PNG file.

    Raises:
        PicturesUnavailable: matplotlib is not installed.
    """
    columns = max(len(drawn) for drawn in images)
    figure = new_figure(0.72 * columns + 1.0, 1.02 * len(images) + 0.55)
    figure.suptitle("Digits drawn through streamed weights", fontsize=12)
    grid = figure.subplots(len(images), columns, squeeze=False)
    for rank, (row, drawn, wanted) in enumerate(zip(grid, images, labels, strict=True)):
        for axes in row:
            axes.set_axis_off()
        for axes, image, label in zip(row, drawn, wanted.tolist(), strict=False):
            paper = functional.pad(image, (1, 1, 1, 1), value=-1.0)
            axes.imshow(paper.numpy(), cmap="gray_r", vmin=-1, vmax=1, interpolation="bicubic")
            axes.set_title(str(label), fontsize=10, color="#1f5fa8", pad=2)
        row[0].text(
            -0.35, 0.5, f"rank {rank}", transform=row[0].transAxes, fontsize=10, rotation=90,
            ha="center", va="center",
        )  # fmt: skip
    save(figure, path)


def write_timeline(spans: Sequence[Span], path: Path) -> None:
    """Write the lanes of one pass, coloured by block, with the time that compute waited.

    Args:
        spans: What each lane did; the lanes are compute, wait, copy and gather.
        path: The PNG file.

    Raises:
        PicturesUnavailable: matplotlib is not installed.
    """
    figure = new_figure(12.0, 4.4)
    axes = figure.subplots()
    colors = block_colors(spans)
    lanes = [lane for lane in LANES if lane == "compute" or total_ms(spans, lane)]
    for row, lane in enumerate(lanes):
        for span in spans:
            if span.lane == lane:
                draw_span(axes, row, span, color=colors[span.block])
    for span in spans:
        if span.lane == "wait":
            draw_wait(axes, span)
    end = pass_end_ms(spans)
    axes.axvline(end, color="0.35", lw=0.9, ls=":")
    axes.text(end, -0.44, "end of the pass ", fontsize=8, color="0.35", ha="right", va="center")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(left=min([0.0, *(span.start_ms for span in spans)]))
    axes.set_xlabel("milliseconds from the start of the pass")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)
    axes.set_title(timeline_title(spans, num_blocks=len(colors)), loc="left", fontsize=11)
    draw_legend(axes, colors, wait_ms=total_ms(spans, "wait"))
    save(figure, path)


def timeline_title(spans: Sequence[Span], *, num_blocks: int) -> str:
    """Return one line that sums the pass up."""
    whole = pass_end_ms(spans)
    sums = {lane: total_ms(spans, lane) for lane in LANES}
    busy = ", ".join(f"{lane} {ms:.1f} ms" for lane, ms in sums.items() if ms)
    return f"One pass over {num_blocks} streamed blocks in {whole:.1f} ms: {busy or 'no spans'}"


def pass_end_ms(spans: Iterable[Span]) -> float:
    """Return when the last block had computed; what is copied after it is for the next pass."""
    return max((span.end_ms for span in spans if span.lane == "compute"), default=0.0)


def total_ms(spans: Iterable[Span], lane: str) -> float:
    """Return the sum of one lane's spans."""
    return sum(span.end_ms - span.start_ms for span in spans if span.lane == lane)


def block_colors(spans: Iterable[Span]) -> dict[str, Any]:
    """Return a colour for each block, in the order in which they first appear in time."""
    from matplotlib import colormaps

    ordered = sorted(spans, key=lambda span: (span.lane != "compute", span.start_ms))
    blocks = list(dict.fromkeys(span.block for span in ordered))
    ramp = colormaps["turbo"]
    step = 0.84 / max(len(blocks) - 1, 1)
    return {block: ramp(0.08 + number * step) for number, block in enumerate(blocks)}


def draw_span(axes: Any, row: int, span: Span, *, color: Any) -> None:
    width = max(span.end_ms - span.start_ms, FEWEST_MS)
    # The edge keeps a span visible that is thinner than a pixel.
    axes.barh(row, width, left=span.start_ms, height=0.62, color=color, edgecolor=color, lw=0.9)


def draw_wait(axes: Any, span: Span) -> None:
    width = max(span.end_ms - span.start_ms, FEWEST_MS)
    axes.barh(
        LANES.index("compute"), width, left=span.start_ms, height=0.62,
        facecolor="none", edgecolor=WAIT_COLOR, hatch="//////", lw=0.0,
    )  # fmt: skip


def draw_legend(axes: Any, colors: Mapping[str, Any], *, wait_ms: float) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=block) for block, color in colors.items()]
    waiting = Patch(
        facecolor="none", edgecolor=WAIT_COLOR, hatch="//////", lw=0.0,
        label=f"compute waits ({wait_ms:.1f} ms exposed)",
    )  # fmt: skip
    axes.legend(
        handles=[waiting, *handles], loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=6,
        fontsize=8, frameon=False,
    )  # fmt: skip


def new_figure(width: float, height: float) -> Any:
    """Return a figure of so many inches that draws without a display."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PicturesUnavailable(
            f"the pictures need matplotlib; in a clone of dlo: {install_command('plot')}"
        ) from error
    return figure.Figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, facecolor="white")
