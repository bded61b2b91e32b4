"""The proof: the streamed images against the resident ones, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from dlo_core.demo.result import RankResult

__all__ = ["Difference", "find_differences", "first_difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a rank's images differ from its resident run.

    Attributes:
        rank: Whose images.
        mode: ``"gather"`` or ``"rank-local"``.
        image: Number of the image.
        row: Pixel row.
        column: Pixel column.
        resident: The right value.
        streamed: The value that came out.
        num_pixels: Pixels of this run that differ.
    """

    rank: int
    mode: str
    image: int
    row: int
    column: int
    resident: float
    streamed: float
    num_pixels: int

    def __str__(self) -> str:
        """Say where, and what was there."""
        return (
            f"rank {self.rank}, {self.mode} mode: {self.num_pixels} pixels differ, first in image "
            f"{self.image} at row {self.row}, column {self.column}: resident {self.resident!r} "
            f"({self.resident.hex()}), streamed {self.streamed!r} ({self.streamed.hex()})"
        )


def find_differences(results: Iterable[RankResult]) -> tuple[Difference, ...]:
    """Return one difference for each rank and mode whose images are not the resident ones."""
    found = (
        first_difference(
            torch.from_numpy(result.resident_images),
            torch.from_numpy(run.images),
            rank=result.rank,
            mode=run.mode,
        )
        for result in results
        for run in result.streamed
    )
    return tuple(difference for difference in found if difference is not None)


def first_difference(
    resident: Tensor, streamed: Tensor, *, rank: int, mode: str
) -> Difference | None:
    """Return the first pixel whose bits differ, or None.

    Bits are compared, not numbers: 0.0 differs from -0.0, and a NaN equals itself.

    Args:
        resident: Images ``[n, size, size]`` in fp32.
        streamed: The same from the streamed run.
        rank: Whose images.
        mode: Of the streamed run.
    """
    right, got = resident.view(torch.int32), streamed.view(torch.int32)
    if torch.equal(right, got):
        return None
    wrong = (right != got).nonzero()
    image, row, column = wrong[0].tolist()
    return Difference(
        rank=rank,
        mode=mode,
        image=image,
        row=row,
        column=column,
        resident=resident[image, row, column].item(),
        streamed=streamed[image, row, column].item(),
        num_pixels=len(wrong),
    )
