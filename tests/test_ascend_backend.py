"""The conformance suite on the Ascend backend: on an NPU, or on the stand-in for CANN."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import pytest
import torch
from ascend import VENDOR_WARNINGS

from dlo_core.testing.conformance import AllocatorConformance, BackendConformance

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, PinnedAllocator

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
    def is_locked(self) -> Callable[[torch.Tensor], bool]:
        # torch_npu looks at the first byte of a storage, which may be another registration's.
        def begins_locked(tensor: torch.Tensor) -> bool:
            here = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
            return torch.frombuffer(here, dtype=torch.uint8).is_pinned()

        return begins_locked
