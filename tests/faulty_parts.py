"""Faulty allocators and collectives, as ``faulty_backends.py`` has faulty backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from dlo_core.collective import all_gather_bytes
from dlo_core.cpu import CpuBackend, GlooCollective, PageableAllocator, PageableBuffer
from dlo_core.cpu_stream import current_stream
from dlo_core.testing.conformance import AllocatorConformance, CollectiveConformance

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, PinnedAllocator


# --- allocators -----------------------------------------------------------------------------------


class RoundedBuffer(PageableBuffer):
    """Takes a power of two."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(1 << max(nbytes - 1, 0).bit_length())


class SlicedBuffer(PageableBuffer):
    """Shows what was asked for, and takes a power of two."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(1 << max(nbytes - 1, 0).bit_length())
        self._tensor = self.tensor[:nbytes]


class LyingBuffer(PageableBuffer):
    """Says that it is page-locked."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.pinned, self.locked_nbytes = True, nbytes


class ImmortalBuffer(PageableBuffer):
    """Keeps its memory."""

    kept: list[torch.Tensor] = []  # noqa: RUF012 - the leak is the fault

    def release(self) -> None:
        self.kept.append(self.tensor)


class FaultyAllocator(PageableAllocator):
    def __init__(self, kind: type[PageableBuffer]) -> None:
        self.kind = kind

    def allocate(self, nbytes: int) -> PageableBuffer:
        return self.kind(nbytes)


class AllocatorFault(AllocatorConformance):
    kind: type[PageableBuffer]

    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return FaultyAllocator(self.kind)


class TestRoundingAllocator(AllocatorFault):
    kind = RoundedBuffer


class TestSlicingAllocator(AllocatorFault):
    kind = SlicedBuffer


class TestLyingAllocator(AllocatorFault):
    kind = LyingBuffer


class TestLeakingAllocator(AllocatorFault):
    kind = ImmortalBuffer


class Registering(PageableAllocator):
    """Locks memory by name only."""

    def __init__(self) -> None:
        self.locked: set[int] = set()
        self.release_unlocks = True

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> Any:
        return Registered(self, memory)


class Registered:
    def __init__(self, allocator: Registering, memory: torch.Tensor) -> None:
        self.nbytes = memory.nbytes
        self._allocator, self._address = allocator, memory.data_ptr()
        allocator.locked.add(self._address)

    def release(self) -> None:
        if self._allocator.release_unlocks:
            self._allocator.locked.discard(self._address)


class RegistrationFault(AllocatorConformance):
    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        return Registering()

    @pytest.fixture
    def is_locked(self, allocator: Registering) -> Callable[[torch.Tensor], bool]:
        return lambda memory: memory.data_ptr() in allocator.locked


class TestRegistrationThatStays(RegistrationFault):
    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        made = Registering()
        made.release_unlocks = False
        return made


class TestRegistrationThatDoesNothing(RegistrationFault):
    @pytest.fixture
    def is_locked(self) -> Callable[[torch.Tensor], bool]:
        return lambda memory: False


class TestSilentAllocator(AllocatorConformance):
    """Raises what it got, for memory that cannot be had."""

    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        class Plain(PageableAllocator):
            def allocate(self, nbytes: int) -> Any:
                made = super().allocate(min(nbytes, 1 << 40))
                assert made.tensor.nbytes == nbytes
                return made

        return Plain()


# --- collectives ----------------------------------------------------------------------------------


class GlobalRank(GlooCollective):
    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self.rank = dist.get_rank()


class GatherAtOnce(GlooCollective):
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather before the stream's turn."""
        all_gather_bytes(out, shard, group=self._group)


class GatherBackwards(GlooCollective):
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Put the shards down in the wrong order."""
        super().all_gather(out, shard)

        def work() -> None:
            out.copy_(out.view(self.size, -1).flip(0).reshape(-1))

        current_stream().run(work)


class ClearsFirst(GlooCollective):
    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Clear ``out``, of which the shard may be a part."""
        current_stream().run(out.zero_)
        super().all_gather(out, shard)


class ClosesTogether(GlooCollective):
    def close(self) -> None:
        """Wait for the others."""
        if self._group is not None:
            dist.barrier(self._group)
        super().close()


class ClosesOnce(GlooCollective):
    def close(self) -> None:
        """Refuse a second time."""
        assert self._group is not None
        super().close()


class WithCollective(CpuBackend):
    def __init__(self, kind: type[GlooCollective]) -> None:
        super().__init__()
        self.collective_kind = kind

    def collective(self, group: Any) -> GlooCollective:
        return self.collective_kind(group)


class CollectiveFault(CollectiveConformance):
    kind: type[GlooCollective]
    limit_s = 10.0

    @pytest.fixture
    def make_backend(self) -> Callable[[int], Backend]:
        return lambda rank: WithCollective(self.kind)


class TestCollectiveWithTheGlobalRank(CollectiveFault):
    kind = GlobalRank


class TestGatherAtOnce(CollectiveFault):
    kind = GatherAtOnce


class TestGatherBackwards(CollectiveFault):
    kind = GatherBackwards


class TestGatherThatClearsFirst(CollectiveFault):
    kind = ClearsFirst


class TestCloseThatIsACollective(CollectiveFault):
    kind = ClosesTogether
    limit_s = 4.0


class TestCloseThatMayNotBeRepeated(CollectiveFault):
    kind = ClosesOnce
