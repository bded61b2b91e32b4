"""Host memory: page-locked by CANN through torch_npu, and counted as CANN locked it.

Pinned memory is asked from the driver and shows neither in RSS nor in a cgroup's account, so what
is locked is told by torch_npu's own statistics and never measured on the process.
"""

from __future__ import annotations

import threading
import warnings
from typing import ClassVar

import torch

from dlo_core.accelerator import TorchAllocator, pinned_bytes
from dlo_core.errors import DloWarning

__all__ = ["EXACT", "AscendAllocator"]

# torch_npu rounds pinned memory up to a power of two below this size, in MiB.
EXACT = "pinned_max_round_threshold_mb:1"
_WARN_NBYTES = 64 << 20


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
