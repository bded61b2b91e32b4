"""The inventory: every tensor of a model, where it hangs, and whether it streams or stays.

A tensor streams when it is a parameter (or a buffer above 1 MiB) of exactly one block. All others
stay on the device: what is outside of the blocks, small buffers, tensors tied across blocks or with
the outside, and what the caller names in ``resident=``. Of these, what ``fully_shard`` manages is
left alone: FSDP has it on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.dtensor import is_dtensor, local_of
from dlo_core.errors import ConfigError
from dlo_core.fsdp import ManagedParameter, find_managed
from dlo_core.layout import span_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dlo_core.discovery import FoundBlock

__all__ = [
    "LARGE_BUFFER_NBYTES",
    "Entry",
    "Inventory",
    "Owned",
    "check_host",
    "check_plain",
    "collect",
    "take_inventory",
]

LARGE_BUFFER_NBYTES = 1 << 20
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One place where a tensor hangs: a key in a module's table.

    Attributes:
        module: The module.
        table: Its ``_parameters`` or ``_buffers``.
        key: The attribute's name.
        name: Dotted name in the model.
        persistent: Whether ``state_dict()`` has it.
        original: The tensor that hung there when the inventory was taken.
    """

    module: nn.Module
    table: dict[str, Any]
    key: str
    name: str
    persistent: bool
    original: torch.Tensor


