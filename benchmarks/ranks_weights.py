"""The weights of several ranks: one copy on the machine, for all ranks and all contenders."""

from __future__ import annotations

import math
import mmap
import os
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from dlo_core.bench.model import Shape, SyntheticTransformer

__all__ = ["Weights", "make_weights", "weights_nbytes"]

_ALIGNMENT = 256
_CHUNK = 1 << 25
_STRIDE = 4099
_STD = 0.02


class Weights:
    """The memory as one process maps it."""

    def __init__(self, path: str) -> None:
        """Map what ``make_weights`` made under ``path``."""
        with open(path, "r+b") as file:
            self._pages = mmap.mmap(file.fileno(), 0)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def lay_out(
        self, model: SyntheticTransformer, shape: Shape, device: torch.device | str = "cpu"
    ) -> SyntheticTransformer:
        """Give a model on meta its values: views of this memory, or of one copy on ``device``."""
        dtype = getattr(torch, shape.dtype)
        run = self.bytes[: weights_nbytes(model, dtype)].to(device)
        stop = 0
        for name, parameter in list(model.named_parameters()):
            start, stop = _span(stop, parameter.numel() * dtype.itemsize)
            path, _, key = name.rpartition(".")
            value = run[start:stop].view(dtype).view(parameter.shape)
            owner = model.get_submodule(path)
            owner.register_parameter(key, nn.Parameter(value, requires_grad=False))
        return model.requires_grad_(False).eval()

    def forget(self) -> None:
        """Map the pages anew at the next use, so that they do not count as this process's."""
        self._pages.madvise(mmap.MADV_DONTNEED)


def weights_nbytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes that the parameters take, each at an aligned place."""
    stop = 0
    for parameter in model.parameters():
        stop = _span(stop, parameter.numel() * dtype.itemsize)[1]
    return stop


def make_weights(nbytes: int, dtype: torch.dtype) -> str:
    """Make the memory, filled, and return where the processes that this one starts find it.

    It has no name and goes with this process. Every stretch of it is another one of a pool of
    random numbers, so that a block with another one's bytes shows in the output.
    """
    descriptor = os.memfd_create("benchmark-weights", os.MFD_CLOEXEC)
    nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    os.truncate(descriptor, nbytes)
    run = torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8).view(dtype)
    chunk = min(_CHUNK, run.numel())
    count = math.ceil(run.numel() / chunk)
    generator = torch.Generator("cpu").manual_seed(1)
    pool = torch.randn(chunk + count * _STRIDE, generator=generator).mul_(_STD).to(dtype)
    for number in range(count):
        part = run[number * chunk : (number + 1) * chunk]
        part.copy_(pool[number * _STRIDE :][: part.numel()])
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _span(stop: int, nbytes: int) -> tuple[int, int]:
    start = -(-stop // _ALIGNMENT) * _ALIGNMENT
    return start, start + nbytes
