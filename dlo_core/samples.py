"""Samples: what ranks compare of the values and files that they are about to read."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, Any

import torch

from dlo_core.source import ModuleTensor

if TYPE_CHECKING:
    from dlo_core.plan import ModelPlan

__all__ = ["files_of", "own_values", "sample_stored", "sample_values"]

_SAMPLE = 1024
_SAMPLED_BLOCKS = 16


def sample_values(plan: ModelPlan) -> bytes:
    """Return a sha256 over the first, middle and last bytes of every streamed tensor of the module.

    In gather mode each rank gives a part of every block; ranks whose values differ, after a random
    start without a seed for example, would compute with a mixture.
    """
    digest = hashlib.sha256()
    for layout in plan.layouts:
        for spec in layout.tensors:
            whole = spec.nbytes
            for start in sorted({0, max(0, whole // 2 - _SAMPLE), max(0, whole - _SAMPLE)}):
                part = torch.empty(min(_SAMPLE, whole - start), dtype=torch.uint8, device="cpu")
                plan.sources[spec.name].read(spec, start, start + part.numel(), part)
                digest.update(part.numpy().tobytes())
    return digest.digest()


def files_of(plan: ModelPlan) -> str:
    """Return what is equal on this node for the same files of a checkpoint, unchanged.

    Nothing is read. Two files with the same content differ.
    """
    told = []
    assert plan.checkpoint is not None
    for path in sorted({tensor.path for tensor in plan.checkpoint.tensors.values()}):
        status = os.stat(path)
        told.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(told).encode()).hexdigest()


def sample_stored(plan: ModelPlan) -> bytes:
    """Return a sha256 over a few bytes of a few blocks of the checkpoint.

    As ``sample_values``, for ranks that read different files; but reads are slow in some places, so
    it is one from each of at most 16 blocks.
    """
    digest = hashlib.sha256()
    step = -(-len(plan.layouts) // _SAMPLED_BLOCKS)
    for layout in plan.layouts[::step]:
        spec = max(layout.tensors, key=lambda spec: spec.nbytes)
        start = max(0, spec.nbytes // 2 - _SAMPLE)
        part = torch.empty(min(_SAMPLE, spec.nbytes - start), dtype=torch.uint8, device="cpu")
        plan.sources[spec.name].read(spec, start, start + part.numel(), part)
        digest.update(part.numpy().tobytes())
    return digest.digest()


def own_values(plan: ModelPlan) -> dict[str, str]:
    """Return digests of the streamed tensors that each rank made itself, by name.

    That is what ``post_load=`` made and what a checkpoint lacks: each rank gives a part of it.
    """
    made = {id(tensor) for tensor in plan.made.values.values()}
    digests: dict[str, str] = {}
    for layout in plan.layouts:
        for spec in layout.tensors:
            source = plan.sources[spec.name]
            if not isinstance(source, ModuleTensor) or source.tensor.is_meta:
                continue
            if plan.checkpoint is None and id(source.tensor) not in made:
                continue
            run = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
            source.read(spec, 0, spec.nbytes, run)
            array: Any = run.numpy()
            digests[spec.name] = hashlib.sha256(memoryview(array)).hexdigest()[:24]
    return digests
