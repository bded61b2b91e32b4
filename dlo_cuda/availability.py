"""Availability: whether this torch and this machine have the device, found without starting it."""

from __future__ import annotations

import torch

from dlo_core.errors import BackendError

__all__ = ["check_built"]


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
