"""The demo's two pictures."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.demo.pictures import (
    PicturesUnavailable,
    block_colors,
    timeline_title,
    write_digits,
    write_timeline,
)
from dlo_core.trace import Span

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n\x1a\n"
SPANS = (
    Span("copy", "blocks.1", 0.0, 1.0),
    Span("gather", "blocks.1", 1.0, 3.0),
    Span("compute", "blocks.0", 0.5, 2.0),
    Span("wait", "blocks.1", 2.0, 3.0),
    Span("compute", "blocks.1", 3.0, 4.5),
)


def test_digits_are_written_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    images = [torch.zeros(3, 8, 8), torch.ones(2, 8, 8)]
    write_digits(images, [torch.tensor([1, 2, 3]), torch.tensor([4, 5])], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("spans", [SPANS, ()], ids=["a pass", "no spans"])
def test_timeline_is_written_as_a_picture(tmp_path: Path, spans: tuple[Span, ...]) -> None:
    pytest.importorskip("matplotlib")
    write_timeline(spans, tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(PNG)


def test_title_sums_each_lane_up() -> None:
    title = timeline_title(SPANS, num_blocks=2)
    assert title == (
        "One pass over 2 streamed blocks in 4.5 ms: compute 3.0 ms, gather 2.0 ms, copy 1.0 ms"
    )


def test_blocks_are_coloured_in_the_order_in_which_they_compute() -> None:
    pytest.importorskip("matplotlib")
    colors = block_colors(SPANS)
    assert list(colors) == ["blocks.0", "blocks.1"]
    assert len(set(colors.values())) == 2


def test_without_matplotlib_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PicturesUnavailable, match=r"in a clone of dlo: pip install .*\[plot\]"):
        write_timeline(SPANS, tmp_path / "c.png")
    assert not (tmp_path / "c.png").exists()
