"""Borrowing: device memory of an offload that coding may use between two passes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dlo_core.slots import Pool
    from dlo_core.transfer import Transfer

__all__ = ["Borrower", "spare_buffers"]


class Borrower(Protocol):
    """Whatever codes in device memory."""

    def borrow_from(self, borrow: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Use these buffers."""


def spare_buffers(pool: Pool, transfer: Transfer) -> list[torch.Tensor]:
    """Return slots and homes, free to be written between two passes; what they hold is forgotten.

    Args:
        pool: Has them; nothing where it is busy, in a pass, failed, or nobody's yet.
        transfer: Fills them.
    """
    owner = pool.owner
    if owner is None or owner.open or pool.busy or pool.failure is not None:
        return []
    transfer.settle()
    transfer.stand_still()
    owner.forget()
    transfer.forget_decoded()
    return [slot.buffer for slot in (*pool.slots, *pool.homes)]
