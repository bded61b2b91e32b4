"""The host store: this rank's shards of all blocks, in the kind of memory that was settled."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dlo_core.arena import Arena
from dlo_core.errors import DloWarning, HostMemoryError, UseError
from dlo_core.feed import DirectFeed
from dlo_core.pages import PageableAllocator, page_ranges
from dlo_core.rawbytes import move_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlo_core.feed import Feed, Part
    from dlo_core.interface import PinnedAllocator, Registration
    from dlo_core.segment import Segment

__all__ = ["HostBytes", "HostStore", "PrivateStore", "SharedStore", "register_ranges"]

_PAGES = (
    "the mapped tier keeps no copy of the weights: they are the checkpoint's pages, "
    "which cannot be changed; use host='pinned', 'shared' or 'pageable'"
)


@dataclass(frozen=True, slots=True)
class HostBytes:
    """The bytes of a store by the kind of memory.

    Attributes:
        pinned: Page-locked, as the system counts them, of whatever kind.
        shared: In memory that the node's ranks have in common.
        pageable: This rank's own, not page-locked.
        staging: Buffers through which the mapped tier goes.
        mapped: Of shards that stay in the checkpoint's pages; not in host memory of ours.
    """

    pinned: int = 0
    shared: int = 0
    pageable: int = 0
    staging: int = 0
    mapped: int = 0


class HostStore(ABC):
    """The bytes that wait on the host, one shard a block.

    Attributes:
        nbytes: Bytes of host memory that this rank maps for them; shared memory counts in whole.
        tiers: The tier of each block.
        part: (i, n): this rank reads the i-th of n parts of the shards; (0, 1): all of them.
        reads: Whether shards are read at load; False: anew for each copy.
    """

    nbytes: int
    tiers: tuple[str, ...]
    part: tuple[int, int] = (0, 1)
    reads = True

    @property
    @abstractmethod
    def account(self) -> HostBytes:
        """The bytes by kind."""

    @property
    def pinned_nbytes(self) -> int:
        """Bytes that the system locked."""
        return self.account.pinned

    @property
    @abstractmethod
    def runs(self) -> tuple[torch.Tensor, ...]:
        """The memory, buffer by buffer, as ``uint8``."""

    @property
    def slab(self) -> torch.Tensor:
        """The first of the buffers."""
        return self.runs[0]

    @abstractmethod
    def parts(self, index: int) -> tuple[Part, ...]:
        """Return the shard of block ``index`` as places in it and the bytes there."""

    def shard(self, index: int) -> torch.Tensor:
        """Return the shard of block ``index`` as one ``uint8`` view; what is written is kept.

        Raises:
            UseError: It lies in several buffers (use ``parts`` or ``writing``), or in the
                checkpoint's pages, which nobody may write.
        """
        parts = self._own_parts(index)
        if len(parts) != 1:
            raise UseError(f"the shard of block {index} lies in {len(parts)} parts, not in one run")
        return parts[0][1]

    @contextmanager
    def writing(self, index: int) -> Iterator[torch.Tensor]:
        """Yield the shard of block ``index`` as one run; what is written to it is in the store.

        Raises:
            UseError: It lies in the checkpoint's pages.
        """
        parts, whole = self._own_parts(index), self.whole(index)
        yield whole
        if len(parts) > 1:
            for at, part in parts:
                move_bytes(part, whole[at : at + part.nbytes])

    def whole(self, index: int) -> torch.Tensor:
        """Return the shard of block ``index`` as one run to read; a copy where it lies in parts.

        Raises:
            UseError: It lies in the checkpoint's pages.
        """
        parts = self._own_parts(index)
        if len(parts) == 1:
            return parts[0][1]
        run = torch.empty(sum(part.nbytes for _, part in parts), dtype=torch.uint8, device="cpu")
        for at, part in parts:
            move_bytes(run[at : at + part.nbytes], part)
        return run

    @property
    def why_read_only(self) -> str | None:
        """Why the shards cannot be written after loading, and the remedy; None: they can."""
        return None if self.reads else _PAGES

    def write(self, index: int, start: int, data: torch.Tensor) -> None:
        """Overwrite bytes of the shard of block ``index``; nobody may be reading them.

        Args:
            index: The block.
            start: First byte in the shard.
            data: The new bytes, as a ``uint8`` host tensor.

        Raises:
            UseError: It lies in the checkpoint's pages.
        """
        stop = start + data.numel()
        for at, part in self._own_parts(index):
            low, high = max(start, at), min(stop, at + part.nbytes)
            if low < high:
                move_bytes(part[low - at : high - at], data[low - start : high - start])

    def flush(self) -> None:
        """Bring what ``write`` was given into the shards, where it waits for more.

        Raises:
            UseError: It does not fit.
        """
        return

    def _own_parts(self, index: int) -> tuple[Part, ...]:
        if not self.reads:
            raise UseError(_PAGES)
        return self.parts(index)

    def feed(self) -> Feed:
        """Return how a transfer comes by the shards."""
        return DirectFeed()

    def register(self) -> None:
        """Page-lock what is shared, once it is read; one rank of a node at a time.

        Raises:
            HostMemoryError: It cannot be locked; nothing is.
        """
        return

    @abstractmethod
    def release(self) -> None:
        """Give everything back. Idempotent."""

    def __repr__(self) -> str:
        """Show how much there is, by tier."""
        kinds = ", ".join(f"{self.tiers.count(tier)} {tier}" for tier in dict.fromkeys(self.tiers))
        return f"{type(self).__name__}({len(self.tiers)} shards, {kinds}, {self.nbytes:,} bytes)"


class PrivateStore(HostStore):
    """Memory of this rank's own: pinned for some blocks or all, pageable for the others."""

    def __init__(
        self, allocator: PinnedAllocator, shard_nbytes: Sequence[int], pinned: Sequence[bool]
    ) -> None:
        """Allocate.

        Args:
            allocator: Makes the pinned part; where nothing is pinned at all, everything.
            shard_nbytes: Bytes of each block's shard.
            pinned: Which of them come from ``allocator``.

        Raises:
            HostMemoryError: The memory cannot be had; nothing is kept.
        """
        self._where: list[tuple[int, int]] = []
        sizes: tuple[list[int], list[int]] = ([], [])
        for nbytes, yes in zip(shard_nbytes, pinned, strict=True):
            self._where.append((0 if yes else 1, len(sizes[0 if yes else 1])))
            sizes[0 if yes else 1].append(nbytes)
        self.nbytes = sum(shard_nbytes)
        self._arenas: list[Arena] = []
        try:
            self._arenas.append(Arena(allocator, sizes[0]))
            self._arenas.append(Arena(PageableAllocator(), sizes[1]))
        except BaseException:
            self.release()
            raise
        locked = self._arenas[0].locked_nbytes > 0
        self.tiers = tuple("pinned" if yes and locked else "pageable" for yes in pinned)

    @property
    def account(self) -> HostBytes:
        """What is locked, and the rest."""
        locked = self._arenas[0].locked_nbytes
        return HostBytes(
            pinned=locked, pageable=self.nbytes - (self._arenas[0].nbytes if locked else 0)
        )

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """The buffers, pinned ones first."""
        return tuple(b.tensor for arena in self._arenas for b in arena.buffers if b.tensor.nbytes)

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return the shard's parts, nearly always one."""
        arena, number = self._where[index]
        return self._arenas[arena].parts(number)

    def release(self) -> None:
        """Give the buffers back."""
        for arena in self._arenas:
            arena.release()


