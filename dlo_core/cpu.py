"""The CPU/gloo backend: runs the whole engine without an accelerator, truly asynchronously.

Its "device" memory is ordinary memory in allocations of its own, counted, so that what is on the
device and what is on the host can be told apart and measured.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from dlo_core.collective import all_gather_bytes, living, release_group
from dlo_core.cpu_stream import CpuEvent, CpuStream, HostStream, current_stream, stream_context
from dlo_core.errors import BackendError
from dlo_core.interface import (
    Backend,
    Capabilities,
    Check,
    Collective,
    MemoryInfo,
)
from dlo_core.pages import PageableAllocator, PageableBuffer
from dlo_core.rawbytes import move_bytes
from dlo_core.registry import hookimpl

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

__all__ = ["CpuBackend", "PageableAllocator", "PageableBuffer", "dlo_backend"]


class _Ledger:
    """Counts the bytes of live device tensors."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.nbytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.nbytes += nbytes


_ledger = _Ledger()
_names = itertools.count()


class CpuCheck(Check):
    """Compares on whichever stream is current."""

    def __init__(self) -> None:
        """Start without a difference."""
        self._failed = False

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison."""

        def work() -> None:
            if not torch.equal(actual, expected):
                self._failed = True

        current_stream().run(work)

    def failed(self) -> bool:
        """Return whether a difference was found."""
        return self._failed


class GlooCollective(Collective):
    """All-gather over a gloo group, in the worker of the current stream."""

    def __init__(self, group: ProcessGroup) -> None:
        """Take ``group`` over."""
        self._group: ProcessGroup | None = group
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        # A model that is forgotten without disable() takes its group along.
        self._finalizer = weakref.finalize(self, release_group, group)
        self._finalizer.atexit = False

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather."""
        stream = current_stream()
        if isinstance(stream, CpuStream):
            self._streams.add(stream)
        stream.run(partial(_gather, out, shard, living(self._group)))

    def abort(self, error: BaseException) -> None:
        """Give up the streams: gloo cannot be interrupted, so their threads are left to it."""
        for stream in list(self._streams):
            stream.give_up(error)

    def close(self) -> None:
        """Destroy the group; local."""
        self._group = None
        self._finalizer()

    def __repr__(self) -> str:
        """Show rank and size."""
        return f"GlooCollective(rank={self.rank}, size={self.size})"


def _gather(out: torch.Tensor, shard: torch.Tensor, group: ProcessGroup) -> None:
    all_gather_bytes(out, shard, group=group)


def _copy_strided(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src)


class CpuBackend(Backend):
    """The CPU as a device with a copy and a comm stream of its own."""

    name = "cpu"
    comm_library = "gloo"
    capabilities = Capabilities(alignment=256, host_blocks=True, pinned_memory=False)

    def __init__(self) -> None:
        """Make a backend; all of them share one account of device memory."""
        self.device = torch.device("cpu")
        self.allocator = PageableAllocator()
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()

    def new_stream(self, priority: int = 0) -> CpuStream:
        """Return a new side stream; a thread has no ``priority``."""
        stream = CpuStream(f"stream-{next(_names)}")
        self._streams.add(stream)
        return stream

    def current_stream(self) -> CpuStream | HostStream:
        """Return this thread's current stream; the host unless in a stream's context."""
        return current_stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """Make ``stream`` current; its work is handed over when the context ends."""
        return stream_context(stream)

    def new_event(self, *, timing: bool = False) -> CpuEvent:
        """Return a new event; every CPU event keeps its time."""
        return CpuEvent()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return counted bytes that are separate from any host buffer."""
        with torch.inference_mode(False):
            made = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        _ledger.add(nbytes)
        weakref.finalize(made.untyped_storage(), _ledger.add, -nbytes)
        return made

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy; contiguous bytes move without the interpreter."""
        dense = dst.is_contiguous() and src.is_contiguous()
        current_stream().run(partial(move_bytes if dense else _copy_strided, dst, src))

    def new_check(self) -> CpuCheck:
        """Return a new comparison."""
        return CpuCheck()

    def collective(self, group: ProcessGroup) -> GlooCollective:
        """Return the gather over a gloo group."""
        return GlooCollective(group)

    def memory(self) -> MemoryInfo:
        """Return our own count as allocated, the machine's memory as the rest."""
        system = psutil.virtual_memory()
        used = _ledger.nbytes
        return MemoryInfo(used, used, int(system.available), int(system.total))

    def synchronize(self) -> None:
        """Wait for every side stream of this backend."""
        for stream in list(self._streams):
            stream.synchronize()


@hookimpl
def dlo_backend(device: str) -> CpuBackend:
    """Return the CPU backend."""
    index = device.partition(":")[2]
    if index not in ("", "0"):
        raise BackendError(f"there is one CPU device, cpu:0; got {device!r}")
    return CpuBackend()
