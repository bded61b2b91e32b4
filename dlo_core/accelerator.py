"""What torch's accelerators have in common: a backend from a device module of torch.

A vendor's package hands its module in; the core never names one.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist

from dlo_core.collective import abort_group, all_gather_bytes, living
from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import (
    Backend,
    Capabilities,
    Check,
    Collective,
    MemoryInfo,
    PinnedAllocator,
    Seal,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from dlo_core.interface import Event, Stream

__all__ = [
    "AcceleratorBackend",
    "DeviceCollective",
    "DeviceSeal",
    "TorchAllocator",
    "device_index",
    "host_limits",
    "pinned_bytes",
]


class _TorchBuffer:
    """Host memory from torch's own allocator, page-locked by the device's driver."""

    def __init__(
        self, made: torch.Tensor, locked_nbytes: int, give_back: Callable[[], None]
    ) -> None:
        self._tensor: torch.Tensor | None = made
        self._give_back = give_back
        self.pinned = made.is_pinned()
        self.locked_nbytes = locked_nbytes if self.pinned else 0

    @property
    def tensor(self) -> torch.Tensor:
        if self._tensor is None:
            raise BackendError("this host buffer was released")
        return self._tensor

    def release(self) -> None:
        if self._tensor is not None:
            self._tensor = None
            self._give_back()


class TorchAllocator(PinnedAllocator):
    """Makes page-locked buffers through torch's own pinned allocator."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Lock memory for one device.

        Args:
            module: The vendor's device module of torch.
            device: Whose driver locks the memory.
        """
        self._module = module
        self._device = device

    def allocate(self, nbytes: int) -> _TorchBuffer:
        """Return ``nbytes`` page-locked bytes."""
        with torch.inference_mode(False), self._module.device(self._device):
            try:
                made, locked_nbytes = self._lock(nbytes)
            except RuntimeError as error:
                raise HostMemoryError(
                    f"cannot page-lock {nbytes:,} bytes of host memory ({host_limits()}): use "
                    f"host='pageable', more ranks, or raise the limit. The driver says: {error}"
                ) from error
        return _TorchBuffer(made, locked_nbytes, self.give_back)

    def give_back(self) -> None:
        """Let torch give cached memory that nobody uses back to the system, where it can."""

    def _lock(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Return page-locked bytes, and how many the driver locked: torch takes powers of two."""
        return pinned_bytes(nbytes), 1 << max(nbytes - 1, 0).bit_length()


def pinned_bytes(nbytes: int) -> torch.Tensor:
    """Return bytes from torch's pinned allocator, for the current device."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)


def host_limits() -> str:
    """Return in words what may be in the way of locking memory: the limit, and what is free."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
    free = psutil.virtual_memory().available
    return f"limit of locked memory, ulimit -l: {allowed}; available: {free:,} bytes"


def device_index(module: Any, device: str, *, kind: str, absent: str) -> int:
    """Return the number of the device that is meant, without starting one.

    Args:
        module: The vendor's device module of torch.
        device: The device type, with or without ``":"`` and a number.
        kind: What several such devices are called.
        absent: What to say where there is none: why, as far as it can be known.

    Raises:
        BackendError: There is no such device.
    """
    # is_available() may leave a process whose forked children cannot use the device.
    count = module.device_count()
    index = device.partition(":")[2]
    if count == 0:
        raise BackendError(f"device {device!r}: {absent}")
    if not index:
        # Asking for the current device would start it, which a look at the backends must not.
        return int(module.current_device()) if module.is_initialized() else 0
    if not index.isdecimal() or int(index) >= count:
        raise BackendError(f"device {device!r}: there are {count} {kind}, 0 to {count - 1}")
    return int(index)


