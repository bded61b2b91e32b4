"""Device memory of the simulation, which queued work reaches without torch counting it.

The engine looks at how often a slot was written from Python, and at how many tensors share its
memory, to notice a forward that writes into its weights or keeps one. On a device neither counts
what is queued. Here queued work is Python, too: so it gets an alias, a tensor over the same bytes
with a storage and a version of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from dlo_core.interface import Backend

__all__ = ["POISON", "DeviceMemory", "storage_of"]

# A NaN in every floating dtype.
POISON = 0xFF


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, which tells storages apart."""
    return tensor.untyped_storage().data_ptr()


class DeviceMemory:
    """The device memory of one backend."""

    def __init__(self, real: Backend) -> None:
        """Take the bytes from ``real``, which counts them."""
        self._real = real
        # Each run of bytes, by address, as long as a tensor over it lives.
        self._runs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` counted bytes."""
        owner = self._real.empty(nbytes)
        if not nbytes:
            return owner
        run: Any = (ctypes.c_uint8 * nbytes).from_address(owner.data_ptr())
        run.owner = owner
        self._runs[owner.data_ptr()] = run
        return _over(run)

    def holds(self, storage: int) -> bool:
        """Return whether the storage at this address is device memory."""
        return storage in self._runs

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an alias of ``tensor``; itself where it is not device memory."""
        run = self._runs.get(storage_of(tensor))
        if run is None:
            return tensor
        # Nor is this to be seen by whoever watches torch's operations.
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableTorchDispatch():
            made = torch.empty(0, dtype=tensor.dtype, device="cpu")
            storage, offset = _over(run).untyped_storage(), int(tensor.storage_offset())
            return made.set_(storage, offset, tensor.shape, tensor.stride())


def _over(run: Any) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.frombuffer(run, dtype=torch.uint8)
