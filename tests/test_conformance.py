"""The conformance suite, on every backend of this repository and on the example."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlo_core.cpu import CpuBackend
from dlo_core.testing.conformance import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, PinnedAllocator


class TestCpuBackend(BackendConformance):
    @pytest.fixture
    def backend(self) -> Backend:
        return CpuBackend()


class TestCpuAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return CpuBackend().allocator


class TestCpuCollective(CollectiveConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[int], Backend]:
        return lambda rank: CpuBackend()
