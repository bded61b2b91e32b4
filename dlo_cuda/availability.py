"""Availability: whether this torch and this machine have the device, found without starting it."""

from __future__ import annotations

import torch

from dlo_core.errors import BackendError

__all__ = ["check_built", "number_of"]


def check_built(device: str) -> None:
    """Refuse a torch that is not built for CUDA.

    Raises:
        BackendError: It is not; says what to install.
    """
    if torch.version.cuda is None:
        raise BackendError(
            f"device {device!r}: torch {torch.__version__} is not built for CUDA; install a build "
            "of torch for your CUDA version"
        )


def number_of(device: str, count: int) -> int | None:
    """Return the index in ``device``; None where it names none.

    Args:
        device: ``"cuda"`` or ``"cuda:1"``.
        count: Number of devices.

    Raises:
        BackendError: There is no such device.
    """
    index = device.partition(":")[2]
    if count == 0:
        raise BackendError(
            f"device {device!r}: torch sees no CUDA device (driver missing, or "
            "CUDA_VISIBLE_DEVICES hides them)"
        )
    if index and (not index.isdecimal() or int(index) >= count):
        raise BackendError(f"device {device!r}: there are {count} CUDA devices, 0 to {count - 1}")
    return int(index) if index else None
