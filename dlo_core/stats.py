"""Statistics: what an offload holds, moved and waited for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

__all__ = ["BlockState", "BlockStats", "Stats"]


class BlockState(str, Enum):
    """Where a block's whole weights are."""

    WAITING = "waiting"
    """On the host only."""
    FILLED = "filled"
    """In a slot, or on the way into it."""
    BOUND = "bound"
    """In a slot that the block computes with now."""
    RESIDENT = "resident"
    """In a slot of its own, where it stays, or on the way into it."""


@dataclass(frozen=True, slots=True)
class BlockStats:
    """One block; times are of the last pass that kept some, see ``OffloadConfig.time_every``.

    Attributes:
        name: Dotted name.
        state: Where its weights are.
        nbytes: Bytes of the whole block.
        exposed_ms: Milliseconds that the compute stream waited for it in that pass.
        transfer_ms: Milliseconds that its last copy and gather took; 0 for a resident block that
            was there when that pass began.
        overlap: 1 - exposed / transfer, not below 0; None when it did not run in that pass.
        tier: Kind of host memory of its shard: pinned, shared, mapped or pageable.
        resident: Whether it stays on the device; its state is ``WAITING`` while it is dropped.
        decode_ms: Milliseconds that decoding it took in that pass; 0 where it is not packed.
    """

    name: str
    state: BlockState
    nbytes: int
    exposed_ms: float
    transfer_ms: float
    overlap: float | None
    tier: str = "pageable"
    resident: bool = False
    decode_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """One offload on this rank.

    Counters are of all passes, times of the last one that kept some: the first three do, those that
    load resident blocks, and every ``time_every``-th.

    Attributes:
        device_bytes: Weight bytes on the device: slots, stages, resident blocks and the remainder.
        host_bytes: Bytes of host memory for this rank's shards; memory that the node's ranks share
            counts in whole.
        pinned_bytes: Bytes of host memory that the system locked, of whatever kind.
        passes: Passes ended so far.
        fills: Fills made so far.
        skipped_fills: Fills that were not needed because the slot held the block already.
        copied_bytes: Bytes copied from host to device so far.
        gathered_bytes: Bytes that gathers wrote so far.
        exposed_ms: Milliseconds that the compute stream waited for ``filled`` in that pass.
        transfer_ms: Milliseconds that the copies and gathers of these blocks took.
        overlap: 1 - exposed / transfer, not below 0; None before the first such pass.
        blocks: One a block, in registration order.
        shared_bytes: Of ``host_bytes``, what is in memory that the node's ranks have in common.
        pageable_bytes: Of ``host_bytes``, what is this rank's own and not locked.
        staging_bytes: Of ``host_bytes``, buffers through which the mapped tier goes.
        mapped_bytes: Bytes of shards that stay in the checkpoint's pages; not in ``host_bytes``.
        resident_bytes: Of ``device_bytes``, resident blocks.
        packed_ratio: Bytes of the packed blocks as they travel to those that they compute from;
            None where none is packed.
        decode_ms: Milliseconds that decoding took in that pass.
        packed_reason: With ``packed="auto"``, or None where it means that, what was chosen and why.
    """

    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    passes: int
    fills: int
    skipped_fills: int
    copied_bytes: int
    gathered_bytes: int
    exposed_ms: float
    transfer_ms: float
    overlap: float | None
    blocks: tuple[BlockStats, ...]
    shared_bytes: int = 0
    pageable_bytes: int = 0
    staging_bytes: int = 0
    mapped_bytes: int = 0
    resident_bytes: int = 0
    packed_ratio: float | None = None
    decode_ms: float = 0.0
    packed_reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that JSON can hold."""
        return asdict(self)
