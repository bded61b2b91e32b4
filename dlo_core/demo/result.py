"""What a rank tells the demo: its steps, its failure or its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from dlo_core.trace import Span

__all__ = ["Failed", "RankResult", "Step", "StreamedRun"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step is done.

    Attributes:
        rank: Who.
        mode: ``"resident"``, ``"gather"`` or ``"rank-local"``.
    """

    rank: int
    mode: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank gave up.

    Attributes:
        rank: Who.
        mode: What it was doing.
        reason: The exception in one line.
        traceback: All of it.
    """

    rank: int
    mode: str
    reason: str
    traceback: str


@dataclass(frozen=True, slots=True, eq=False)
class StreamedRun:
    """One rank's run with streamed weights.

    Attributes:
        mode: ``"gather"`` or ``"rank-local"``.
        images: What it drew, ``[n, size, size]`` in fp32.
        pass_ms: Mean wall time of a pass.
        predicted_device_nbytes: Weight bytes on the device, from the layouts alone.
        measured_device_nbytes: The most that the backend had allocated during the run.
        host_nbytes: Weight bytes that this rank kept on the host.
        passes: Passes of the model.
        fills: Fills made.
        copied_nbytes: Bytes copied from host to device.
        gathered_nbytes: Bytes that came out of gathers.
        exposed_ms: Time that compute waited for weights in the last timed pass.
        overlap: Share of copy and gather time that compute hid in that pass; None
            when nothing was copied.
        spans: The lanes of that pass.
    """

    mode: str
    images: np.ndarray
    pass_ms: float
    predicted_device_nbytes: int
    measured_device_nbytes: int
    host_nbytes: int
    passes: int
    fills: int
    copied_nbytes: int
    gathered_nbytes: int
    exposed_ms: float
    overlap: float | None
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RankResult:
    """All that one rank did.

    Attributes:
        rank: Who.
        model_nbytes: Bytes of the whole model: weights and tables.
        resident_images: What it drew with all weights resident.
        resident_pass_ms: Mean wall time of a pass of that run.
        streamed: The runs with streamed weights.
    """

    rank: int
    model_nbytes: int
    resident_images: np.ndarray
    resident_pass_ms: float
    streamed: tuple[StreamedRun, ...]
