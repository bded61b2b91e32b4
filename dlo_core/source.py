"""The source: from where a tensor's bytes are read, the module itself or a checkpoint.

A plan to read a checkpoint is proven from its headers before anything is allocated: names, shapes
and dtypes, ties, and buffers that no checkpoint has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.rawbytes import bytes_of, move_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.inventory import Inventory, Owned
    from dlo_core.layout import TensorSpec
    from dlo_core.slicing import Cut, Slicing

__all__ = [
    "ModuleTensor",
    "SlicedTensor",
    "Source",
    "StoredTensor",
    "prove_checkpoint",
    "prove_module",
]

_SHOWN = 5


class Source(Protocol):
    """Where one tensor's bytes come from."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of these bytes."""

    def read(self, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Write bytes ``[start, stop)`` of the tensor, as ``spec`` lays it out, to ``out``."""


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensor:
    """The bytes of a tensor that the module holds."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensor.dtype

    def read(self, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Copy from the tensor."""
        part = bytes_of(self.tensor, spec.nbytes)[start:stop]
        # The local part of a DTensor lies on the device.
        move_bytes(out, part.cpu())


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """The bytes of a tensor in a checkpoint."""

    checkpoint: Checkpoint
    key: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype on disk."""
        return self.checkpoint.tensors[self.key].dtype

    def read(self, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Read just these bytes; a tensor that is not row-major is read whole and laid out."""
        if spec.row_major:
            self.checkpoint.read(self.key, start, stop, _memory(out))
            return
        with torch.inference_mode(False), torch.no_grad():
            stored = self.checkpoint.tensors[self.key]
            whole = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu")
            self.checkpoint.read(self.key, 0, stored.nbytes, _memory(whole))
            dense = whole.view(spec.dtype).view(spec.shape)
            laid = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
            laid.copy_(dense)
            move_bytes(out, bytes_of(laid, spec.nbytes)[start:stop])


@dataclass(frozen=True, slots=True, eq=False)
class SlicedTensor(StoredTensor):
    """The bytes of one rank's slice of a tensor in a checkpoint."""

    cut: Cut

    def read(self, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Read just these bytes; a tensor that is not row-major is read whole and laid out."""
        if spec.row_major:
            self._read_dense(start, stop, out)
            return
        with torch.inference_mode(False), torch.no_grad():
            dense = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
            self._read_dense(0, dense.nbytes, bytes_of(dense, dense.nbytes))
            laid = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
            laid.copy_(dense)
            move_bytes(out, bytes_of(laid, spec.nbytes)[start:stop])

    def _read_dense(self, start: int, stop: int, out: torch.Tensor) -> None:
        """Read bytes ``[start, stop)`` of the slice as row-major bytes, run by run."""
        stored = self.checkpoint.tensors[self.key]
        first, nbytes, distance = self.cut.runs(tuple(stored.shape), stored.dtype.itemsize)
        at = start
        while at < stop:
            run, within = divmod(at, nbytes)
            end = min(stop, (run + 1) * nbytes)
            place = first + run * distance + within
            part = _memory(out[at - start : end - start])
            self.checkpoint.read(self.key, place, place + end - at, part)
            at = end


def _memory(run: torch.Tensor) -> memoryview:
    array: Any = run.numpy()
    return memoryview(array)


def prove_module(inventory: Inventory) -> dict[str, Source]:
    """Return a source for every tensor, by its first name, all of them in the module.

    Raises:
        ConfigError: A tensor is on meta; names it.
    """
    empty = [item.name for item in inventory.owned() if item.tensor.is_meta]
    if empty:
        raise ConfigError(
            f"{_listed(empty)} on the meta device and has no values; pass checkpoint= with the "
            "path "
            "of its weights, or load the model first"
        )
    return {item.name: ModuleTensor(item.tensor) for item in inventory.owned()}


def prove_checkpoint(
    inventory: Inventory, checkpoint: Checkpoint, slicing: Slicing | None = None
) -> dict[str, Source]:
    """Return a source for every tensor, by its first name, having compared all headers.

    A tensor that the checkpoint names under any of its tied names comes from there. A buffer that
    it lacks comes from the module.

    Args:
        inventory: The tensors.
        checkpoint: Where they come from.
        slicing: Which part of each this tensor-parallel rank has; None: all of it.

    Raises:
        ConfigError: ``slicing`` names what is not there.
        CheckpointError: A tensor is missing, unknown, or has another shape or dtype; names them all
            up to a few.
    """
    sources: dict[str, Source] = {}
    problems: list[str] = []
    used: set[str] = set()
    missing: list[str] = []
    lost_buffers: list[str] = []
    for item in inventory.owned():
        keys = [name for name in item.names if name in checkpoint.tensors]
        used.update(keys)
        if keys:
            cut = None
            if slicing is not None:
                cut = slicing.cut_of(item, tuple(checkpoint.tensors[keys[0]].shape))
            problems += _compare(item, keys, checkpoint, cut)
            stored = StoredTensor(checkpoint, keys[0])
            sources[item.name] = stored if cut is None else SlicedTensor(checkpoint, keys[0], cut)
        elif item.persistent:
            missing.append(item.name)
        elif item.tensor.is_meta:
            lost_buffers.append(item.name)
        else:
            sources[item.name] = ModuleTensor(item.tensor)
    if slicing is not None:
        slicing.check_used()
    unknown = [key for key in checkpoint.tensors if key not in used]
    if missing:
        problems.append(f"{_listed(missing)} missing from it")
    if unknown:
        problems.append(f"{_listed(unknown)} in it but not in the model")
    if lost_buffers:
        problems.append(
            f"{_listed(lost_buffers)} on meta and never in a checkpoint (non-persistent buffers): "
            "build "
            "the model with its buffers real, for example under accelerate.init_empty_weights()"
        )
    if problems:
        raise CheckpointError(
            f"checkpoint {str(checkpoint.path)!r} does not fit the model: " + "; ".join(problems)
        )
    return sources


def _compare(
    item: Owned, keys: Sequence[str], checkpoint: Checkpoint, cut: Cut | None
) -> list[str]:
    problems = []
    for key in keys:
        stored = checkpoint.tensors[key]
        shape = tuple(stored.shape) if cut is None else cut.shape_of(stored.shape)
        if shape != tuple(item.tensor.shape):
            part = "" if cut is None else f", of which this rank has {shape}"
            problems.append(
                f"{key!r} has shape {tuple(stored.shape)}{part}, the model wants "
                f"{tuple(item.tensor.shape)}"
            )
        first = checkpoint.tensors[keys[0]]
        if stored.dtype != first.dtype:
            problems.append(
                f"{key!r} is {stored.dtype} but {keys[0]!r}, which is tied to it, is {first.dtype}"
            )
        # A parameter on meta takes the dtype on disk; one with values keeps its own.
        if not item.tensor.is_meta and stored.dtype != item.tensor.dtype:
            problems.append(
                f"{key!r} is {stored.dtype}, but the model's own tensor has values and is "
                f"{item.tensor.dtype}: convert it first (.to({stored.dtype})), or build it on meta "
                "to take the checkpoint's dtype"
            )
    return problems


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
