"""The toy backend against dlo's conformance suite.

Run it with ``pytest -p dlo_core.testing.pytest_plugin test_dlo_toy.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from dlo_toy import ToyBackend

from dlo_core.testing.conformance import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, PinnedAllocator


class TestToyBackend(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return ToyBackend()


class TestToyAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return ToyBackend().allocator


class TestToyCollective(CollectiveConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[int], Backend]:
        return lambda rank: ToyBackend()
