"""Pages: host memory in mappings of its own, of exactly the size that was asked for."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import psutil
import torch

from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import PinnedAllocator

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["PageableAllocator", "PageableBuffer", "page_ranges", "view_of"]


class PageableBuffer:
    """Host memory of exact size in a mapping of its own."""

    pinned = False
    locked_nbytes = 0

    def __init__(self, nbytes: int) -> None:
        """Map ``nbytes`` zero bytes.

        Raises:
            HostMemoryError: The system refused.
        """
        self.nbytes = nbytes
        if not nbytes:
            self._tensor: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device="cpu")
            return
        try:
            pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            free = psutil.virtual_memory().available
            raise HostMemoryError(
                f"cannot map {nbytes:,} bytes of host memory ({error}); "
                f"{free:,} bytes are available: use more ranks, or a machine with more memory"
            ) from error
        # The tensor holds the mapping; it goes when the last view goes.
        self._tensor = view_of(pages)

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes; raises after ``release``."""
        if self._tensor is None:
            raise BackendError("this host buffer was released")
        return self._tensor

    def release(self) -> None:
        """Let the mapping go with its last view."""
        self._tensor = None


class PageableAllocator(PinnedAllocator):
    """Makes pageable buffers: for a device that has nobody to pin for, or blocks left unpinned."""

    def allocate(self, nbytes: int) -> PageableBuffer:
        """Return ``nbytes`` bytes in a mapping of their own."""
        with torch.inference_mode(False):
            return PageableBuffer(nbytes)


def view_of(pages: mmap.mmap) -> torch.Tensor:
    """Return the bytes of a writable mapping as a tensor that keeps it alive."""
    if hasattr(mmap, "MADV_DONTDUMP"):
        # Weights do not belong into core dumps, and no neighbour mapping is merged with ours.
        pages.madvise(mmap.MADV_DONTDUMP)
    return torch.frombuffer(pages, dtype=torch.uint8)


def page_ranges(ranges: Iterable[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Return the ranges of whole pages that cover ``ranges``, merged, none reaching past ``limit``.

    Page-locking a page twice is an error on some devices, so neighbours must not share one.
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if start >= stop:
            continue
        low = start // mmap.PAGESIZE * mmap.PAGESIZE
        high = min(-(-stop // mmap.PAGESIZE) * mmap.PAGESIZE, limit)
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged
