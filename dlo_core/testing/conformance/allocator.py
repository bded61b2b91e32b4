"""Host memory: exact, honest about pinning, and given back."""

from __future__ import annotations

import gc
import mmap
import re
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from dlo_core.errors import HostMemoryError
from dlo_core.testing.conformance.base import Suite
from dlo_core.testing.conformance.lab import pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import PinnedAllocator

__all__ = ["AllocatorConformance", "page_locked"]

SIZES = (0, 1, 255, 4096, 4097, 5001, (1 << 20) + 1, (3 << 20) + 7)
_IMPOSSIBLE = 1 << 60
_ROUND_NBYTES = 8 << 20
_ROUNDS = 50
# The C library keeps some of what is freed for the next; a leak keeps all of it.
_LEAK_NBYTES = _ROUNDS * _ROUND_NBYTES // 2


class AllocatorConformance(Suite):
    """What the interface promises of ``PinnedAllocator`` and ``HostBuffer``.

    Attributes:
        locks_exactly: Whether the system locks no more than a buffer's pages; False declares
            that the driver rounds up, and then it must be seen to.
    """

    locks_exactly = True

    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        """Return the allocator under test; override it."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture named 'allocator' that returns the allocator "
            "under test; see 'Checking it' in docs/backends.md"
        )

    @pytest.fixture
    def is_locked(self) -> Callable[[torch.Tensor], bool]:
        """Return what tells whether memory really is page-locked; override it for a new driver."""
        return page_locked

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_buffer_has_the_exact_size(self, allocator: PinnedAllocator, nbytes: int) -> None:
        tensor = allocator.allocate(nbytes).tensor
        assert tensor.nbytes == nbytes
        assert tensor.shape == (nbytes,)
        assert tensor.dtype == torch.uint8
        assert tensor.device.type == "cpu"
        assert tensor.is_contiguous()
        spare = tensor.untyped_storage().nbytes() - nbytes
        assert 0 <= spare < mmap.PAGESIZE, f"{spare} bytes were allocated in vain"

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_buffer_is_honest_about_pinning(
        self,
        allocator: PinnedAllocator,
        is_locked: Callable[[torch.Tensor], bool],
        nbytes: int,
    ) -> None:
        buffer = allocator.allocate(nbytes)
        if nbytes:
            buffer.tensor.fill_(1)
            assert buffer.pinned == is_locked(buffer.tensor), (
                f"the buffer says pinned={buffer.pinned}, and its memory is not so"
            )
        if buffer.pinned:
            assert buffer.locked_nbytes >= nbytes
        else:
            assert buffer.locked_nbytes == 0, "pageable memory has no locked bytes"

    def test_no_more_is_locked_than_asked_for(self, allocator: PinnedAllocator) -> None:
        sizes = [n for n in SIZES if n >= 1 << 20]
        buffers = [allocator.allocate(nbytes) for nbytes in sizes]
        if not any(buffer.pinned for buffer in buffers):
            pytest.skip("this allocator's memory is pageable")
        exact = all(
            buffer.locked_nbytes <= nbytes + 2 * mmap.PAGESIZE
            for buffer, nbytes in zip(buffers, sizes, strict=True)
        )
        if self.locks_exactly:
            assert exact, [(n, b.locked_nbytes) for n, b in zip(sizes, buffers, strict=True)]
        else:
            assert not exact, "locks_exactly = False, but no more was locked than asked for"

    def test_a_buffer_keeps_what_is_written(self, allocator: PinnedAllocator) -> None:
        buffers = [allocator.allocate(nbytes) for nbytes in SIZES]
        for seed, buffer in enumerate(buffers):
            buffer.tensor.copy_(pattern(buffer.tensor.nbytes, seed))
        for seed, buffer in enumerate(buffers):
            assert torch.equal(buffer.tensor, pattern(buffer.tensor.nbytes, seed))

    def test_a_buffer_begins_at_an_aligned_address(self, allocator: PinnedAllocator) -> None:
        buffers = [allocator.allocate(nbytes) for nbytes in SIZES if nbytes]
        assert [buffer.tensor.data_ptr() % 64 for buffer in buffers] == [0] * len(buffers)

    @pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "enable_grad"])
    def test_a_buffer_is_ordinary_memory_in_any_grad_mode(
        self, allocator: PinnedAllocator, mode: str
    ) -> None:
        with getattr(torch, mode)():
            buffer = allocator.allocate(256)
        assert not buffer.tensor.is_inference()
        assert not buffer.tensor.requires_grad
        buffer.tensor.fill_(1)
        assert buffer.tensor.view(torch.float32).shape == (64,)

    def test_release_may_be_called_twice(self, allocator: PinnedAllocator) -> None:
        kept, gone = allocator.allocate(4097), allocator.allocate(4097)
        kept.tensor.fill_(7)
        gone.release()
        gone.release()
        assert bool((kept.tensor == 7).all())

    def test_a_released_buffer_cannot_be_used(self, allocator: PinnedAllocator) -> None:
        buffer = allocator.allocate(4097)
        buffer.release()
        try:
            buffer.tensor.fill_(1)
        except Exception:
            return
        pytest.fail("tensor of a released buffer is still to be had: let it raise")

    def test_memory_that_cannot_be_had_is_named(self, allocator: PinnedAllocator) -> None:
        with pytest.raises(HostMemoryError) as caught:
            allocator.allocate(_IMPOSSIBLE)
        digits = re.sub(r"[,_ ]", "", str(caught.value))
        assert str(_IMPOSSIBLE) in digits, f"the message names no bytes: {caught.value}"
        # And the next one that can be had is had.
        assert allocator.allocate(64).tensor.nbytes == 64

    def test_nothing_leaks(self, allocator: PinnedAllocator) -> None:
        process = psutil.Process()

        def rounds(count: int) -> None:
            for _ in range(count):
                buffer = allocator.allocate(_ROUND_NBYTES)
                buffer.tensor.fill_(1)
                buffer.release()

        rounds(2)
        gc.collect()
        before = process.memory_info().rss
        rounds(_ROUNDS)
        gc.collect()
        grown = process.memory_info().rss - before
        assert grown < _LEAK_NBYTES, (
            f"{grown:,} bytes stayed after {_ROUNDS} buffers of {_ROUND_NBYTES:,} were released"
        )


def page_locked(tensor: torch.Tensor) -> bool:
    """Return whether the memory is locked, as torch's accelerator or the system sees it."""
    if torch.accelerator.is_available() and tensor.is_pinned():
        return True
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return False
    address, inside = tensor.data_ptr(), False
    for line in smaps.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith("Locked:"):
            return int(line.split()[1]) > 0
    return False
