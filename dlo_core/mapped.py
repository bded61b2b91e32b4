"""The mapped tier: shards stay in the checkpoint's pages, and the host keeps no copy of them.

Where the device can lock a file's pages they are mapped (shared and read-only: a private mapping
would be copied page by page) and copied from where they lie. Elsewhere each copy reads them anew,
through two staging buffers. They are read and not mapped there, so that a file that is cut short
under us is an error and not the end of the process. The pages belong to the system, which has one
copy a node and may drop it; they are in no account of ours.
"""

from __future__ import annotations

import mmap
import os
import warnings
from typing import TYPE_CHECKING

import torch

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.feed import DirectFeed, FeedError
from dlo_core.host import HostBytes, HostStore, register_ranges
from dlo_core.rawbytes import move_bytes
from dlo_core.shard import TRAILER_NBYTES, ShardPlan, trailer
from dlo_core.source import StoredTensor
from dlo_core.staging import StagingFeed
from dlo_core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.feed import Feed, Part
    from dlo_core.interface import Event, HostBuffer, PinnedAllocator, Registration
    from dlo_core.layout import BlockLayout
    from dlo_core.plan import ModelPlan
    from dlo_core.shard import Piece

__all__ = ["PageReader", "PagesStore", "StagedStore", "why_not_mapped"]


def why_not_mapped(plans: Sequence[ModelPlan]) -> str | None:
    """Return which tensor's bytes on disk are not those of its shard, and why; None: there is none.

    A transform, another order of bytes, and values that no file has each need a copy in memory.
    """
    for plan in plans:
        if plan.checkpoint is None:
            return f"{type(plan.model).__name__} has no checkpoint; pass checkpoint="
        for layout in plan.layouts:
            for spec in layout.tensors:
                source = plan.sources[spec.name]
                if not isinstance(source, StoredTensor) or source.recipe.dense is None:
                    return f"{spec.name!r} does not come from the checkpoint as it is stored"
                if source.packed:
                    return f"{spec.name!r} is packed in the checkpoint"
                if not spec.row_major:
                    return f"{spec.name!r} has strides {spec.stride}, and a file is row-major"
    return None


class _Shards:
    """What lies where in the shards of one rank."""

    def __init__(self, plans: Sequence[ModelPlan], rank: int, digest: bytes) -> None:
        self.rows: list[tuple[ModelPlan, BlockLayout, ShardPlan]] = [
            (plan, layout, cut)
            for plan in plans
            for layout, cut in zip(plan.layouts, plan.shards, strict=True)
            if isinstance(cut, ShardPlan)
        ]
        self.sizes = [cut.nbytes for _, _, cut in self.rows]
        self._rank = rank
        self._digest = digest
        self._stored: list[dict[Path, tuple[Checkpoint, str]]] = []
        for number in range(len(self.rows)):
            stored = [source.recipe.patches[0].stored for source, *_ in self.pieces(number)]
            checkpoint = self.rows[number][0].checkpoint
            assert checkpoint is not None
            self._stored.append({each.path: (checkpoint, each.name) for each in stored})

    def check(self, number: int) -> None:
        """Check that the files are in place and unchanged in which a shard lies; costs some µs.

        Raises:
            CheckpointError: One is not.
        """
        for checkpoint, name in self._stored[number].values():
            checkpoint.check_in_place(name)

    def pieces(self, number: int) -> Iterator[tuple[StoredTensor, int, int, int, int]]:
        """Yield (source, index in the layout, first byte, end, place in the shard)."""
        plan, layout, cut = self.rows[number]
        for piece in cut.pieces(self._rank):
            for index, start, stop, at in _overlaps(layout, piece):
                source = plan.sources[layout.tensors[index].name]
                if not isinstance(source, StoredTensor):
                    raise ConfigError(f"{layout.tensors[index].name!r} is not in the checkpoint")
                yield source, index, start, stop, at

    def end(self, number: int) -> tuple[int, bytes] | None:
        """Return where the shard's trailer lies, and the trailer; None where it has none."""
        cut = self.rows[number][2]
        if cut.size == 1:
            return None
        return cut.nbytes - TRAILER_NBYTES, trailer(self._digest, number, self._rank)


