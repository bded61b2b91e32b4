"""The testing kit: shows without hardware that an engine, or a backend, keeps the order.

``SimBackend`` runs the real engine in a ``World``: late, eager or in a random order, on one rank,
on several in one process (``SimAgreement``), or in the processes of a gloo job (``run_ranks``,
``GlooAgreement``). ``Recorder`` keeps vector clocks and reports races. ``dlo_core.testing.toys``
has small models with awkward parts. The conformance suite for authors of backends is in
``dlo_core.testing.conformance``.
"""

from dlo_core.testing.backend import SimBackend
from dlo_core.testing.gather import SimAgreement
from dlo_core.testing.gloo import GlooAgreement
from dlo_core.testing.ranks import RanksError, run_ranks
from dlo_core.testing.recorder import Access, Race, Recorder
from dlo_core.testing.turns import Deadlock, RankFailed
from dlo_core.testing.world import MODES, World

__all__ = [
    "MODES",
    "Access",
    "Deadlock",
    "GlooAgreement",
    "Race",
    "RankFailed",
    "RanksError",
    "Recorder",
    "SimAgreement",
    "SimBackend",
    "World",
    "run_ranks",
]
