"""Plain attributes: tensors of a model that are neither parameters nor buffers.

``nn.Module`` knows nothing of them, so no loader and no ``.to()`` places them. A model that was
made on its device has them there; one that is loaded on the host for its offload would compute
with tensors on two devices. So they are placed like small buffers: moved at ``enable``, given back
at ``disable``. Where the device is the host there is nothing to do.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.inventory import Entry, Owned

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["find_attributes"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_OPEN = (dict, OrderedDict, defaultdict, list)
_DEPTH = 3
# What nn.Module itself keeps among the attributes of a module.
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}


class _ListTable:
    """A list seen as a table, so that its items can be exchanged like a module's."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def get(self, key: str) -> Any:
        number = int(key)
        return self._items[number] if number < len(self._items) else None

    def __setitem__(self, key: str, value: Any) -> None:
        if int(key) < len(self._items):
            self._items[int(key)] = value


def find_attributes(
    model: nn.Module, known: Iterable[Owned], device_type: str
) -> tuple[list[Owned], list[str]]:
    """Return the tensors in plain attributes that must move, and what cannot be moved.

    An attribute that is one of the ``known`` tensors under another name becomes an entry of it.

    Args:
        model: The model; attributes of modules are looked at, and lists, tuples and dicts in them.
        known: The tensors that stay on the device.
        device_type: Of the compute device; nothing is found where it is the host.

    Returns:
        The tensors, and for each that cannot be moved its path and the reason.
    """
    if device_type == "cpu":
        return [], []
    by_tensor = {id(entry.original): item for item in known for entry in item.entries}
    found: list[Owned] = []
    problems: list[str] = []
    seen: set[tuple[int, str]] = set()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in _OF_TORCH:
                continue
            whole = f"{path}.{key}" if path else key
            for name, table, slot, tensor in _tensors(whole, vars(module), key, value):
                place = (id(table), slot)
                if place in seen or tensor.device.type not in ("cpu", "meta"):
                    continue
                seen.add(place)
                problem = _problem(table, tensor)
                if problem is not None:
                    problems.append(f"{name!r} {problem}")
                    continue
                target: Any = _ListTable(table) if isinstance(table, list) else table
                item = by_tensor.get(id(tensor))
                if item is None:
                    item = by_tensor[id(tensor)] = Owned(tensor)
                    found.append(item)
                item.entries.append(Entry(module, target, slot, name, False, tensor))
    return found, problems


def _problem(table: object, tensor: torch.Tensor) -> str | None:
    if type(table) not in _OPEN:
        return f"is in a {type(table).__name__}, where it cannot be exchanged"
    if tensor.is_meta:
        return "is on the meta device and has no values"
    if type(tensor) not in _PLAIN or tensor.layout != torch.strided or tensor.is_quantized:
        return f"is no plain tensor ({type(tensor).__name__}, {tensor.layout})"
    if tensor.is_inference():
        return "was made under torch.inference_mode()"
    return None


def _tensors(
    name: str, table: Any, key: str, value: object, depth: int = _DEPTH
) -> Iterator[tuple[str, Any, str, torch.Tensor]]:
    """Yield path, container, key and tensor of every tensor in ``value``."""
    if isinstance(value, torch.Tensor):
        yield name, table, key, value
    elif depth and isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _tensors(f"{name}[{number}]", value, str(number), item, depth - 1)
    elif depth and isinstance(value, dict):
        for inner, item in value.items():
            yield from _tensors(f"{name}[{inner!r}]", value, inner, item, depth - 1)
