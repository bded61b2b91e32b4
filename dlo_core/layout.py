"""The layout of a block: where each of its tensors lies in the block's one run of bytes.

Pure: knows shapes, strides and dtypes, never a device. Physical strides are kept, so what comes
back has the same layout as what went in; that the bytes of a tensor with gaps include the gaps is
the price.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["BlockLayout", "TensorSpec", "align_up", "contiguous_stride", "span_nbytes"]


def align_up(nbytes: int, alignment: int) -> int:
    """Return the least multiple of ``alignment`` that is at least ``nbytes``."""
    return -(-nbytes // alignment) * alignment


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor, as torch gives them."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def span_nbytes(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int) -> int:
    """Return the bytes from a tensor's first element to its last, both included."""
    if 0 in shape:
        return 0
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return (last + 1) * itemsize


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a block.

    Attributes:
        name: Dotted name in the model; the first one where several names share the tensor.
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides in elements.
        offset: First byte in the block's run; aligned.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        return span_nbytes(self.shape, self.stride, self.dtype.itemsize)

    @property
    def row_major(self) -> bool:
        """Whether the bytes are those of a contiguous tensor (as a checkpoint stores it)."""
        dense = contiguous_stride(self.shape)
        return 0 in self.shape or all(
            length == 1 or step == want
            for length, step, want in zip(self.shape, self.stride, dense, strict=True)
        )

    def view(self, run: torch.Tensor) -> torch.Tensor:
        """Return this tensor as a view of ``run``, a one-dimensional ``uint8`` tensor."""
        part = run[self.offset : self.offset + self.nbytes].view(self.dtype)
        return part.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the tensors of one block lie in its run of bytes.

    Attributes:
        name: Dotted name of the block.
        tensors: The tensors, by ascending offset, none overlapping.
        nbytes: Length of the run: the end of the last tensor, aligned.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    nbytes: int

    @classmethod
    def pack(cls, name: str, tensors: Iterable[TensorSpec], alignment: int) -> BlockLayout:
        """Lay ``tensors`` one behind the other, in the given order, each aligned."""
        placed: list[TensorSpec] = []
        offset = 0
        for spec in tensors:
            placed.append(TensorSpec(spec.name, spec.dtype, spec.shape, spec.stride, offset))
            offset = align_up(offset + spec.nbytes, alignment)
        return cls(name, tuple(placed), offset)

    def canonical(self) -> bytes:
        """Return bytes that are equal for equal layouts, on every rank and Python."""
        rows = [[t.name, str(t.dtype), t.shape, t.stride, t.offset] for t in self.tensors]
        return json.dumps([self.name, self.nbytes, rows], separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """Return the sha256 of ``canonical()``."""
        return hashlib.sha256(self.canonical()).digest()
