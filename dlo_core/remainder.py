"""The remainder: what is in no block, resident on the device in one run of bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from dlo_core.binding import Placeholder
from dlo_core.dtensor import is_dtensor, local_of, set_local, with_local
from dlo_core.restore import give_back, give_back_meta, let_go

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.interface import Backend
    from dlo_core.inventory import Owned
    from dlo_core.layout import BlockLayout, TensorSpec

__all__ = ["Remainder", "remainder_run"]


def remainder_run(nbytes: int) -> torch.Tensor:
    """Return host memory for a remainder, all zeros."""
    with torch.inference_mode(False):
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")


class Remainder:
    """The resident tensors of one model."""

    def __init__(
        self,
        backend: Backend,
        items: Sequence[Owned],
        layout: BlockLayout,
        host: torch.Tensor,
    ) -> None:
        """Copy the tensors to the device; the model is not touched.

        Args:
            backend: Of the device.
            items: The tensors.
            layout: Where they lie in the run, in the order of ``items``.
            host: Their bytes, as ``layout`` lays them out.
        """
        self._items = tuple(items)
        self.nbytes = layout.nbytes
        with torch.inference_mode(False), torch.no_grad():
            run = backend.empty(layout.nbytes)
            backend.copy(run, host)
            backend.current_stream().synchronize()
            self._parts = [
                (item, _Resident(item, spec, run))
                for item, spec in zip(self._items, layout.tensors, strict=True)
            ]

    def places(self) -> set[tuple[int, str]]:
        """Return the places (table, key) where these tensors hang."""
        return {(id(e.table), e.key) for item in self._items for e in item.entries}

    def attach(self) -> None:
        """Put the device tensors into the model, the same objects where their data can move."""
        with torch.inference_mode(False), torch.no_grad():
            for _, part in self._parts:
                part.attach()

    def detach(self, to: str) -> None:
        """Give the tensors back on the host, with their present values, or on meta."""
        with torch.inference_mode(False), torch.no_grad():
            for item, part in self._parts:
                if to == "meta":
                    give_back_meta(item, part.spec, ours=part.is_ours)
                else:
                    grad = part.tensor.requires_grad
                    give_back(item, part.on_host(), ours=part.is_ours, requires_grad=grad)
        self._parts = []

    def release(self, reason: str) -> None:
        """Let the device memory go; placeholders that say ``reason`` take its place."""
        with torch.inference_mode(False), torch.no_grad():
            for _, part in self._parts:
                part.release(reason)


class _Resident:
    """One tensor on the device and the objects that stand for it in the model."""

    def __init__(self, item: Owned, spec: TensorSpec, run: torch.Tensor) -> None:
        self.spec = spec
        self._item = item
        self._view = spec.view(run)
        self._device = run.device
        self._fresh: dict[int, torch.Tensor] = {}
        for entry in item.entries:
            original = entry.original
            movable = is_dtensor(original) or torch._has_compatible_shallow_copy_type(
                original, self._view
            )
            if original.is_meta or not movable:
                made = with_local(original, self._view)
                if isinstance(original, nn.Parameter):
                    made = nn.Parameter(made, original.requires_grad)
                self._fresh.setdefault(id(original), made)

    @property
    def tensor(self) -> torch.Tensor:
        """The object that stands for the tensor while it is on the device."""
        first = self._item.entries[0].original
        return self._fresh.get(id(first), first)

    def attach(self) -> None:
        for entry in self._item.entries:
            fresh = self._fresh.get(id(entry.original))
            if fresh is None:
                set_local(entry.original, self._view)
            else:
                entry.table[entry.key] = fresh

    def release(self, reason: str) -> None:
        placeholder = Placeholder(self.tensor, self.spec, self._device)
        placeholder.dlo_reason = reason
        for entry in self._item.entries:
            if self.is_ours(entry.table.get(entry.key)):
                entry.table[entry.key] = placeholder
        let_go(self._item)
        del self._view
        self._fresh = {id(entry.original): placeholder for entry in self._item.entries}

    def is_ours(self, present: object) -> bool:
        return any(
            present is self._fresh.get(id(entry.original), entry.original)
            for entry in self._item.entries
        )

    def on_host(self) -> torch.Tensor:
        now = local_of(self.tensor)
        host = torch.empty_strided(now.shape, now.stride(), dtype=now.dtype, device="cpu")
        host.copy_(now)
        return host
