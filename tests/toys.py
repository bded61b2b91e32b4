"""Toys, from the testing kit."""

from __future__ import annotations

from dlo_core.testing.toys import (
    TOYS,
    WIDTH,
    AwkwardBlock,
    Block,
    NestedToy,
    OrderedToy,
    Toy,
    WideBlock,
    assert_restored,
    inputs,
    make_mixed_toy,
    make_toy,
    same_bits,
    snapshot,
    twin,
)

__all__ = [
    "TOYS",
    "WIDTH",
    "AwkwardBlock",
    "Block",
    "NestedToy",
    "OrderedToy",
    "Toy",
    "WideBlock",
    "assert_restored",
    "inputs",
    "make_mixed_toy",
    "make_toy",
    "same_bits",
    "snapshot",
    "twin",
]
