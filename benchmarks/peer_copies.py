"""Peer copies: an all-gather by the copy engines, an experiment.

NCCL gathers with kernels, which take multiprocessors from the computation. Here every rank copies
the others' shards out of their memory, which torch's symmetric memory maps; only the two short
barriers on the device are kernels:

- after the first one every rank's shard is there;
- after the second one every rank has read, so that a shard may be overwritten.

It needs one host and devices that reach each other's memory, and a rank that is gone leaves the
others in a barrier. It is measured here and not a part of dlo.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from dlo_core.collective import abort_group
from dlo_core.interface import Collective
from dlo_cuda.backend import CudaBackend, make_backend
from dlo_cuda.pinned import SlabAllocator

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import ProcessGroup

__all__ = ["PeerBackend", "PeerCopies", "Region", "SymmetricRegions"]

# Smaller buffers are never gathered from.
_LARGE_NBYTES = 4096


class Region(Protocol):
    """One buffer of each rank, as torch's symmetric memory maps them."""

    def get_buffer(
        self, rank: int, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int
    ) -> torch.Tensor:
        """Return a part of the buffer of ``rank``."""

    def barrier(self, channel: int) -> None:
        """Queue a wait for all ranks on the current stream."""


class PeerCopies(Collective):
    """The all-gather by copies from the peers' memory."""

    def __init__(
        self,
        rank: int,
        size: int,
        find: Callable[[torch.Tensor], tuple[Region, int]],
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Belong to ``size`` ranks.

        Args:
            rank: Of this one.
            size: How many there are.
            find: Returns the region in which a tensor lies, and where in it; all ranks come to call
                it in the same order.
            on_close: Called once at the end.
        """
        self.rank, self.size = rank, size
        self._find = find
        self._on_close: Callable[[], None] | None = on_close

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue a barrier, the copies and a barrier on the current stream."""
        nbytes = shard.nbytes
        parts = out.view(self.size, nbytes)
        in_place = shard.data_ptr() == parts[self.rank].data_ptr()
        region, start = self._find(shard)
        region.barrier(0)
        for step in range(1, self.size):
            # Not all from the same peer at once.
            peer = (self.rank + step) % self.size
            # In place, each rank's shard lies at its own place in the slot.
            place = start + (peer - self.rank) * nbytes if in_place else start
            theirs = region.get_buffer(peer, (nbytes,), torch.uint8, place)
            parts[peer].copy_(theirs, non_blocking=True)
        if not in_place:
            parts[self.rank].copy_(shard, non_blocking=True)
        region.barrier(1)

    def close(self) -> None:
        """Call ``on_close``."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class SymmetricRegions:
    """Device buffers that all ranks of a group make alike, mapped into each other on first use."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Make buffers on ``device`` for ``group``."""
        self._group = group
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._regions: dict[int, Any] = {}

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a buffer."""
        with torch.inference_mode(False):
            made = _allocate(nbytes, self._device)
        self._buffers[made.data_ptr()] = made
        return made

    def find(self, tensor: torch.Tensor) -> tuple[Region, int]:
        """Return the region of a view of a buffer, and where in it the view begins."""
        import torch.distributed._symmetric_memory as symmetric

        start = tensor.data_ptr()
        base = max(address for address in self._buffers if address <= start)
        if base not in self._regions:
            self._regions[base] = symmetric.rendezvous(self._buffers[base], self._group)
        return self._regions[base], start - base

    def clear(self) -> None:
        """Let all buffers go."""
        self._regions.clear()
        self._buffers.clear()


def _allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return memory that begins where its allocation begins.

    ``symmetric.empty`` takes a part of a pool, and ``get_buffer`` counts from the allocation.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


class PeerBackend(CudaBackend):
    """The CUDA backend with its large buffers in symmetric memory and gathers by peer copies."""

    def __init__(self, device: torch.device, group: ProcessGroup) -> None:
        """Gather over ``group``, all of whose ranks make the same buffers in the same order."""
        plain = make_backend(str(device))
        slabs = plain.allocator if isinstance(plain.allocator, SlabAllocator) else None
        readonly = plain.capabilities.readonly_registration
        super().__init__(plain.device, slabs, readonly=readonly)
        self._regions = SymmetricRegions(group, plain.device)
        self._group = group

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory that the peers can map, where it is large."""
        if nbytes < _LARGE_NBYTES:
            return super().empty(nbytes)
        return self._regions.empty(nbytes)

    def collective(self, group: ProcessGroup) -> Collective:
        """Return the gather by peer copies; ``group`` itself carries nothing."""
        rank, size = dist.get_rank(self._group), dist.get_world_size(self._group)
        return PeerCopies(rank, size, self._regions.find, on_close=lambda: abort_group(group))

    def clear(self) -> None:
        """Let the buffers go, once no rank reads them any more."""
        self.synchronize()
        self._regions.clear()
