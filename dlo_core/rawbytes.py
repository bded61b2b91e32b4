"""Raw bytes of host tensors: seeing them as ``uint8`` and moving them without the interpreter."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["bytes_of", "move_bytes"]


def bytes_of(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the ``nbytes`` bytes from the tensor's first element on, as a ``uint8`` alias."""
    start = tensor.storage_offset() * tensor.element_size()
    with torch.inference_mode(False), torch.no_grad():
        run = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return run.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def move_bytes(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copy between two contiguous host tensors of equal size in bytes.

    ``memmove`` through ctypes lets the interpreter go, uses no torch thread pool (which hangs in
    a forked child) and bumps no version counter.
    """
    if dst.device.type != "cpu" or src.device.type != "cpu":
        raise ValueError(f"move_bytes() wants host tensors; got {dst.device} and {src.device}")
    if dst.nbytes != src.nbytes or not (dst.is_contiguous() and src.is_contiguous()):
        raise ValueError(
            f"move_bytes() wants contiguous tensors of one size; got {_form(dst)} and {_form(src)}"
        )
    if dst.nbytes:
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), dst.nbytes)


def _form(tensor: torch.Tensor) -> tuple[int, Sequence[int]]:
    return tensor.nbytes, tensor.stride()
