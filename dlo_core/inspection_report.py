"""The report of an inspection: what was found, as frozen records that JSON can hold."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["FileReport", "Inspection", "LayoutReport", "RankReport", "StackReport"]


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file.

    Attributes:
        name: Its name.
        nbytes: Its size.
        num_tensors: Tensors in it.
    """

    name: str
    nbytes: int
    num_tensors: int


@dataclass(frozen=True, slots=True)
class LayoutReport:
    """The blocks of a stack that look the same.

    Attributes:
        numbers: Which blocks.
        num_tensors: Tensors of each.
        nbytes: Bytes of each, as it lies in a slot.
        dtypes: Bytes of each by dtype.
    """

    numbers: tuple[str, ...]
    num_tensors: int
    nbytes: int
    dtypes: dict[str, int]


@dataclass(frozen=True, slots=True)
class StackReport:
    """A container of blocks.

    Attributes:
        name: Its dotted name.
        num_blocks: Blocks in it.
        nbytes: Bytes of all of them.
        layouts: The kinds of blocks.
    """

    name: str
    num_blocks: int
    nbytes: int
    layouts: tuple[LayoutReport, ...]


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a group of some size would take.

    Attributes:
        ranks: Size of the group.
        host_nbytes: Bytes of one rank's shards, in gather mode.
        slots_nbytes: Two slots on each device.
        stages_nbytes: Two stages on each device.
    """

    ranks: int
    host_nbytes: int
    slots_nbytes: int
    stages_nbytes: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds.

    Attributes:
        path: Where it is.
        model: The class that it was compared with, or None.
        files: Its files.
        num_tensors: All tensors.
        nbytes: Bytes of all tensors.
        dtypes: Bytes by dtype.
        stacks: The blocks.
        outside_tensors: Tensors in no block, which stay on the device.
        outside_nbytes: Their bytes.
        ranks: Bytes for groups of some sizes.
        unread: Files of the folder that would not be read.
        notes: What may surprise.
        problems: Why it would be refused.
    """

    path: str
    model: str | None
    files: tuple[FileReport, ...]
    num_tensors: int
    nbytes: int
    dtypes: dict[str, int]
    stacks: tuple[StackReport, ...]
    outside_tensors: int
    outside_nbytes: int
    ranks: tuple[RankReport, ...]
    unread: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)