class PageReader:
    """Reads a shard from the checkpoint, as often as it is wanted."""

    def __init__(self, shards: _Shards) -> None:
        """Read those of ``shards``."""
        self._shards = shards

    def __call__(self, number: int, out: torch.Tensor, stopping: Callable[[], bool]) -> None:
        """Read the shard of block ``number`` into ``out``; end early when told to stop.

        Raises:
            CheckpointError: It cannot be read, or the file was changed.
        """
        layout = self._shards.rows[number][1]
        self._shards.check(number)
        for source, index, start, stop, at in self._shards.pieces(number):
            if stopping():
                raise CheckpointError("the offload was closed while a block was read")
            source.read(layout.tensors[index], start, stop, out[at : at + stop - start])
        end = self._shards.end(number)
        if end is not None:
            move_bytes(out[end[0] : end[0] + TRAILER_NBYTES], _bytes(end[1]))


class StagedStore(HostStore):
    """Shards that are read anew for each copy, through two staging buffers."""

    reads = False

    def __init__(
        self,
        allocator: PinnedAllocator,
        plans: Sequence[ModelPlan],
        *,
        rank: int,
        digest: bytes,
        timeout_s: float,
    ) -> None:
        """Allocate the buffers.

        Args:
            allocator: Makes them.
            plans: The models; each must be such that ``why_not_mapped`` finds nothing.
            rank: In the shard group.
            digest: Of the trailers.
            timeout_s: Seconds that reading one block may take.

        Raises:
            HostMemoryError: The buffers cannot be had.
        """
        self._shards = _Shards(plans, rank, digest)
        self._timeout_s = timeout_s
        self.tiers = ("mapped",) * len(self._shards.sizes)
        self._feed: StagingFeed | None = None
        self._buffers: list[HostBuffer] = []
        try:
            for _ in range(2):
                self._buffers.append(allocator.allocate(max(self._shards.sizes)))
        except BaseException:
            self.release()
            raise
        self.nbytes = sum(buffer.tensor.nbytes for buffer in self._buffers)

    @property
    def account(self) -> HostBytes:
        """The staging buffers are ours, the pages are not."""
        return HostBytes(
            pinned=sum(buffer.locked_nbytes for buffer in self._buffers),
            staging=self.nbytes,
            mapped=sum(self._shards.sizes),
        )

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """The staging buffers."""
        return tuple(buffer.tensor for buffer in self._buffers)

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return nothing: the feed reads it."""
        return ()

    def whole(self, index: int) -> torch.Tensor:
        """Return a copy of the shard, read from the file."""
        run = torch.empty(self._shards.sizes[index], dtype=torch.uint8, device="cpu")
        PageReader(self._shards)(index, run, lambda: False)
        return run

    def feed(self) -> Feed:
        """Return a feed with a worker of its own."""
        self._feed = StagingFeed(
            PageReader(self._shards),
            self._shards.sizes,
            self.runs,
            worker=Worker(),
            timeout_s=self._timeout_s,
        )
        return self._feed

    def release(self) -> None:
        """Give the buffers back, unless a thread that hangs in a read may still write to them."""
        if self._feed is not None:
            self._feed.close()
            if not self._feed.ended:
                _unended.append(self)
                return
        for buffer in self._buffers:
            buffer.release()


# Kept for ever: the memory of reads that never came back.
_unended: list[StagedStore] = []


class PagesStore(HostStore):
    """Shards in the checkpoint's own pages, which the device copies from where they lie."""

    reads = False

    def __init__(
        self, allocator: PinnedAllocator, plans: Sequence[ModelPlan], *, rank: int, digest: bytes
    ) -> None:
        """Map the files and page-lock what this rank's shards need of them.

        Args:
            allocator: Locks the pages.
            plans: The models; each must be such that ``why_not_mapped`` finds nothing.
            rank: In the shard group.
            digest: Of the trailers.

        Raises:
            HostMemoryError: They cannot be locked; nothing is.
            CheckpointError: A file cannot be mapped.
        """
        shards = _Shards(plans, rank, digest)
        self._shards = shards
        self._sizes = shards.sizes
        self.tiers = ("mapped",) * len(shards.sizes)
        self.nbytes = 0
        self._registered: list[Registration] = []
        files: dict[Path, torch.Tensor] = {}
        needed: dict[Path, list[tuple[int, int]]] = {}
        self._parts: list[tuple[Part, ...]] = []
        for number in range(len(shards.sizes)):
            found: list[Part] = []
            for source, _, start, stop, at in shards.pieces(number):
                dense = source.recipe.dense
                assert dense is not None
                stored = dense.stored
                if stored.path not in files:
                    files[stored.path] = _map(stored.path)
                first = stored.offset + dense.start * stored.dtype.itemsize
                where = first + start, first + stop
                needed.setdefault(stored.path, []).append(where)
                found.append((at, files[stored.path][where[0] : where[1]]))
            # The file that was mapped is the one whose header was read.
            shards.check(number)
            end = shards.end(number)
            if end is not None:
                found.append((end[0], _bytes(end[1])))
            self._parts.append(tuple(found))
        try:
            for path, ranges in needed.items():
                self._registered += register_ranges(allocator, files[path], ranges, readonly=True)
        except BaseException:
            self.release()
            raise

    @property
    def account(self) -> HostBytes:
        """The locked pages are the file's."""
        return HostBytes(
            pinned=sum(each.nbytes for each in self._registered), mapped=sum(self._sizes)
        )

    @property
    def runs(self) -> tuple[torch.Tensor, ...]:
        """None of our own."""
        return ()

    def parts(self, index: int) -> tuple[Part, ...]:
        """Return the pieces of the file that are the shard, and its trailer."""
        return self._parts[index]

    def whole(self, index: int) -> torch.Tensor:
        """Return a copy of the shard, out of its pages.

        Raises:
            CheckpointError: A file was changed; to read what was cut off would be the end of us.
        """
        self._shards.check(index)
        run = torch.zeros(self._sizes[index], dtype=torch.uint8, device="cpu")
        for at, part in self._parts[index]:
            move_bytes(run[at : at + part.nbytes], part)
        return run

    def feed(self) -> Feed:
        """Return a feed that looks at the files before each copy."""
        return _PagesFeed(self._shards)

    def release(self) -> None:
        """Unlock the pages and let the files go."""
        _unlock(self._registered)
        self._parts = [()] * len(self._sizes)


