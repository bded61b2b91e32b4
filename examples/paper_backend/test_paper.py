import pytest

from dlo_core import registry
from dlo_core.testing.conformance import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
)


class TestPaperBackend(BackendConformance):
    @pytest.fixture
    def backend(self, usable_backend):
        return usable_backend("paper")


class TestPaperAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self, usable_backend):
        return usable_backend("paper").allocator


def backend_of_rank(rank):
    return registry.get_backend(f"paper:{rank}")


class TestPaperCollective(CollectiveConformance):
    @pytest.fixture
    def make_backend(self, usable_backend):
        usable_backend("paper")
        return backend_of_rank
