"""A span: what one lane (compute, wait, copy, gather) did for one block, and when."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Span"]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane.

    Attributes:
        lane: ``"compute"``, ``"wait"``, ``"copy"`` or ``"gather"``.
        block: Dotted name of the block.
        start_ms: Milliseconds from the start of the pass.
        end_ms: Milliseconds from the start of the pass.
    """

    lane: str
    block: str
    start_ms: float
    end_ms: float