class _PagesFeed(DirectFeed):
    """The bytes lie in pages of files, which are copied as long as nobody changes these."""

    def __init__(self, shards: _Shards) -> None:
        self._shards = shards

    def send(
        self,
        block: int,
        parts: Sequence[Part],
        filled: Event,
        queue: Callable[[Sequence[Part]], None],
    ) -> None:
        """Look at the files and queue the copy.

        Raises:
            FeedError: A file was changed.
        """
        try:
            self._shards.check(block)
        except CheckpointError as error:
            raise FeedError(str(error), block) from error
        queue(parts)


def _map(path: Path) -> torch.Tensor:
    """Return a file's pages, shared and read-only."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            pages = mmap.mmap(descriptor, 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot map {str(path)!r}: {error}") from error
    with warnings.catch_warnings(), torch.inference_mode(False):
        # Torch has no read-only tensors; nobody writes to this one.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(pages, dtype=torch.uint8)


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _overlaps(layout: BlockLayout, piece: Piece) -> Iterator[tuple[int, int, int, int]]:
    for index, spec in enumerate(layout.tensors):
        low = max(piece.start, spec.offset)
        high = min(piece.stop, spec.offset + spec.nbytes)
        if low < high:
            yield index, low - spec.offset, high - spec.offset, piece.at + low - piece.start


def _unlock(registered: list[Registration]) -> None:
    while registered:
        registered.pop().release()
