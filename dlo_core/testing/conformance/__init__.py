"""The conformance suite: classes to inherit, each with one fixture to override.

Load the plug-in with them (``pytest -p dlo_core.testing.pytest_plugin``). A test that fails says
which promise of ``dlo_core.interface`` the backend breaks.
"""

from __future__ import annotations

import pytest

# Before the modules are imported: a failing assert shows its values, as in an author's own tests.
pytest.register_assert_rewrite("dlo_core.testing.conformance")

from dlo_core.testing.conformance.allocator import AllocatorConformance  # noqa: E402
from dlo_core.testing.conformance.backend import BackendConformance  # noqa: E402
from dlo_core.testing.conformance.collective import CollectiveConformance, Member  # noqa: E402

__all__ = ["AllocatorConformance", "BackendConformance", "CollectiveConformance", "Member"]
