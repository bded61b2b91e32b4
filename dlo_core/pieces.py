"""Pieces: what to read from where to make one range of a tensor's bytes.

[Note: pieces]
A shard begins and ends anywhere in a tensor, and the tensor may be put together from several stored
ones, with dimensions swapped. So the wanted range is cut into boxes whose elements are all wanted
(in the order of the made tensor), and each box into reads (in the order of the file), none larger
than a few MiB. Where the bytes on disk are the bytes wanted, in the same order, a piece is an
``Extent`` and is read straight into its place; all others are read into scratch memory and
``laid`` from there. So peak extra memory is a few pieces a thread, whatever the tensor's size.

Pure arithmetic but for ``Laid.lay``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlo_core.layout import TensorSpec
    from dlo_core.recipe import Patch, Recipe
    from dlo_core.safetensors_header import CheckpointTensor

__all__ = ["LAID_NBYTES", "Extent", "Laid", "pieces_of"]

LAID_NBYTES = 4 << 20
# A gap in a file that costs as much to read over as another call costs.
_GAP_NBYTES = 64 << 10
# Below this torch uses no pool of threads, which would hang in a forked child.
_SERIAL_ELEMENTS = 32_000

_WORDS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """Bytes of a file that go to memory as they are.

    Attributes:
        stored: The tensor that they belong to.
        offset: First byte in the file.
        out: Where they go.
    """

    stored: CheckpointTensor
    offset: int
    out: memoryview

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.out.nbytes

    @property
    def done_nbytes(self) -> int:
        """Bytes of the model that are done with it."""
        return self.out.nbytes


@dataclass(frozen=True, slots=True)
class _Dim:
    """One loop: how often, and how far a step goes in the file and in the made tensor."""

    length: int
    file: int
    made: int


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """Bytes of a file that are converted or moved apart on their way to memory.

    Attributes:
        stored: The tensor that they belong to.
        offset: First byte in the file.
        nbytes: Bytes in the file.
        done_nbytes: Bytes of the model that are done with it.
    """

    stored: CheckpointTensor
    offset: int
    nbytes: int
    done_nbytes: int
    _dims: tuple[_Dim, ...]
    _casts: tuple[torch.dtype, ...]
    _out: memoryview
    _at: int
    _cut: tuple[int, int] | None = None

    def lay(self, raw: memoryview) -> None:
        """Convert the bytes ``raw`` that were read, and write them to their places."""
        shape = tuple(dim.length for dim in self._dims)
        stored = self.stored.dtype
        made = self._casts[-1] if self._casts else stored
        source = _words(raw, 0, shape, [dim.file for dim in self._dims], stored.itemsize)
        if self._casts:
            source = _cast(source, stored, self._casts).reshape(shape)
        steps = [dim.made for dim in self._dims]
        if self._cut is None:
            np.copyto(_words(self._out, self._at, shape, steps, made.itemsize), source)
            return
        # One element of which only some bytes are wanted.
        start, stop = self._cut
        self._out[self._at : self._at + stop - start] = source.tobytes()[start:stop]


def pieces_of(
    recipe: Recipe, spec: TensorSpec, start: int, stop: int, out: memoryview
) -> Iterator[Extent | Laid]:
    """Yield what makes bytes ``[start, stop)`` of a tensor; see [Note: pieces].

    Args:
        recipe: What the tensor is made of.
        spec: How it lies in memory.
        start: First byte, counted from the tensor's own.
        stop: End.
        out: Memory for these bytes.
    """
    if start == stop:
        return
    patch = recipe.dense
    if patch is not None and spec.row_major:
        stored = patch.stored
        first = stored.offset + patch.start * stored.dtype.itemsize
        yield Extent(stored, first + start, out)
        return
    itemsize = recipe.dtype.itemsize
    low, high = -(-start // itemsize), stop // itemsize
    window = _Window(recipe, spec, start, out)
    if low <= high:
        yield from window.whole(low, high)
    if low > high:  # inside of one element
        yield from window.part(high, start - high * itemsize, stop - high * itemsize)
        return
    if low * itemsize > start:
        yield from window.part(low - 1, start - (low - 1) * itemsize, itemsize)
    if high * itemsize < stop:
        yield from window.part(high, 0, stop - high * itemsize)


class _Window:
    """The wanted range of one tensor."""

    def __init__(self, recipe: Recipe, spec: TensorSpec, start: int, out: memoryview) -> None:
        self._recipe = recipe
        self._spec = spec
        self._start = start
        self._out = out
        self._made = recipe.dtype.itemsize
        self._stored = recipe.stored_dtype.itemsize

    def whole(self, low: int, high: int) -> Iterator[Extent | Laid]:
        """Yield the pieces of elements ``[low, high)``, counted as they lie in memory."""
        for patch in self._recipe.patches:
            for first, at, dims in self._boxes(patch, low, high):
                yield from self._pieces(patch, first, at, dims)

    def part(self, element: int, start: int, stop: int) -> Iterator[Laid]:
        """Yield what makes some bytes of one element."""
        at = element * self._made + start - self._start
        for patch in self._recipe.patches:
            for first, _, _ in self._boxes(patch, element, element + 1):
                yield Laid(
                    patch.stored,
                    patch.stored.offset + first * self._stored,
                    self._stored,
                    stop - start,
                    (),
                    self._recipe.casts,
                    self._out,
                    at,
                    (start, stop),
                )

    def _boxes(
        self, patch: Patch, low: int, high: int
    ) -> Iterator[tuple[int, int, tuple[_Dim, ...]]]:
        if 0 in patch.shape:
            return
        steps = self._spec.stride
        dims = [
            _Dim(*row) for row in zip(patch.shape, patch.stride, steps, strict=True) if row[0] != 1
        ]
        dims.sort(key=lambda dim: (-dim.made, -dim.file))
        at = sum(index * step for index, step in zip(patch.at, steps, strict=True))
        yield from _boxes(patch.start, at, tuple(dims), low, high)

    def _pieces(
        self, patch: Patch, first: int, at: int, dims: tuple[_Dim, ...]
    ) -> Iterator[Extent | Laid]:
        merged = _merge(sorted(dims, key=lambda dim: (-dim.file, -dim.made)))
        straight = merged in ((), (_Dim(merged[0].length if merged else 0, 1, 1),))
        stored = patch.stored
        if straight and not self._recipe.casts:
            nbytes = (merged[0].length if merged else 1) * self._made
            begin = at * self._made - self._start
            offset = stored.offset + first * self._stored
            yield Extent(stored, offset, self._out[begin : begin + nbytes])
            return
        for start, place, loops in _reads(first, at, merged, self._stored):
            count = 1
            for loop in loops:
                count *= loop.length
            yield Laid(
                stored,
                stored.offset + start * self._stored,
                _span(loops) * self._stored,
                count * self._made,
                loops,
                self._recipe.casts,
                self._out,
                place * self._made - self._start,
            )


def _boxes(
    first: int, at: int, dims: tuple[_Dim, ...], low: int, high: int
) -> Iterator[tuple[int, int, tuple[_Dim, ...]]]:
    """Yield (first element in the file, place, loops) of boxes that fill ``[low, high)``.

    ``dims`` has the longest steps in the made tensor first.
    """
    last = at + sum((dim.length - 1) * dim.made for dim in dims)
    if at >= high or last < low:
        return
    if low <= at and last < high:
        yield first, at, dims
        return
    outer, inner = dims[0], dims[1:]
    reach = sum((dim.length - 1) * dim.made for dim in inner)
    step = outer.made
    # The turns of the outer loop that touch the range, and those that lie in it.
    begin = max(0, -(-(low - at - reach) // step))
    end = min(outer.length, (high - 1 - at) // step + 1)
    inside = max(begin, -(-(low - at) // step))
    outside = max(inside, min(end, (high - 1 - at - reach) // step + 1))
    for turn in range(begin, min(inside, end)):
        yield from _boxes(first + turn * outer.file, at + turn * step, inner, low, high)
    if inside < outside:
        loop = _Dim(outside - inside, outer.file, outer.made)
        yield first + inside * outer.file, at + inside * step, (loop, *inner)
    for turn in range(outside, end):
        yield from _boxes(first + turn * outer.file, at + turn * step, inner, low, high)


def _merge(dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
    """Return fewer loops over the same elements; the longest steps in the file come first."""
    merged: list[_Dim] = []
    for dim in dims:
        if dim.length == 1:
            continue
        if merged:
            last = merged[-1]
            if last.file == dim.length * dim.file and last.made == dim.length * dim.made:
                merged[-1] = _Dim(last.length * dim.length, dim.file, dim.made)
                continue
        merged.append(dim)
    return tuple(merged)


def _reads(
    first: int, at: int, dims: tuple[_Dim, ...], itemsize: int
) -> Iterator[tuple[int, int, tuple[_Dim, ...]]]:
    """Yield boxes of which each is one read of bounded size without large gaps."""
    if not dims:
        yield first, at, ()
        return
    outer, inner = dims[0], dims[1:]
    span = _span(inner)
    if span * itemsize > LAID_NBYTES or _largest_gap(dims) * itemsize > _GAP_NBYTES:
        for turn in range(outer.length):
            yield from _reads(first + turn * outer.file, at + turn * outer.made, inner, itemsize)
        return
    step = max(1, LAID_NBYTES // (max(outer.file, span) * itemsize))
    for turn in range(0, outer.length, step):
        loop = _Dim(min(step, outer.length - turn), outer.file, outer.made)
        yield first + turn * outer.file, at + turn * outer.made, (loop, *inner)


def _span(dims: tuple[_Dim, ...]) -> int:
    return 1 + sum((dim.length - 1) * dim.file for dim in dims)


def _largest_gap(dims: tuple[_Dim, ...]) -> int:
    return max(dim.file - _span(dims[n + 1 :]) for n, dim in enumerate(dims))


def _words(
    memory: memoryview, at: int, shape: tuple[int, ...], steps: Sequence[int], itemsize: int
) -> Any:
    """Return elements in ``memory`` as words of their size, whose values mean nothing."""
    strides = tuple(step * itemsize for step in steps)
    return np.ndarray(shape, _WORDS[itemsize], memory, at, strides)


def _cast(source: Any, stored: torch.dtype, casts: tuple[torch.dtype, ...]) -> Any:
    """Return the elements converted, one behind the other, as words."""
    flat = np.ascontiguousarray(source).reshape(-1)
    with torch.inference_mode(False), torch.no_grad():
        given = torch.from_numpy(flat.view(np.uint8)).view(stored)
        made = torch.empty(len(flat), dtype=casts[-1], device="cpu")
        for start in range(0, len(flat), _SERIAL_ELEMENTS):
            part = given[start : start + _SERIAL_ELEMENTS]
            for dtype in casts:
                part = part.to(dtype)
            made[start : start + _SERIAL_ELEMENTS] = part
        return made.view(torch.uint8).numpy().view(_WORDS[made.element_size()])
