"""The brick: streams that run nothing later, events that are always reached, memory of its own."""

from __future__ import annotations

import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlo_core.collective import all_gather_bytes, release_group
from dlo_core.errors import BackendError
from dlo_core.interface import (
    Backend,
    Capabilities,
    Check,
    Collective,
    MemoryInfo,
    PinnedAllocator,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

__all__ = ["BrickBackend"]

_TOTAL_NBYTES = 1 << 30


class BrickEvent:
    """A moment that has passed."""

    def __init__(self) -> None:
        self.time_s = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self.time_s = time.perf_counter()

    def query(self) -> bool:
        """Say yes."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, end_event: BrickEvent) -> float:
        """Return milliseconds."""
        return (end_event.time_s - self.time_s) * 1e3


class BrickStream:
    """A queue that is always empty."""

    def wait_event(self, event: BrickEvent) -> None:
        """Do nothing."""

    def record_event(self, event: BrickEvent | None = None) -> BrickEvent:
        """Take the time."""
        event = event or BrickEvent()
        event.record()
        return event

    def synchronize(self) -> None:
        """Do nothing."""


class BrickBuffer:
    """Host memory from torch itself."""

    pinned = False
    locked_nbytes = 0

    def __init__(self, nbytes: int) -> None:
        self.tensor = torch.zeros(nbytes, dtype=torch.uint8)

    def release(self) -> None:
        """Let it go."""
        self.tensor = torch.empty(0, dtype=torch.uint8)


class BrickAllocator(PinnedAllocator):
    """Makes them."""

    def allocate(self, nbytes: int) -> BrickBuffer:
        """Return one."""
        with torch.inference_mode(False):
            return BrickBuffer(nbytes)


class BrickCheck(Check):
    """Compares at once."""

    def __init__(self) -> None:
        self._failed = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Compare."""
        self._failed |= not torch.equal(actual, expected)

    def failed(self) -> bool:
        """Say so."""
        return self._failed


class BrickCollective(Collective):
    """Gathers at once, over gloo."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather."""
        all_gather_bytes(out, shard, group=self._group)

    def close(self) -> None:
        """Give the group back."""
        group, self._group = self._group, None
        release_group(group)


class BrickBackend(Backend):
    """A brick has two devices, brick:0 and brick:1, in ordinary memory."""

    name = "brick"
    comm_library = "gloo"
    capabilities = Capabilities(alignment=64, host_blocks=True)
    allocator = BrickAllocator()

    def __init__(self, device: str) -> None:
        number = device.partition(":")[2] or "0"
        if number not in ("0", "1"):
            raise BackendError(f"there are two bricks, 0 and 1; got {device!r}")
        self.device = torch.device("cpu")
        self.number = int(number)
        self._allocated = 0

    def new_stream(self, priority: int = 0) -> BrickStream:
        """Return one more empty queue."""
        return BrickStream()

    def current_stream(self) -> BrickStream:
        """Return any: they are all alike."""
        return BrickStream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Do nothing."""
        yield

    def new_event(self, *, timing: bool = False) -> BrickEvent:
        """Return a moment."""
        return BrickEvent()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return counted bytes."""
        with torch.inference_mode(False):
            made = torch.full((nbytes,), 0xFF, dtype=torch.uint8)
        self._count(nbytes)
        weakref.finalize(made.untyped_storage(), self._count, -nbytes)
        return made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy at once."""
        dst.copy_(src)

    def new_check(self) -> BrickCheck:
        """Return a comparison."""
        return BrickCheck()

    def collective(self, group: ProcessGroup) -> BrickCollective:
        """Return a gather."""
        return BrickCollective(group)

    def memory(self) -> MemoryInfo:
        """Return what is counted."""
        used = self._allocated
        return MemoryInfo(used, used, _TOTAL_NBYTES - used, _TOTAL_NBYTES)

    def synchronize(self) -> None:
        """Do nothing."""

    def _count(self, nbytes: int) -> None:
        self._allocated += nbytes
