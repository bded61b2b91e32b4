"""Binding: pointing a block's parameters at a slot while it computes, at placeholders else.

The *entry* in the module's table is swapped, not the data of the parameter: a meta parameter could
not
be bound otherwise, and a gradient would be silently wrong. Unbound, the entry is a placeholder that
tells the truth about shape, dtype and device and raises on any use of its values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from dlo_core.dtensor import is_dtensor, with_local
from dlo_core.errors import UseError
from dlo_core.fsdp import ManagedBinding

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dlo_core.inventory import Owned
    from dlo_core.layout import BlockLayout, TensorSpec
    from dlo_core.slots import Slot

__all__ = ["BlockBinding", "Placeholder"]


class Placeholder(torch.Tensor):
    """Stands for a streamed tensor while its block does not compute; any use raises."""

    dlo_name: str
    dlo_reason: str
    device_mesh: Any
    placements: Any

    @staticmethod
    def __new__(
        cls: type[Placeholder], like: torch.Tensor, spec: TensorSpec, device: torch.device
    ) -> Placeholder:
        """Make a placeholder for ``like``, as ``spec`` lays it out, on ``device``.

        One for a DTensor has its global shape, and ``device_mesh`` and ``placements``.
        """
        spread: Any = like if is_dtensor(like) else None
        with torch.inference_mode(False):
            made: Placeholder = torch.Tensor._make_wrapper_subclass(
                cls,
                spec.shape if spread is None else spread.shape,
                strides=spec.stride if spread is None else spread.stride(),
                dtype=spec.dtype,
                device=device,
                requires_grad=like.requires_grad,
            )
        made.dlo_name = spec.name
        made.dlo_reason = "its block streams and does not compute now"
        if spread is not None:
            made.device_mesh, made.placements = spread.device_mesh, spread.placements
        if isinstance(like, nn.Parameter):
            made._is_param = True
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Raise: the values are not here."""
        for value in _flatten((*args, *(kwargs or {}).values())):
            if isinstance(value, Placeholder):
                value._refuse(str(func))
        raise UseError(f"{func} was called on the weights of an offloaded model")

    def _refuse(self, what: str) -> NoReturn:
        name, owner = self.dlo_name, self.dlo_name.rpartition(".")[0]
        raise UseError(
            f"{name!r} was used ({what}) but {self.dlo_reason}; read it inside the block's "
            "forward, keep "
            f"it on the device with resident=({owner!r},), or disable() first"
        )

    @property  # type: ignore[override]
    def data(self) -> NoReturn:
        """Raise: the values are not here."""
        self._refuse(".data")

    @data.setter
    def data(self, value: Any) -> NoReturn:
        self._refuse(".data = ...")

    def data_ptr(self) -> NoReturn:
        """Raise: there is no memory."""
        self._refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        """Raise: there is no memory."""
        self._refuse("untyped_storage()")

    def to_local(self, **kwargs: Any) -> NoReturn:
        """Raise: the values are not here."""
        self._refuse("to_local()")

    def full_tensor(self, **kwargs: Any) -> NoReturn:
        """Raise: the values are not here."""
        self._refuse("full_tensor()")

    def numpy(self, *, force: bool = False) -> NoReturn:
        """Raise: the values are not here."""
        self._refuse("numpy()")

    def tolist(self) -> NoReturn:
        """Raise: the values are not here."""
        self._refuse("tolist()")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        """Raise: a copy would have no values."""
        self._refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise: a pickle would have no values."""
        self._refuse("pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show what it stands for."""
        return f"Placeholder({self.dlo_name!r}, {tuple(self.shape)}, {self.dtype}, {self.device})"


def _flatten(values: Any) -> Any:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flatten(value)
        else:
            yield value


def _no_count(storage: int) -> int:
    return 0


# How many tensors share a storage, where torch tells.
_num_uses: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", _no_count)


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """A block's tensors over one slot.

    Attributes:
        buffer: The slot's bytes.
        storage: Address of torch's record of their memory.
        ours: How many tensors bindings have made over each storage so far.
        views: The tensors, in the order of the block's own.
        rows: What the tables get: table, key, placeholder, view.
        pairs: Each placeholder and its view.
    """

    buffer: torch.Tensor
    storage: int
    ours: Mapping[int, int]
    views: tuple[torch.Tensor, ...]
    rows: tuple[tuple[dict[str, Any], str, Placeholder, torch.Tensor], ...]
    pairs: tuple[tuple[Placeholder, torch.Tensor], ...]

    def state(self) -> tuple[int, int]:
        """Return how often the bytes were written from Python, and how many tensors share them.

        Not with those of a block that was bound for the first time meanwhile.
        """
        return self.buffer._version, _num_uses(self.storage) - self.ours[self.storage]


