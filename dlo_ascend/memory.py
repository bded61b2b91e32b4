"""Host memory: page-locked by CANN through torch_npu, and counted as CANN locked it.

Pinned memory is asked from the driver and shows neither in RSS nor in a cgroup's account, so what
is locked is told by torch_npu's own statistics and never measured on the process.
"""

from __future__ import annotations

import ctypes
import threading
import warnings
from typing import Any, ClassVar

import torch

from dlo_ascend.npurt import MAPPED, Npurt
from dlo_core.accelerator import TorchAllocator, host_limits, pinned_bytes
from dlo_core.errors import DloWarning, HostMemoryError
from dlo_core.registration import PAGE_NBYTES, HostRegistration

__all__ = ["EXACT", "AscendAllocator", "RegisteringAllocator", "exact_above_mib"]

# torch_npu rounds pinned memory up to a power of two below this size, in MiB.
EXACT = "pinned_max_round_threshold_mb:1"
_WARN_NBYTES = 64 << 20


def exact_above_mib(settings: str) -> int | None:
    """Return above how many MiB pinned memory is not rounded up; None: nowhere.

    Args:
        settings: As in ``PYTORCH_NPU_ALLOC_CONF``.
    """
    keys = dict(part.strip().partition(":")[::2] for part in settings.split(",") if part.strip())
    expandable = keys.get("pin_memory_expandable_segments", "").lower() == "true"
    threshold = keys.get("pinned_max_round_threshold_mb", "")
    return int(threshold) if threshold.isdecimal() and not expandable else None


class AscendAllocator(TorchAllocator):
    """Makes page-locked buffers through torch_npu."""

    _lock_once = threading.Lock()
    # torch_npu says nothing when CANN refuses: the tensor lies nowhere. Were it let go, torch_npu's
    # cache would hand the same nothing to whoever asks next, without another try.
    _nowhere: ClassVar[list[torch.Tensor]] = []

    def give_back(self) -> None:
        """Let torch_npu give cached pinned memory back to the system."""
        self._module.host_empty_cache()

    def _lock(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Return page-locked bytes, and how many CANN locked for them."""
        with self._lock_once:
            before = self._locked()
            made = pinned_bytes(nbytes)
            if nbytes and not made.data_ptr():
                self._nowhere.append(made)
                raise RuntimeError("aclrtMallocHost gave no memory")
            locked_nbytes = max(self._locked() - before, nbytes)
        if locked_nbytes - nbytes > _WARN_NBYTES:
            warnings.warn(
                f"{locked_nbytes:,} bytes of host memory were page-locked for {nbytes:,}, because "
                "torch_npu rounds up to powers of two; set "
                f"PYTORCH_NPU_ALLOC_CONF={EXACT} before Python starts",
                DloWarning,
                stacklevel=2,
            )
        return made, locked_nbytes

    def _locked(self) -> int:
        """Return the bytes of all pinned memory that is in use."""
        return int(self._module.host_memory_stats().get("active_bytes.current", 0))


class RegisteringAllocator(AscendAllocator):
    """Also page-locks memory that is there already, where copies from it are asynchronous."""

    def __init__(self, module: Any, device: torch.device) -> None:
        """Lock memory for one device.

        Args:
            module: ``torch.npu``.
            device: Whose driver locks the memory.
        """
        super().__init__(module, device)
        self._npurt = Npurt(module, device)

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> HostRegistration:
        """Page-lock the memory of a host tensor where it lies, without a copy.

        Args:
            memory: A contiguous tensor on the CPU that begins at a page; stays mapped until it is
                released.
            readonly: Whether it is the pages of a file; CANN locks none of these.

        Raises:
            HostMemoryError: It cannot be locked, or torch_npu would hold the host at copies from
                it; names the bytes, why, and the limits. Nothing stays locked.
        """
        if memory.device.type != "cpu" or not memory.is_contiguous() or not memory.nbytes:
            raise HostMemoryError(
                "register() wants contiguous memory on the host; got a tensor of shape "
                f"{tuple(memory.shape)} on {memory.device}"
            )
        if readonly:
            raise _refused(memory, "CANN locks no pages of a file")
        if memory.data_ptr() % PAGE_NBYTES:
            raise _refused(memory, f"it does not begin at a page of {PAGE_NBYTES} bytes")
        try:
            made = HostRegistration(
                self._npurt,
                memory.data_ptr(),
                memory.nbytes,
                keep=memory,
                flags=MAPPED,
                # In one piece: no limit of a single call is known.
                piece_nbytes=memory.nbytes + PAGE_NBYTES,
            )
        except (HostMemoryError, RuntimeError) as error:
            raise _refused(memory, f"npuHostRegister: {error}") from None
        reason = _why_not_taken(memory)
        if reason is not None:
            made.release()
            raise _refused(memory, reason)
        return made


def _why_not_taken(memory: torch.Tensor) -> str | None:
    """Return why torch_npu would hold the host at copies from registered memory, or None.

    A copy looks at the first byte it takes; ``is_pinned`` looks at the first of the storage, which
    may lie elsewhere, so it is asked of a storage that begins here.
    """
    here = (ctypes.c_uint8 * memory.nbytes).from_address(memory.data_ptr())
    try:
        taken = torch.frombuffer(here, dtype=torch.uint8).is_pinned()
        return None if taken else "registered, torch_npu does not take it for pinned"
    except RuntimeError as error:
        return f"registered, torch_npu cannot tell what it is: {error}"


def _refused(memory: torch.Tensor, why: str) -> HostMemoryError:
    return HostMemoryError(
        f"cannot page-lock {memory.nbytes:,} bytes of host memory where they lie: {why} "
        f"({host_limits()}); use host='pinned' or 'pageable', or raise the limit"
    )
