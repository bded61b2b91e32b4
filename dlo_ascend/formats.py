"""Formats: NPU tensors whose bytes lie in an order of the device's own."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["private_format"]

# Formats whose bytes lie as the strides say.
_PLAIN = frozenset({"UNDEFINED", "ND", "NCHW", "NHWC", "NCDHW", "NDHWC", "HWCN", "NC", "NCL"})


def private_format(torch_npu: Any, tensor: torch.Tensor) -> str | None:
    """Return why the bytes of ``tensor`` cannot travel as they lie, or None."""
    if tensor.device.type != "npu":
        return None
    name = torch_npu.Format(torch_npu.get_npu_format(tensor)).name
    if name in _PLAIN:
        return None
    return (
        f"it is in the private format {name}, whose bytes cannot be sliced; load the model on the "
        "CPU, or convert it with torch_npu.npu_format_cast(tensor, 2) and move it there, and leave "
        "torch.npu.config.allow_internal_format off"
    )
