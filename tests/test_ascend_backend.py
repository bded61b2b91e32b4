"""The conformance suite on the Ascend backend: on an NPU, or on the stand-in for CANN."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from dlo_core import registry
from dlo_core.testing.conformance import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, PinnedAllocator


class TestAscendBackend(BackendConformance):
    @pytest.fixture
    def backend(self, usable_backend: Callable[[str], Backend]) -> Backend:
        return usable_backend("npu")


class TestAscendAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self, usable_backend: Callable[[str], Backend]) -> PinnedAllocator:
        return usable_backend("npu").allocator


class TestAscendCollective(CollectiveConformance):
    start_method = "spawn"
    limit_s = 55.0

    @pytest.fixture
    def make_backend(self, usable_backend: Callable[[str], Backend]) -> Callable[[int], Backend]:
        usable_backend("npu")
        return partial(backend_of_rank, "npu")


def backend_of_rank(kind: str, rank: int) -> Backend:
    """Return the backend for the device of ``rank``."""
    return registry.get_backend(f"{kind}:{rank}")
