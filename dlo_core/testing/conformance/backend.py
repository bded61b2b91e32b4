"""The suite of a backend: all that the interface promises, and the engine on it."""

from __future__ import annotations

from dlo_core.testing.conformance.checks import CheckConformance
from dlo_core.testing.conformance.codec import CodecConformance
from dlo_core.testing.conformance.copies import CopyConformance
from dlo_core.testing.conformance.engine import EngineConformance
from dlo_core.testing.conformance.events import EventConformance
from dlo_core.testing.conformance.graphs import GraphConformance
from dlo_core.testing.conformance.memory import MemoryConformance
from dlo_core.testing.conformance.streams import StreamConformance

__all__ = ["BackendConformance"]


class BackendConformance(
    MemoryConformance,
    StreamConformance,
    EventConformance,
    CopyConformance,
    CheckConformance,
    CodecConformance,
    GraphConformance,
    EngineConformance,
):
    """Inherit, override the fixture ``backend``, done."""
