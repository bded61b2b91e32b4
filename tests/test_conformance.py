"""The conformance suite, on every backend of this repository, simulated ones and the example."""

from __future__ import annotations

import ctypes
import re
import resource
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from test_dlo_toy import TestToyAllocator, TestToyBackend, TestToyCollective

from dlo_core import registry
from dlo_core.cpu import CpuBackend
from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import Capabilities
from dlo_core.pages import PageableAllocator
from dlo_core.testing import GlooAgreement, SimAgreement, SimBackend, World, run_ranks
from dlo_core.testing.conformance import (
    AllocatorConformance,
    BackendConformance,
    CollectiveConformance,
    Member,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlo_core.interface import Backend, Collective, PinnedAllocator
    from dlo_core.testing.conformance.collective import OnRanks

# What an author of a backend has: examples/toy_backend/test_dlo_toy.py.
__all__ = ["TestToyAllocator", "TestToyBackend", "TestToyCollective"]

LIBC = ctypes.CDLL(None)
TOY = Path(__file__).resolve().parent.parent / "examples" / "toy_backend"


class TestCpuBackend(BackendConformance):
    @pytest.fixture
    def backend(self, usable_backend: Callable[[str], Backend]) -> Backend:
        return usable_backend("cpu")


class TestCpuAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return CpuBackend().allocator


class TestCpuCollective(CollectiveConformance):
    @pytest.fixture
    def make_backend(self) -> Callable[[int], Backend]:
        return lambda rank: CpuBackend()


class Locked:
    """Memory that the system keeps from being swapped out, until it is released."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.nbytes = memory.nbytes
        self._memory: torch.Tensor | None = memory
        if LIBC.mlock(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)):
            raise HostMemoryError(f"cannot lock {memory.nbytes:,} bytes; see ulimit -l")

    def release(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            LIBC.munlock(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes))


class LockingAllocator(PageableAllocator):
    """Registers memory with the system itself, which is no device but does lock it."""

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> Locked:
        return Locked(memory)


@pytest.mark.skipif(
    0 <= resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] < 4 << 20, reason="ulimit -l is too low"
)
class TestLockingAllocator(AllocatorConformance):
    @pytest.fixture
    def capabilities(self) -> Capabilities:
        return Capabilities(readonly_registration=True)

    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return LockingAllocator()


# --- hardware -------------------------------------------------------------------------------------


class TestCudaBackend(BackendConformance):
    @pytest.fixture
    def backend(self, usable_backend: Callable[[str], Backend]) -> Backend:
        return usable_backend("cuda")


class TestCudaAllocator(AllocatorConformance):
    @pytest.fixture
    def allocator(self, usable_backend: Callable[[str], Backend]) -> PinnedAllocator:
        return usable_backend("cuda").allocator

    @pytest.fixture
    def capabilities(self, usable_backend: Callable[[str], Backend]) -> Capabilities:
        return usable_backend("cuda").capabilities


class TestCudaCollective(CollectiveConformance):
    start_method = "spawn"
    limit_s = 55.0

    @pytest.fixture
    def make_backend(self, usable_backend: Callable[[str], Backend]) -> Callable[[int], Backend]:
        usable_backend("cuda")
        return partial(backend_of_rank, "cuda")


def backend_of_rank(kind: str, rank: int) -> Backend:
    """Return the backend for the device of ``rank``."""
    return registry.get_backend(f"{kind}:{rank}")


# --- simulations ----------------------------------------------------------------------------------


class SimSuite(BackendConformance):
    real_time = False
    mode = "late"
    host_ahead = False

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        backend = SimBackend(World(mode=self.mode), host_ahead=self.host_ahead)
        with backend.compute():
            yield backend


class TestLateSim(SimSuite):
    pass


@pytest.mark.slow
class TestLateSimWhoseHostRunsAhead(SimSuite):
    host_ahead = True

    def test_a_codec_refuses_a_row_that_is_too_short(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip("what the codec of a simulation refuses shows on its stream")


class EarlySuite(SimSuite):
    # The time at which queued work is done is the mode's to choose.
    known_limits: ClassVar = {
        "test_queued_work_does_not_hold_the_host": "all is done at once",
        "test_asking_a_check_never_waits": "all is done at once",
    }


@pytest.mark.slow
class TestEagerSim(EarlySuite):
    mode = "eager"


@pytest.mark.slow
class TestRandomSim(SimSuite):
    mode = "random"

    def test_queued_work_does_not_hold_the_host(self, *args: Any, **kwargs: Any) -> None:
        pytest.skip("the seed decides whether queued work is done at once")


class SimCollectiveConformance(CollectiveConformance):
    """Ranks of one world, which are threads."""

    mode = ""

    @pytest.fixture
    def on_ranks(self) -> OnRanks:
        def on_ranks(check: Callable[..., None], size: int, *args: Any, outsiders: int = 0) -> None:
            if outsiders:
                pytest.skip("the group of a simulation is its job")
            world = World(size, mode=self.mode)
            world.run_ranks(lambda rank: check(member_of_world(world, rank), *args))

        return on_ranks


def member_of_world(world: World, rank: int) -> Member:
    """Return a member whose group is the world."""
    backend, agreement = SimBackend(world, rank), SimAgreement(world, rank)

    def new_collective() -> Collective:
        return backend.collective(agreement.new_group("simulated", 1.0))

    return Member(backend, rank, world.size, agreement, new_collective, agreement.barrier)


class TestLateSimCollective(SimCollectiveConformance):
    mode = "late"


@pytest.mark.slow
class TestEagerSimCollective(SimCollectiveConformance):
    mode = "eager"


@pytest.mark.slow
class TestRandomSimCollective(SimCollectiveConformance):
    mode = "random"


class SimOverGlooConformance(CollectiveConformance):
    """Ranks that are processes of a gloo job."""

    mode = ""

    @pytest.fixture
    def on_ranks(self) -> OnRanks:
        def on_ranks(check: Callable[..., None], size: int, *args: Any, outsiders: int = 0) -> None:
            def child(rank: int) -> None:
                members = list(range(outsiders, outsiders + size))
                group = torch.distributed.new_group(members)
                if rank in members:
                    check(member_of_job(self.mode, group), *args)

            run_ranks(child, outsiders + size)

        return on_ranks


def member_of_job(mode: str, group: Any) -> Member:
    """Return a member whose group is ``group``."""
    backend = SimBackend(World(mode=mode))
    agreement = GlooAgreement(backend, group)

    def new_collective() -> Collective:
        return backend.collective(agreement.new_group("gloo", 15.0))

    rank, size = agreement.rank, agreement.size
    return Member(backend, rank, size, agreement, new_collective, agreement.barrier)


@pytest.mark.slow
class TestLateSimOverGloo(SimOverGlooConformance):
    mode = "late"


@pytest.mark.slow
class TestEagerSimOverGloo(SimOverGlooConformance):
    mode = "eager"


@pytest.mark.slow
class TestRandomSimOverGloo(SimOverGlooConformance):
    mode = "random"


# --- the example ----------------------------------------------------------------------------------


def test_the_example_is_found_by_its_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = r'\[project\.entry-points\.dlo\]\n(\w+) = "(\w+)"\n'
    found = re.search(table, (TOY / "pyproject.toml").read_text())
    assert found is not None
    info = tmp_path / "dlo_toy-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlo-toy\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[dlo]\n{found[1]} = {found[2]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert repr(registry.get_backend("toy:0")) == "ToyBackend(device='cpu')"
    with pytest.raises(BackendError, match="toy:7"):
        registry.get_backend("toy:7")


def test_the_example_is_under_150_lines_of_code() -> None:
    lines = (TOY / "dlo_toy.py").read_text().splitlines()
    assert sum(bool(line.strip()) for line in lines) < 150
