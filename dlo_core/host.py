"""The host store: this rank's shards of all blocks, in one slab of exact size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.rawbytes import move_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from dlo_core.interface import PinnedAllocator

__all__ = ["HostStore"]


class HostStore:
    """The bytes that wait on the host, one shard a block."""

    def __init__(self, allocator: PinnedAllocator, shard_nbytes: Sequence[int]) -> None:
        """Allocate the slab.

        Args:
            allocator: Makes the slab.
            shard_nbytes: Bytes of each block's shard on this rank.

        Raises:
            HostMemoryError: The slab cannot be had.
        """
        self._ranges: list[tuple[int, int]] = []
        stop = 0
        for nbytes in shard_nbytes:
            self._ranges.append((stop, stop + nbytes))
            stop += nbytes
        self.nbytes = stop
        self._buffer = allocator.allocate(stop)

    @property
    def slab(self) -> torch.Tensor:
        """All shards, one behind the other, as ``uint8``."""
        return self._buffer.tensor

    @property
    def pinned_nbytes(self) -> int:
        """Bytes that the system locked for the slab."""
        return self._buffer.locked_nbytes

    def shard(self, index: int) -> torch.Tensor:
        """Return the shard of block ``index`` as a ``uint8`` view of the slab."""
        start, stop = self._ranges[index]
        return self._buffer.tensor[start:stop]

    @property
    def why_read_only(self) -> str | None:
        """Why the shards cannot be written after loading, and the remedy; None: they can."""
        return None

    def write(self, index: int, start: int, data: torch.Tensor) -> None:
        """Overwrite bytes of the shard of block ``index``; nobody may be reading them.

        Args:
            index: The block.
            start: First byte in the shard.
            data: The new bytes, as a ``uint8`` host tensor.
        """
        move_bytes(self.shard(index)[start : start + data.numel()], data)

    def release(self) -> None:
        """Give the slab back. Idempotent."""
        self._buffer.release()

    def __repr__(self) -> str:
        """Show how much there is."""
        return f"HostStore({len(self._ranges)} shards, {self.nbytes:,} bytes)"
