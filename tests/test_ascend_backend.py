"""The conformance suite on the Ascend backend: on an NPU, or on the stand-in for CANN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from ascend import VENDOR_WARNINGS

from dlo_core.testing.conformance import AllocatorConformance, BackendConformance

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, Capabilities, PinnedAllocator

pytestmark = VENDOR_WARNINGS


class TestAscendBackend(BackendConformance):
    @pytest.fixture
    def backend(self, usable_backend: Callable[[str], Backend]) -> Backend:
        return usable_backend("npu")


class TestAscendAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self, usable_backend: Callable[[str], Backend]) -> PinnedAllocator:
        return usable_backend("npu").allocator

    @pytest.fixture
    def capabilities(self, usable_backend: Callable[[str], Backend]) -> Capabilities:
        return usable_backend("npu").capabilities
