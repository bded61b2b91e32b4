"""The CUDA backend: NVIDIA GPUs with NCCL, on torch's own streams and events and our own slabs."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from dlo_core.accelerator import AcceleratorBackend
from dlo_core.errors import BackendError
from dlo_core.interface import Capabilities
from dlo_cuda.cudart import load_runtime
from dlo_cuda.pinned import SlabAllocator

if TYPE_CHECKING:
    from dlo_core.interface import Codec
    from dlo_cuda.cudart import Runtime

__all__ = ["CudaBackend", "make_backend"]

_logger = logging.getLogger("dlo")


class CudaBackend(AcceleratorBackend):
    """What ``torch.cuda`` gives, with pinned slabs of exact size."""

    def __init__(
        self, device: torch.device, slabs: SlabAllocator | None, *, readonly: bool = False
    ) -> None:
        """Take what was probed.

        Args:
            device: The device, with its index.
            slabs: Makes the host buffers; None: torch's own pinned memory.
            readonly: Whether memory that may not be written can be locked in place.
        """
        super().__init__(
            torch.cuda,
            device,
            comm_library="nccl",
            capabilities=Capabilities(
                alignment=256,
                host_blocks=False,
                pinned_memory=True,
                host_registration=slabs is not None,
                readonly_registration=slabs is not None and readonly,
                # torch's own pinned memory takes powers of two.
                locks_exactly=slabs is not None,
            ),
            allocator=slabs,
        )
        self._slabs = slabs

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy; asynchronous where the host side is pinned.

        The driver takes no copy from two registrations at once, so one that crosses a seam between
        two pieces of a large slab is cut there.
        """
        cuts = self._cuts(src if src.is_cpu else dst)
        if not cuts:
            super().copy(dst, src)
            return
        for start, stop in pairwise((0, *cuts, len(src))):
            super().copy(dst[start:stop], src[start:stop])

    def codec(self) -> Codec | None:
        """Return the codec in Triton, which comes with torch; None where it does not."""
        try:
            from dlo_cuda.packed import TritonCodec
        except ImportError as error:
            _logger.info("packed weights are decoded by torch's operations: %s", error)
            return None
        return TritonCodec()

    def _cuts(self, host: torch.Tensor) -> list[int]:
        # Rows are small and come from torch's memory; only runs of bytes lie in slabs.
        if self._slabs is None or host.dim() != 1:
            return []
        return self._slabs.cuts(host.data_ptr(), host.nbytes)


def make_backend(device: str) -> CudaBackend:
    """Return a backend for ``device``.

    Raises:
        BackendError: This torch is not built for CUDA, or there is no such device.
    """
    if torch.version.cuda is None:
        raise BackendError(
            f"device {device!r}: torch {torch.__version__} is not built for CUDA; install a build "
            "of torch for your CUDA version"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.partition(":")[2]
    number = int(index) if index.isdecimal() else None
    if count == 0:
        raise BackendError(
            f"device {device!r}: torch sees no CUDA device (driver missing, or "
            "CUDA_VISIBLE_DEVICES hides them)"
        )
    if (index and number is None) or (number is not None and number >= count):
        raise BackendError(f"device {device!r}: there are {count} CUDA devices, 0 to {count - 1}")
    if number is None:
        # Asking for the current device would start CUDA, which a look at the backends must not.
        number = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return _probe(torch.device("cuda", number), number)


def _probe(device: torch.device, index: int) -> CudaBackend:
    """Return a backend with our slabs where this machine can register memory."""
    try:
        runtime: Runtime = load_runtime(index)
    except BackendError as error:
        _logger.info("pinned memory comes from torch, which takes powers of two: %s", error)
        return CudaBackend(device, None)
    if not runtime.can_register():
        _logger.info("pinned memory comes from torch: %s registers no memory", device)
        return CudaBackend(device, None)
    slabs = SlabAllocator(runtime)
    return CudaBackend(device, slabs, readonly=runtime.can_register_readonly())
