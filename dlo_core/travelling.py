"""What travels: a block as a transfer knows it, and its timing events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from dlo_core.shard import TRAILER_NBYTES, ShardPlan, trailer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.feed import Part
    from dlo_core.interface import Backend, Event
    from dlo_core.packed_cut import PackedCut

__all__ = ["BlockTimes", "TravellingBlock", "expected_trailers"]


@dataclass(slots=True)
class BlockTimes:
    """The timing events of one block: its last fill and its last call.

    Attributes:
        waited: Whether the last call waited, so that ``wait_start`` is of that call.
    """

    copy_start: Event
    copy_end: Event
    gather_start: Event
    gather_end: Event
    wait_start: Event
    wait_end: Event
    decode_end: Event
    compute_end: Event
    waited: bool = field(default=True, init=False)

    @classmethod
    def new(cls, backend: Backend) -> BlockTimes:
        """Make the events, unrecorded."""
        return cls(*(backend.new_event(timing=True) for _ in range(8)))


@dataclass(frozen=True, slots=True, eq=False)
class TravellingBlock:
    """What a transfer knows of one block.

    Attributes:
        plan: How it is cut.
        shard: This rank's bytes on the host: whole, or in parts; nothing where the feed reads them
            for each copy.
        expected: Trailers of all ranks, ``size`` rows, on the device; None where nothing is
            gathered.
        times: Its timing events.
        parts: The shard as places in it and the bytes that lie there.
        raw: Whether it travels as it computes.
    """

    plan: ShardPlan | PackedCut
    shard: torch.Tensor | Sequence[Part]
    expected: torch.Tensor | None
    times: BlockTimes
    parts: Sequence[Part] = field(init=False)
    raw: bool = field(init=False)

    def __post_init__(self) -> None:
        whole = isinstance(self.shard, torch.Tensor)
        object.__setattr__(self, "parts", ((0, self.shard),) if whole else self.shard)
        object.__setattr__(self, "raw", isinstance(self.plan, ShardPlan))


def expected_trailers(digest: bytes, block: int, size: int) -> torch.Tensor:
    """Return the trailers of all ranks for ``block`` as a host tensor of ``size`` rows."""
    rows = b"".join(trailer(digest, block, rank) for rank in range(size))
    return torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(size, TRAILER_NBYTES)