class _DeviceCheck(Check):
    """Keeps a flag on the device and a copy of it in pinned memory, which the host may look at."""

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._flag = torch.zeros((), dtype=torch.bool, device=device)
            self._seen = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)

    def compare(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """Queue the comparison and the copy of the flag."""
        with torch.inference_mode(False), torch.no_grad():
            self._flag.logical_or_(torch.ne(actual, expected).any())
            self._seen.copy_(self._flag, non_blocking=True)

    def failed(self) -> bool:
        """Return the flag as far as it has come."""
        return bool(self._seen)


class DeviceSeal(Seal):
    """Keeps a flag on the host, which the device reads when it comes to the end of a pass."""

    def __init__(self, device: torch.device, flag: torch.Tensor) -> None:
        """Keep ``flag``.

        Args:
            device: Of the tensors.
            flag: One ``bool`` on the host, False; pinned where the copy is to be asynchronous.
        """
        self._given_up = flag
        with torch.inference_mode(False):
            self._seen = torch.zeros((), dtype=torch.bool, device=device)

    def apply(self, tensors: Iterable[torch.Tensor]) -> None:
        """Queue a copy of the flag, and a fill under it for each plain floating tensor."""
        with torch.inference_mode(False), torch.no_grad():
            self._seen.copy_(self._given_up, non_blocking=True)
        for tensor in tensors:
            if _fillable(tensor, self._seen.device):
                # A model that enters inference mode by itself returns what only there is written.
                mode = torch.is_inference_mode_enabled() or tensor.is_inference()
                with torch.inference_mode(mode), torch.no_grad():
                    tensor.masked_fill_(self._seen, torch.nan)

    def give_up(self) -> None:
        """Set the flag; the device reads it later."""
        self._given_up.fill_(True)


def _fillable(tensor: torch.Tensor, device: torch.device) -> bool:
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
    if not plain or tensor.device != device or not tensor.is_floating_point():
        return False
    # An expanded one cannot be written.
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(step == 0 and length > 1 for length, step in pairs)


class DeviceCollective(Collective):
    """All-gather through torch.distributed; the current stream is the one that orders it."""

    def __init__(self, group: ProcessGroup, synchronize: Callable[[], None]) -> None:
        """Take a group of the comm library.

        Args:
            group: Becomes the collective's own.
            synchronize: Waits for the device.
        """
        self._group: ProcessGroup | None = group
        self._synchronize = synchronize
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather and let the current stream wait for it; the host does not."""
        all_gather_bytes(out, shard, group=living(self._group))

    def abort(self, error: BaseException) -> None:
        """Give up gathers under way; their streams go on with whatever bytes there are."""
        abort_group(self._group, failed=True)

    def close(self) -> None:
        """Give up gathers under way, and the group with them; then nothing touches their memory."""
        group, self._group = self._group, None
        if group is not None:
            abort_group(group)
            self._synchronize()


class _Current:
    """Makes a stream of the current device current, and what was current before again."""

    __slots__ = ("_before", "_index", "_module", "_stream")

    def __init__(self, module: Any, index: int | None, stream: Any) -> None:
        self._module = module
        self._index = index
        self._stream = stream

    def __enter__(self) -> None:
        self._before = self._module.current_stream(self._index)
        self._module.set_stream(self._stream)

    def __exit__(self, *exc: object) -> None:
        self._module.set_stream(self._before)


class AcceleratorBackend(Backend):
    """A backend on a device module of torch; a vendor's package subclasses it."""

    def __init__(
        self,
        module: Any,
        device: torch.device,
        *,
        comm_library: str,
        capabilities: Capabilities,
        allocator: PinnedAllocator | None = None,
    ) -> None:
        """Take the vendor's module.

        Args:
            module: The vendor's device module of torch.
            device: The device, with its index.
            comm_library: Name of the vendor's ``torch.distributed`` backend.
            capabilities: What the device can do.
            allocator: Makes the host buffers; None: torch's own pinned memory.
        """
        self._module = module
        self.name = device.type
        self.device = device
        self.comm_library = comm_library
        self.capabilities = capabilities
        self.allocator = allocator or TorchAllocator(module, device)

    def new_stream(self, priority: int = 0) -> Stream:
        """Return a new stream of the device."""
        made: Stream = self._module.Stream(device=self.device, priority=priority)
        return made

    def current_stream(self) -> Stream:
        """Return the device's current stream in this thread."""
        # By its number: torch takes longer to look into a device than to find the stream.
        current: Stream = self._module.current_stream(self.device.index)
        return current

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current."""
        if self._module.current_device() != self.device.index:
            # torch's own context puts two devices' streams back; it takes twice as long.
            context: AbstractContextManager[Any] = self._module.stream(stream)
            return context
        return _Current(self._module, self.device.index, stream)

    def new_event(self, *, timing: bool = False) -> Event:
        """Return a new event of the device."""
        made: Event = self._module.Event(enable_timing=timing)
        return made

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory of torch's caching allocator."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy; asynchronous where the host side is pinned."""
        # Bytes made outside of inference mode may be written in every mode; nothing has a gradient.
        dst.copy_(src, non_blocking=True)
        # torch's allocator knows the stream on which a tensor was made, and no other.
        current: Any = None if dst.is_cpu and src.is_cpu else self.current_stream()
        if not dst.is_cpu:
            dst.record_stream(current)
        if not src.is_cpu:
            src.record_stream(current)

    def new_check(self) -> Check:
        """Return a new comparison on the device."""
        return _DeviceCheck(self.device)

    def new_seal(self) -> Seal:
        """Return a new seal on the device."""
        with torch.inference_mode(False):
            flag = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)
        return DeviceSeal(self.device, flag)

    def collective(self, group: ProcessGroup) -> Collective:
        """Return the all-gather over the vendor's comm library."""
        return DeviceCollective(group, self.synchronize)

    def memory(self) -> MemoryInfo:
        """Return what torch's allocator and the device say."""
        free, total = self._module.mem_get_info(self.device)
        return MemoryInfo(
            self._module.memory_allocated(self.device),
            self._module.memory_reserved(self.device),
            free,
            total,
        )

    def synchronize(self) -> None:
        """Wait for the device."""
        self._module.synchronize(self.device)
