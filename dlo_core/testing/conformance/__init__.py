"""The conformance suite: classes to inherit, each with one fixture to override.

Load the plug-in with them (``pytest -p dlo_core.testing.pytest_plugin``). A test that fails says
which promise of ``dlo_core.interface`` the backend breaks.
"""

from __future__ import annotations

from dlo_core.testing.conformance.allocator import AllocatorConformance
from dlo_core.testing.conformance.backend import BackendConformance
from dlo_core.testing.conformance.collective import CollectiveConformance, Member

__all__ = ["AllocatorConformance", "BackendConformance", "CollectiveConformance", "Member"]