class BlockBinding:
    """The entries of one block, their placeholders, and cached tensors over each slot."""

    def __init__(
        self,
        block: nn.Module,
        owned: Sequence[Owned],
        layout: BlockLayout,
        device: torch.device,
        *,
        ours: dict[int, int],
    ) -> None:
        """Prepare everything; the module is not touched.

        Args:
            block: The block.
            owned: Its streamed tensors.
            layout: Where they lie in a slot, in the order of ``owned``.
            device: The compute device, which placeholders name.
            ours: How many tensors all bindings that may share memory have made over each storage.
        """
        self._block = block
        self._ours = ours
        self._owned = tuple(owned)
        self._layout = layout
        self.placeholders = tuple(
            Placeholder(item.original if item.managed is None else item.tensor, spec, device)
            for item, spec in zip(self._owned, layout.tensors, strict=True)
        )
        self._places = [
            (entry.table, entry.key, number)
            for number, item in enumerate(self._owned)
            for entry in item.entries
            if item.managed is None
        ]
        managed = [(n, item.managed) for n, item in enumerate(self._owned) if item.managed]
        self._managed = ManagedBinding(block, managed) if managed else None
        self._entries = self._places
        self._by_slot: dict[int, _Bound] = {}
        self._bound: _Bound | None = None
        self._before = (0, 0)
        self._tables: list[dict[str, Any]] = []
        self._lengths: list[int] = []
        self._children: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self.note_structure()

    def note_structure(self) -> None:
        """Remember which modules and how many tensors the block has now."""
        modules = list(self._block.modules())
        kinds = [(one._parameters, one._buffers, one._modules) for one in modules]
        self._tables = [table for tables in kinds for table in tables]
        self._lengths = [len(table) for table in self._tables]
        self._children = [
            (one._modules, tuple(one._modules.values())) for one in modules if one._modules
        ]

    def refresh(self) -> None:
        """Accept the block as it is now: bind only where a placeholder hangs."""
        self._entries = [
            (table, key, number)
            for table, key, number in self._places
            if table.get(key) is self.placeholders[number]
        ]
        self._by_slot.clear()
        self.note_structure()

    def attach(self) -> None:
        """Put the placeholders in: dict assignments only."""
        for table, key, number in self._entries:
            table[key] = self.placeholders[number]
        if self._managed is not None:
            self._managed.attach(self.placeholders)

    def close(self, reason: str) -> None:
        """Let the views go and make every placeholder say ``reason``."""
        self._by_slot.clear()
        for placeholder in self.placeholders:
            placeholder.dlo_reason = reason

    def forget(self, slot: Slot) -> None:
        """Let the views over ``slot`` go, whose memory ends."""
        self._by_slot.pop(slot.index, None)

    def bind(self, slot: Slot) -> None:
        """Point the entries at ``slot``.

        Raises:
            UseError: The block is not the one that was offloaded any more, or gradients are asked
                for; nothing is bound then.
        """
        self._check_structure()
        made = self._by_slot.get(slot.index)
        if made is None:
            made = self._by_slot[slot.index] = self._make_counted(slot)
        for table, key, placeholder, _ in made.rows:
            if table.get(key) is not placeholder:
                self._raise_replaced(placeholder)
        if torch.is_grad_enabled():
            self._check_grad()
        # Of a subclass torch asks much more for a flag, unless it is told not to.
        with torch._C.DisableTorchFunctionSubclass():
            for placeholder, view in made.pairs:
                # Some operators choose their kernel by this flag, in every grad mode.
                if view.requires_grad is not placeholder.requires_grad:
                    view.requires_grad_(not view.requires_grad)
        self._bound, self._before = made, made.state()
        if self._managed is not None:
            self._managed.bind(made.views, self.placeholders)
        for table, key, _, view in made.rows:
            table[key] = view

    def unbind(self, raised: bool = False) -> None:
        """Put the placeholders back.

        Args:
            raised: Whether the block raised; then what its frames still hold says nothing.

        Raises:
            UseError: The forward replaced a tensor, wrote into one, or kept one; all of ours are
                unbound.
        """
        bound, self._bound = self._bound, None
        assert bound is not None
        replaced = None
        for table, key, placeholder, view in bound.rows:
            if table.get(key) is view:
                table[key] = placeholder
            else:
                replaced = placeholder
        if self._managed is not None:
            self._managed.unbind(self.placeholders)
        if raised:
            return
        if replaced is not None:
            self._raise_replaced(replaced)
        now = bound.state()
        if now == self._before:
            return
        (version, uses), (version_now, uses_now) = self._before, now
        name = self._layout.name
        if version_now != version:
            raise UseError(
                f"a parameter or large buffer of block {name!r} was written during its forward, "
                "but it streams and the write would be lost; keep what is written on the device, "
                f"with resident=({self._owned[0].name!r},) for example"
            )
        if uses_now > uses:
            raise UseError(
                f"a weight of block {name!r}, or a view of one, outlives the block's forward "
                "(returned, cached as an attribute, or kept by a hook); its memory is about to "
                "hold another block: clone() what is kept, or keep the weight on the device, with "
                f"resident=({self._owned[0].name!r},) for example"
            )

    def _make_counted(self, slot: Slot) -> _Bound:
        """Make the tensors over ``slot``, and count them among ours.

        Blocks that stay may share one storage, and a block may be bound for the first time while
        another one computes.
        """
        storage = slot.buffer.untyped_storage()._cdata
        before = _num_uses(storage)
        made = self._make(slot)
        self._ours[storage] = self._ours.get(storage, 0) + _num_uses(storage) - before
        return made

    def _make(self, slot: Slot) -> _Bound:
        made: list[torch.Tensor] = []
        # Tensors that are made in inference mode could never be used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for item, spec in zip(self._owned, self._layout.tensors, strict=True):
                view = spec.view(slot.buffer)
                if item.managed is None:
                    view = with_local(item.original, view)
                    if item.is_parameter:
                        view = nn.Parameter(view, requires_grad=item.original.requires_grad)
                made.append(view)
        return _Bound(
            slot.buffer,
            slot.buffer.untyped_storage()._cdata,
            self._ours,
            views=tuple(made),
            rows=tuple(
                (table, key, self.placeholders[number], made[number])
                for table, key, number in self._entries
            ),
            pairs=tuple(zip(self.placeholders, made, strict=True)),
        )

    def _check_structure(self) -> None:
        if list(map(len, self._tables)) != self._lengths:
            self._raise_changed()
        for table, children in self._children:
            if tuple(table.values()) != children:
                self._raise_changed()

    def _check_grad(self) -> None:
        for item, placeholder in zip(self._owned, self.placeholders, strict=True):
            theirs = item.managed is not None and item.managed.parameter.requires_grad
            if theirs or placeholder.requires_grad:
                raise UseError(
                    f"offloaded weights have no gradients, but {placeholder.dlo_name!r} requires "
                    "one "
                    "and grad mode is on; use torch.inference_mode() or torch.no_grad(), or freeze "
                    "the model with requires_grad_(False)"
                )

    def _raise_replaced(self, placeholder: Placeholder) -> NoReturn:
        name = placeholder.dlo_name
        raise UseError(
            f"{name!r} was replaced after offload(); put the old parameter back, call refresh(), "
            "or "
            "disable() before changing the model"
        )

    def _raise_changed(self) -> NoReturn:
        known = {(id(table), key) for table, key, _ in self._places}
        prefix = self._layout.name
        for path, module in self._block.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    fresh = (id(table), key) not in known and not self._is_noted(module, key)
                    if tensor is not None and fresh:
                        name = ".".join(part for part in (prefix, path, key) if part)
                        raise UseError(
                            f"{name!r} is new: it appeared in the block after offload(); call "
                            "refresh() "
                            "so that it is placed on the device"
                        )
        raise UseError(
            f"modules of block {prefix!r} were replaced or removed after offload(); call refresh()"
        )

    def _is_noted(self, module: nn.Module, key: str) -> bool:
        """Return whether the module was there, with as many tensors, when the block was noted."""
        for at in range(0, len(self._tables), 3):
            parameters, buffers = self._tables[at : at + 2]
            if parameters is module._parameters:
                same = len(module._parameters) == self._lengths[at]
                return same and len(buffers) == self._lengths[at + 1]
        return False
