"""The CUDA backend: NVIDIA GPUs with NCCL, on torch's own streams, events and pinned memory."""

from __future__ import annotations

import torch

from dlo_core.accelerator import AcceleratorBackend
from dlo_core.errors import BackendError
from dlo_core.interface import Capabilities

__all__ = ["make_backend"]


def make_backend(device: str) -> AcceleratorBackend:
    """Return a backend for ``device``.

    Raises:
        BackendError: This torch is not built for CUDA, or there is no such device.
    """
    if torch.version.cuda is None:
        raise BackendError(
            f"device {device!r}: torch {torch.__version__} is not built for CUDA; install a build "
            "of torch "
            "for your CUDA version"
        )
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = device.partition(":")[2]
    number = int(index) if index.isdecimal() else None
    if count == 0:
        raise BackendError(
            f"device {device!r}: torch sees no CUDA device (driver missing, or "
            "CUDA_VISIBLE_DEVICES "
            "hides them)"
        )
    if (index and number is None) or (number is not None and number >= count):
        raise BackendError(f"device {device!r}: there are {count} CUDA devices, 0 to {count - 1}")
    if number is None:
        # Asking for the current device would start CUDA, which a look at the backends must not.
        number = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    return AcceleratorBackend(
        torch.cuda,
        torch.device("cuda", number),
        comm_library="nccl",
        capabilities=Capabilities(alignment=256, host_blocks=False, pinned_memory=True),
    )
