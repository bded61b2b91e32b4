"""What a bench's processes import by name: models with arguments of their own, and targets."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import torch
from toys import inputs, make_toy

if TYPE_CHECKING:
    from torch import nn

    from dlo_core.bench.launch import Member

__all__ = ["answer", "dies", "hangs", "nothing", "raises", "two_linears"]


def two_linears() -> tuple[nn.Module, tuple[torch.Tensor, ...], dict[str, Any]]:
    """Return a toy and its arguments."""
    return make_toy(3), (inputs(),), {"skip": ()}


def nothing() -> None:
    """Return no model."""


def answer(member: Member, given: str) -> tuple[int, int, str, str]:
    """Say who is asked and with what."""
    member.tell("hello")
    member.barrier()
    return member.rank, member.size, given, os.environ["DLO_TEST_RANK"]


def raises(member: Member) -> None:
    """Fail."""
    raise ValueError("on purpose")


def dies(member: Member) -> None:
    """End without a word."""
    os._exit(7)


def hangs(member: Member) -> None:
    """Never answer."""
    time.sleep(100)