class SharedStore(HostStore):
    """One copy for all ranks of the node, which divide the reading."""

    def __init__(
        self,
        segment: Segment,
        shard_nbytes: Sequence[int],
        pinned: Sequence[bool],
        *,
        allocator: PinnedAllocator,
        part: tuple[int, int],
        must_pin: bool,
    ) -> None:
        """Lay the shards out in ``segment``, in the same way on every rank.

        Args:
            segment: The memory.
            shard_nbytes: Bytes of each block's shard.
            pinned: Which of them ``register`` page-locks.
            allocator: Does it.
            part: This rank's part of the reading.
            must_pin: Whether it is an error when they cannot be locked.
        """
        self._segment = segment
        self._allocator = allocator
        self._must_pin = must_pin
        self._ranges: list[tuple[int, int]] = []
        stop = 0
        for nbytes in shard_nbytes:
            self._ranges.append((stop, stop + nbytes))
            stop += nbytes
        self._pinned = tuple(pinned)
        self._registered: list[Registration] = []
        self.part = part
        self.nbytes = stop
        self.tiers = ("shared",) * len(self._ranges)

    @property
    def account(self) -> HostBytes:
        """All of it is shared; some of it is locked."""
        return HostBytes(pinned=sum(each.nbytes for each in self._registered), shared=self.nbytes)

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """The segment."""
        return (self._segment.tensor,)

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return the shard in one part."""
        start, stop = self._ranges[index]
        return ((0, self._segment.tensor[start:stop]),)

    def register(self) -> None:
        """Page-lock the blocks that are to be, in as few ranges as they lie in."""
        wanted = [r for r, yes in zip(self._ranges, self._pinned, strict=True) if yes]
        try:
            self._registered = register_ranges(self._allocator, self._segment.tensor, wanted)
        except HostMemoryError as error:
            if self._must_pin:
                raise
            warnings.warn(f"{error}; the shared memory stays pageable", DloWarning, stacklevel=2)
        if self._registered:
            # Memory that is forgotten must not stay locked, nor be unmapped while it is.
            weakref.finalize(self, _unlock, self._registered)

    def write(self, index: int, start: int, data: torch.Tensor) -> None:
        """Overwrite, on one rank of the node; all of them must call this with the same bytes."""
        if self.part[0] == 0:
            super().write(index, start, data)

    def release(self) -> None:
        """Unlock the memory and let it go."""
        _unlock(self._registered)
        self._segment.release()


def register_ranges(
    allocator: PinnedAllocator,
    memory: torch.Tensor,
    ranges: Sequence[tuple[int, int]],
    *,
    readonly: bool = False,
) -> list[Registration]:
    """Page-lock the pages of ``ranges`` of a mapping, all of them or none.

    Raises:
        HostMemoryError: One of them cannot be locked.
    """
    made: list[Registration] = []
    try:
        for start, stop in page_ranges(ranges, memory.nbytes):
            made.append(allocator.register(memory[start:stop], readonly=readonly))
    except BaseException:
        _unlock(made)
        raise
    return made


def _unlock(registered: list[Registration]) -> None:
    while registered:
        registered.pop().release()
