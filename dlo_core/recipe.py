"""The recipe: how one tensor of a model is made from tensors that a checkpoint stores.

Pure: shapes, strides and dtypes. A recipe is known before a byte is read, and any part of the made
tensor can be had without the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dlo_core.layout import contiguous_stride

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.safetensors_header import CheckpointTensor

__all__ = ["Patch", "Recipe", "RecipeError"]


class RecipeError(Exception):
    """Raised when a step does not fit; says why, and the caller says where."""


@dataclass(frozen=True, slots=True)
class Patch:
    """A box of a stored tensor and its place in the made one.

    Attributes:
        stored: The tensor on disk, row-major.
        start: Its first element that is used.
        shape: Of the box, in the made tensor's dimensions.
        stride: In elements of the stored tensor.
        at: Index of the box's first element in the made tensor.
    """

    stored: CheckpointTensor
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a tensor is made of.

    Attributes:
        shape: Of the made tensor.
        patches: Boxes that cover it, each element once; all of one dtype.
        stored_dtype: On disk.
        casts: Dtypes that it is converted to, one after the other.
    """

    shape: tuple[int, ...]
    patches: tuple[Patch, ...]
    stored_dtype: torch.dtype
    casts: tuple[torch.dtype, ...] = ()

    @classmethod
    def of(cls, stored: CheckpointTensor) -> Recipe:
        """Return the recipe of a stored tensor as it is."""
        stride = contiguous_stride(stored.shape)
        patch = Patch(stored, 0, stored.shape, stride, (0,) * len(stored.shape))
        return cls(stored.shape, (patch,), stored.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the made tensor."""
        return self.casts[-1] if self.casts else self.stored_dtype

    @property
    def keys(self) -> tuple[str, ...]:
        """The stored tensors' names."""
        return tuple(patch.stored.name for patch in self.patches)

    @property
    def dense(self) -> Patch | None:
        """The one patch whose elements follow each other as in a row-major tensor, or None."""
        if self.casts or len(self.patches) != 1:
            return None
        patch = self.patches[0]
        wanted = contiguous_stride(patch.shape)
        for length, step, want in zip(patch.shape, patch.stride, wanted, strict=True):
            if length != 1 and step != want:
                return None
        return patch

    def cast(self, dtype: torch.dtype) -> Recipe:
        """Return the recipe converted to ``dtype``, as ``Tensor.to`` does.

        Raises:
            RecipeError: There is no such conversion, or it would drop imaginary parts.
        """
        if dtype == self.dtype:
            return self
        if self.dtype.is_complex and not dtype.is_complex:
            raise RecipeError(f"{self.dtype} to {dtype} would drop the imaginary part")
        try:
            torch.zeros(1, dtype=self.dtype, device="cpu").to(dtype)
        except (RuntimeError, NotImplementedError) as error:
            raise RecipeError(f"torch cannot convert {self.dtype} to {dtype}") from error
        return replace(self, casts=(*self.casts, dtype))

    def transpose(self, dim0: int, dim1: int) -> Recipe:
        """Return the recipe with two dimensions swapped.

        Raises:
            RecipeError: There are no such dimensions.
        """
        first, second = self.dim(dim0), self.dim(dim1)
        patches = tuple(
            Patch(
                patch.stored,
                patch.start,
                _swap(patch.shape, first, second),
                _swap(patch.stride, first, second),
                _swap(patch.at, first, second),
            )
            for patch in self.patches
        )
        return replace(self, shape=_swap(self.shape, first, second), patches=patches)

    def reshape(self, shape: Sequence[int]) -> Recipe:
        """Return the recipe with its elements in the same order in another shape.

        Raises:
            RecipeError: The number of elements differs, or the elements do not lie so that they
                can be had piece by piece.
        """
        if len(self.patches) != 1:
            raise RecipeError("a tensor of several parts cannot be reshaped; reshape it before")
        patch = self.patches[0]
        blank = torch.empty_strided(patch.shape, patch.stride, dtype=torch.uint8, device="meta")
        try:
            seen = blank.view(tuple(shape))
        except RuntimeError as error:
            raise RecipeError(
                f"shape {self.shape} cannot be seen as {tuple(shape)} without moving elements"
            ) from error
        made, stride = tuple(seen.shape), tuple(seen.stride())
        box = Patch(patch.stored, patch.start, made, stride, (0,) * len(made))
        return replace(self, shape=made, patches=(box,))

    def narrow(self, dim: int, start: int, length: int) -> Recipe:
        """Return ``length`` entries from ``start`` on along a dimension.

        Raises:
            RecipeError: There are none.
        """
        index = self.dim(dim)
        if not (start >= 0 and length >= 0 and start + length <= self.shape[index]):
            raise RecipeError(
                f"shape {self.shape} has no [{start}, {start + length}) in dimension {index}"
            )
        patches = []
        for patch in self.patches:
            low = max(start, patch.at[index])
            high = min(start + length, patch.at[index] + patch.shape[index])
            if low < high or length == 0:
                inside = low - patch.at[index]
                patches.append(
                    Patch(
                        patch.stored,
                        patch.start + max(inside, 0) * patch.stride[index],
                        _set(patch.shape, index, max(high - low, 0)),
                        patch.stride,
                        _set(patch.at, index, low - start),
                    )
                )
        return replace(self, shape=_set(self.shape, index, length), patches=tuple(patches))

    @staticmethod
    def concat(parts: Sequence[Recipe], dim: int) -> Recipe:
        """Return the parts one behind the other along a dimension.

        Raises:
            RecipeError: They differ in dtype, or in shape elsewhere.
        """
        first = parts[0]
        index = first.dim(dim)
        patches: list[Patch] = []
        end = 0
        for part in parts:
            if (part.stored_dtype, part.casts) != (first.stored_dtype, first.casts):
                raise RecipeError(
                    f"{first.keys[0]!r} is {first.dtype} but {part.keys[0]!r} is {part.dtype}"
                )
            same = len(part.shape) == len(first.shape)
            if not same or _set(part.shape, index, 0) != _set(first.shape, index, 0):
                raise RecipeError(
                    f"{first.keys[0]!r} has shape {first.shape} but {part.keys[0]!r} has "
                    f"{part.shape}: they differ in more than dimension {index}"
                )
            for patch in part.patches:
                at = _set(patch.at, index, patch.at[index] + end)
                patches.append(replace(patch, at=at))
            end += part.shape[index]
        return replace(first, shape=_set(first.shape, index, end), patches=tuple(patches))

    def dim(self, dim: int) -> int:
        """Return ``dim`` counted from the front.

        Raises:
            RecipeError: There is no such dimension.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise RecipeError(f"shape {self.shape} has no dimension {dim}")
        return dim % len(self.shape)

    def canonical(self) -> list[object]:
        """Return what is equal for equal recipes, whatever the files are, as JSON can hold it."""
        rows = [[p.stored.name, p.start, p.shape, p.stride, p.at] for p in self.patches]
        return [self.shape, str(self.stored_dtype), [str(cast) for cast in self.casts], rows]


def _set(values: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _swap(values: tuple[int, ...], first: int, second: int) -> tuple[int, ...]:
    made = list(values)
    made[first], made[second] = made[second], made[first]
    return tuple(made)
