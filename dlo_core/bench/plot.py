"""The picture of a bench: the step over the tokens, between the limits that bound it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from dlo_core._install import install_command
from dlo_core.errors import DloError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dlo_core.bench.report import Row

__all__ = ["PlotUnavailable", "write_plot"]


class PlotUnavailable(DloError):
    """Raised when matplotlib is not installed; the message says how to get it."""


def write_plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write the steps, the limits and the exposed time of each length.

    Args:
        rows: One a length.
        title: Above the picture.
        path: The PNG file.

    Raises:
        PlotUnavailable: matplotlib is not installed.
    """
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotUnavailable(
            f"the plot needs matplotlib; in a clone of dlo: {install_command('plot')}"
        ) from error
    rows = sorted(rows, key=lambda row: row.tokens)
    tokens = [row.tokens for row in rows]
    figure = figures.Figure(figsize=(8.0, 4.6), dpi=150, layout="constrained")
    axes = figure.subplots()
    # Where the lines coincide the thin ones are seen on the wide one.
    axes.plot(
        tokens, [row.simulated_ms for row in rows], "-", color="#9ecae1", lw=5, label="simulated"
    )
    axes.plot(tokens, [row.compute_ms for row in rows], "--", color="0.3", label="T_c, resident")
    axes.plot(tokens, [row.copy_ms for row in rows], ":", color="0.3", label="T_x, link")
    axes.plot(tokens, [row.step_ms for row in rows], "o-", color="#1f5fa8", label="step, streamed")
    axes.bar(
        tokens,
        [row.exposed_ms for row in rows],
        width=0.03 * max(tokens),
        color="#d62728",
        alpha=0.5,
        label="exposed",
    )
    axes.set_xlabel("tokens")
    axes.set_ylabel("milliseconds a step")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, facecolor="white")