@dataclass(slots=True, eq=False)
class Owned:
    """One tensor that dlo takes care of, under all of its names.

    Attributes:
        tensor: The first object that stands for it; of a DTensor its local part, of a managed
            parameter the run from which FSDP gathers.
        entries: Where it hangs; more than one where it is tied.
        users: Numbers of the blocks that use it; -1 for the outside.
        managed: What ``fully_shard`` knows of it; None: it does not manage this tensor.
        is_parameter: Whether it is a parameter.
    """

    tensor: torch.Tensor
    entries: list[Entry] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    managed: ManagedParameter | None = None

    @property
    def original(self) -> torch.Tensor:
        """The first object that hung in the model."""
        return self.entries[0].original

    @property
    def is_parameter(self) -> bool:
        """Whether it hangs among the parameters."""
        first = self.entries[0]
        return first.table is first.module._parameters

    @property
    def name(self) -> str:
        """The first dotted name."""
        return self.entries[0].name

    @property
    def names(self) -> tuple[str, ...]:
        """All dotted names."""
        return tuple(entry.name for entry in self.entries)

    @property
    def persistent(self) -> bool:
        """Whether a checkpoint should have it."""
        return any(entry.persistent for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        shape, stride = tuple(self.tensor.shape), self.tensor.stride()
        return span_nbytes(shape, stride, self.tensor.element_size())


@dataclass(frozen=True, slots=True)
class Inventory:
    """What streams, block by block, and what stays.

    Attributes:
        blocks: The blocks that stream something, in registration order.
        streamed: The tensors of each block.
        remainder: The tensors that stay on the device, without those that FSDP keeps there.
    """

    blocks: tuple[FoundBlock, ...]
    streamed: tuple[tuple[Owned, ...], ...]
    remainder: tuple[Owned, ...]

    def owned(self) -> Iterator[Owned]:
        """Yield every tensor once."""
        for block in self.streamed:
            yield from block
        yield from self.remainder


def take_inventory(
    model: nn.Module,
    blocks: Sequence[FoundBlock],
    *,
    resident: Sequence[str] = (),
    stored: frozenset[str] | None = None,
    device_type: str = "cpu",
) -> Inventory:
    """Return what streams and what stays.

    Args:
        model: The root module.
        blocks: Its blocks.
        resident: Dotted names of modules or tensors that stay on the device.
        stored: Names that the checkpoint has; a large buffer that it lacks stays. None: no
            checkpoint.
        device_type: Of the compute device; tensors must not be there yet.

    Raises:
        ConfigError: A tensor cannot be handled, a resident name means nothing, or nothing is left
            to stream; names the tensor and the remedy.
    """
    owned = list(collect(model, blocks))
    for item in owned:
        for entry in item.entries:
            if item.managed is None:
                check_plain(entry.name, entry.original, device_type)
    keep = _resident_test(owned, resident)
    streamed: list[list[Owned]] = [[] for _ in blocks]
    remainder: list[Owned] = []
    for item in owned:
        if _streams(item, stored) and not keep(item):
            streamed[next(iter(item.users))].append(item)
        elif item.managed is None:
            remainder.append(item)
    for block, tensors in zip(blocks, streamed, strict=True):
        _settle_managed(model, block, [item for item in owned if item.managed], tensors)
    _check_aliases(model, streamed)
    pairs = [(b, tuple(t)) for b, t in zip(blocks, streamed, strict=True) if t]
    if not pairs:
        raise ConfigError(
            f"{type(model).__name__}: nothing is left to stream: every tensor of its "
            f"{len(blocks)} blocks stays resident (tied, or named in resident={list(resident)!r}); "
            "name fewer"
        )
    return Inventory(tuple(b for b, _ in pairs), tuple(t for _, t in pairs), tuple(remainder))


def collect(model: nn.Module, blocks: Sequence[FoundBlock]) -> Iterator[Owned]:
    """Yield every tensor once, in registration order, with all the blocks that use it."""
    found: dict[object, Owned] = {}
    by_place: dict[tuple[int, str], Owned] = {}
    managed = {place: found for found in find_managed(model) for place in found.places}
    block_of = {id(block.module): number for number, block in enumerate(blocks)}
    users: dict[str, int] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        # A block that is registered twice is one block under either name.
        above = users[path.rpartition(".")[0]] if path else -1
        user = users[path] = block_of.get(id(module), above)
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None:
                    continue
                place = (id(table), key)
                item = by_place.get(place)
                if item is None:
                    theirs = managed.get(place)
                    same = _identity(tensor) if theirs is None else id(theirs)
                    fresh = Owned(local_of(tensor), managed=theirs)
                    item = found.setdefault(same, fresh)
                    by_place[place] = item
                    hidden = table is module._buffers and key in module._non_persistent_buffers_set
                    name = f"{path}.{key}" if path else key
                    item.entries.append(Entry(module, table, key, name, not hidden, tensor))
                item.users.add(user)
    yield from found.values()


def _identity(tensor: torch.Tensor) -> object:
    """Return a key that is equal for tensors that are the same bytes seen the same way."""
    if type(tensor) not in _PLAIN or tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.numel() == 0 or tensor.is_quantized:
        return id(tensor)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return (tensor.device, tensor.data_ptr(), shape, stride, tensor.dtype)


def _settle_managed(
    model: nn.Module, block: FoundBlock, managed: Sequence[Owned], streamed: Sequence[Owned]
) -> None:
    """Prepare what ``fully_shard`` manages in a block to stream: its part, not its parameter.

    Raises:
        ConfigError: It is not gathered by the block alone, or cannot stream; names it.
    """
    inside = {id(module) for module in block.module.modules()}
    mine = {id(item) for item in streamed}
    for item in streamed:
        if item.managed is None:
            continue
        unit = item.managed.unit
        apart = [other for other in managed if other.managed and other.managed.unit is unit]
        if id(unit) not in inside or any(
            id(other) not in mine and other.users != item.users for other in apart
        ):
            raise ConfigError(
                f"{item.name!r} is gathered by fully_shard together with weights outside of block "
                f"{block.name!r}, before its block runs; apply fully_shard() to every block, and "
                "then to the model"
            )
        item.managed.check(item.name, model)
        item.managed.settle()
        item.tensor = item.managed.data


def check_plain(name: str, tensor: torch.Tensor, device_type: str) -> None:
    """Refuse a tensor that is not plain bytes on the host; a DTensor's local part may be anywhere.

    Raises:
        ConfigError: Names the tensor, what it is, and the remedy.
    """
    spread, tensor = tensor, local_of(tensor)
    kind = type(tensor)
    if kind not in _PLAIN:
        raise ConfigError(
            f"{name!r} is a {kind.__module__}.{kind.__qualname__}; tensor subclasses are not "
            "supported "
            "yet: dequantise or unwrap it before offload(), or leave this model out"
        )
    problem = None
    if tensor.layout != torch.strided:
        problem = f"has layout {tensor.layout}"
    elif tensor.is_quantized:
        problem = f"is quantised ({tensor.dtype})"
    elif tensor.is_inference() and not tensor.is_meta:
        problem = "was made under torch.inference_mode() (load the model outside of it)"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "is a lazy conjugate or negative view"
    if problem:
        raise ConfigError(
            f"{name!r} {problem}; only plain strided tensors that were made outside of inference "
            "mode can be offloaded"
        )
    if not is_dtensor(spread):
        check_host(name, tensor.device, device_type)
    elif (mesh := spread.device_mesh.device_type) != device_type:  # type: ignore[attr-defined]
        raise ConfigError(
            f"{name!r} is a DTensor on a mesh of the device {mesh!r}, and offload() computes on "
            f"{device_type!r}; use one device for both"
        )


def check_host(name: str, device: torch.device, device_type: str) -> None:
    """Refuse a tensor that is on an accelerator already.

    Raises:
        ConfigError: Names the tensor and the device.
    """
    if device.type not in ("cpu", "meta"):
        where = "the compute device" if device.type == device_type else "an accelerator"
        raise ConfigError(
            f"offload() needs the weights on the host, but {name!r} is on {where} ({device}); "
            "load the "
            "model on the CPU (do not call .to(device)), or pass checkpoint= and build it on meta"
        )


class _ResidentTest:
    """Tells whether a tensor is named in ``resident=``, by itself or by a module above it."""

    def __init__(self, prefixes: Sequence[str]) -> None:
        self._prefixes = prefixes

    def __call__(self, item: Owned) -> bool:
        return any(_is_below(name, prefix) for name in item.names for prefix in self._prefixes)


def _is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _resident_test(owned: Sequence[Owned], resident: Sequence[str]) -> _ResidentTest:
    names = [name for item in owned for name in item.names]
    for prefix in resident:
        if not any(_is_below(name, prefix) for name in names):
            raise ConfigError(
                f"resident={prefix!r} names no tensor and no module with tensors of the model; "
                "give dotted names as model.named_modules() or named_parameters() has them"
            )
    return _ResidentTest(tuple(resident))


def _streams(item: Owned, stored: frozenset[str] | None) -> bool:
    if len(item.users) != 1 or -1 in item.users:
        return False
    if item.is_parameter:
        return True
    if item.nbytes <= LARGE_BUFFER_NBYTES:
        return False
    return stored is None or any(name in stored for name in item.names)


def _check_aliases(model: nn.Module, streamed: Sequence[Sequence[Owned]]) -> None:
    """Refuse modules that keep a streamed tensor outside of their tables (GRU, own lists)."""
    mine = {id(e.original): e.name for block in streamed for t in block for e in t.entries}
    registered = ("_parameters", "_buffers", "_modules")
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in registered:
                continue
            for tensor in _tensors_in(value):
                if id(tensor) in mine:
                    raise ConfigError(
                        f"{path or type(model).__name__}.{attribute} keeps {mine[id(tensor)]!r} "
                        "outside "
                        "of the module's parameters, where it cannot follow the weights; pass "
                        f"resident=({mine[id(tensor)].rpartition('.')[0]!r},)"
                    )


def _tensors_in(value: Any, depth: int = 2) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item, depth - 1)
