"""The testing kit: shows without hardware that an engine, or a backend, keeps the order.

``World``, ``SimBackend`` and ``SimAgreement`` run the real engine, on one or several ranks in one
process, in
late, eager or random order; ``Recorder`` keeps vector clocks and reports races; ``run_ranks`` runs
real ranks
over gloo. The conformance suite for authors of backends is in ``dlo_core.testing.conformance``.
"""

from dlo_core.testing.backend import SimAgreement, SimBackend
from dlo_core.testing.recorder import Access, Race, Recorder
from dlo_core.testing.world import Deadlock, RankFailed, World

__all__ = [
    "Access",
    "Deadlock",
    "Race",
    "RankFailed",
    "Recorder",
    "SimAgreement",
    "SimBackend",
    "World",
]
