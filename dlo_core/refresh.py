"""Refreshing: which tensors of a model are new since it was offloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.binding import Placeholder
from dlo_core.errors import ConfigError
from dlo_core.inventory import check_plain, collect
from dlo_core.layout import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch
    from torch import nn

    from dlo_core.inventory import Owned

__all__ = ["new_tensors", "spec_of"]


def new_tensors(
    model: nn.Module, known: Collection[tuple[int, str]], device: torch.device
) -> list[Owned]:
    """Return the tensors that are neither placeholders, nor known, nor on the device already.

    Args:
        model: The offloaded model.
        known: Places (table, key) of resident tensors.
        device: The compute device.

    Raises:
        ConfigError: A new tensor cannot be handled; names it.
    """
    fresh = []
    for item in collect(model, ()):
        if item.managed is not None or isinstance(item.tensor, Placeholder):
            continue
        if all((id(entry.table), entry.key) in known for entry in item.entries):
            continue
        if item.tensor.device.type == device.type != "cpu":
            continue
        check_plain(item.name, item.tensor, device.type)
        if item.tensor.is_meta:
            raise ConfigError(
                f"{item.name!r} is new and on the meta device; give it values before refresh()"
            )
        fresh.append(item)
    return fresh


def spec_of(item: Owned) -> TensorSpec:
    """Return the spec of a tensor that has values, not yet placed."""
    return TensorSpec(
        item.name, item.tensor.dtype, tuple(item.tensor.shape), tuple(item.tensor.stride())
    )
