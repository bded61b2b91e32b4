"""Restoring: giving a tensor back to every place where it hung, as the object that hung there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dlo_core.dtensor import local_of, set_local, with_local
from dlo_core.rawbytes import bytes_of, move_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.inventory import Owned
    from dlo_core.layout import TensorSpec

__all__ = ["empty_host_run", "give_back", "give_back_meta", "let_go", "tensor_from"]


def let_go(item: Owned) -> None:
    """Free the memory of the original tensors, which stay as objects."""
    if item.managed is not None:
        item.tensor.data = torch.empty(0, dtype=item.tensor.dtype, device=item.tensor.device)
        return
    for entry in item.entries:
        if not entry.original.is_meta:
            local = local_of(entry.original)
            local.data = torch.empty(0, dtype=local.dtype, device="cpu")


def give_back(
    item: Owned, host: torch.Tensor, *, ours: Callable[[object], bool], requires_grad: bool
) -> None:
    """Put ``host`` back under all names of ``item``.

    A tensor that had values is the same object again; one that was on meta becomes a new one, one
    for all tied names. A place that somebody else filled meanwhile keeps what it has.

    Args:
        item: The tensor.
        host: Its values, with its strides.
        ours: Tells whether what hangs in a place now was put there by dlo.
        requires_grad: Of the parameter, as it was last set.
    """
    if item.managed is not None:
        item.managed.point_at(host.to(item.managed.parameter.device))
        return
    fresh: dict[int, torch.Tensor] = {}
    for entry in item.entries:
        original = entry.original
        if original.is_meta:
            if id(original) not in fresh:
                fresh[id(original)] = _like(original, host, requires_grad)
            mine = fresh[id(original)]
        else:
            set_local(original, host)
            if isinstance(original, nn.Parameter):
                original.requires_grad_(requires_grad)
            mine = original
        if ours(entry.table.get(entry.key)):
            entry.table[entry.key] = mine


def give_back_meta(item: Owned, spec: TensorSpec, *, ours: Callable[[object], bool]) -> None:
    """Put tensors without values back under all names of ``item``; originals where they were.

    A managed parameter cannot be without values; its placeholder stays and says why.
    """
    if item.managed is not None:
        return
    fresh: dict[int, torch.Tensor] = {}
    for entry in item.entries:
        original = entry.original
        if original.is_meta:
            mine = original
        else:
            if id(original) not in fresh:
                blank = torch.empty_strided(
                    spec.shape, spec.stride, dtype=spec.dtype, device="meta"
                )
                fresh[id(original)] = _like(original, blank, original.requires_grad)
            mine = fresh[id(original)]
        if ours(entry.table.get(entry.key)):
            entry.table[entry.key] = mine


def empty_host_run(nbytes: int) -> torch.Tensor:
    """Return host memory for one block."""
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def tensor_from(spec: TensorSpec, run: torch.Tensor) -> torch.Tensor:
    """Return the tensor of ``spec`` out of a host ``run``, in memory of its own."""
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
    part = run[spec.offset : spec.offset + spec.nbytes]
    move_bytes(bytes_of(made, spec.nbytes), part)
    return made


def _like(original: torch.Tensor, values: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    values = with_local(original, values)
    return nn.Parameter(values, requires_grad) if isinstance(original, nn.Parameter) else values
