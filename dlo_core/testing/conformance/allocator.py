"""Host memory: exact, honest about pinning, and given back."""

from __future__ import annotations

import ctypes
import gc
import mmap
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from dlo_core.errors import HostMemoryError
from dlo_core.interface import Capabilities, PinnedAllocator
from dlo_core.testing.conformance.base import Suite
from dlo_core.testing.conformance.lab import pattern

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["AllocatorConformance", "page_locked"]

SIZES = (0, 1, 255, 4096, 4097, 5001, (1 << 20) + 1, (3 << 20) + 7)
_IMPOSSIBLE = 1 << 60
_ROUND_NBYTES = 8 << 20
_ROUNDS = 50
# The C library keeps some of what is freed for the next; a leak keeps all of it.
_LEAK_NBYTES = _ROUNDS * _ROUND_NBYTES // 2


class AllocatorConformance(Suite):
    """What the interface promises of ``PinnedAllocator`` and ``HostBuffer``."""

    @pytest.fixture
    def allocator(self) -> PinnedAllocator:
        """Return the allocator under test; override it."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture named 'allocator' that returns the allocator "
            "under test; see 'Checking it' in docs/backends.md"
        )

    @pytest.fixture
    def capabilities(self) -> Capabilities:
        """Return what the allocator's backend declares; override it with the backend's own."""
        return Capabilities()

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

    def test_no_more_is_locked_than_asked_for(
        self, allocator: PinnedAllocator, capabilities: Capabilities
    ) -> None:
        sizes = [n for n in SIZES if n >= 1 << 20]
        buffers = [allocator.allocate(nbytes) for nbytes in sizes]
        if not any(buffer.pinned for buffer in buffers):
            pytest.skip("this allocator's memory is pageable")
        exact = all(
            buffer.locked_nbytes <= nbytes + 2 * mmap.PAGESIZE
            for buffer, nbytes in zip(buffers, sizes, strict=True)
        )
        if capabilities.locks_exactly:
            assert exact, [(n, b.locked_nbytes) for n, b in zip(sizes, buffers, strict=True)]
        else:
            assert not exact, (
                "Capabilities.locks_exactly is False, but no more was locked than asked for"
            )

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

    @pytest.mark.parametrize("pages", [1, 3, 300])
    def test_memory_is_locked_where_it_lies_until_it_is_released(
        self,
        allocator: PinnedAllocator,
        is_locked: Callable[[torch.Tensor], bool],
        pages: int,
    ) -> None:
        nbytes = pages * mmap.PAGESIZE
        memory = shared_memory(nbytes)
        memory.copy_(pattern(nbytes, 3))
        self.register_or_skip(allocator)
        registration = allocator.register(memory)
        assert is_locked(memory)
        assert nbytes <= registration.nbytes <= nbytes + 2 * mmap.PAGESIZE
        registration.release()
        registration.release()
        assert not is_locked(memory), "released, and still locked"
        assert torch.equal(memory, pattern(nbytes, 3))
        memory.fill_(1)
        # And again: nothing of the first time is left.
        allocator.register(memory).release()

    def test_pages_side_by_side_are_locked_apart(
        self, allocator: PinnedAllocator, is_locked: Callable[[torch.Tensor], bool]
    ) -> None:
        self.register_or_skip(allocator)
        memory = shared_memory(8 * mmap.PAGESIZE)
        halves = memory[: 4 * mmap.PAGESIZE], memory[4 * mmap.PAGESIZE :]
        first, second = (allocator.register(half) for half in halves)
        first.release()
        assert is_locked(halves[1])
        second.release()

    def test_pages_of_a_file_are_locked_as_declared(
        self,
        allocator: PinnedAllocator,
        capabilities: Capabilities,
        is_locked: Callable[[torch.Tensor], bool],
        tmp_path: Path,
    ) -> None:
        self.register_or_skip(allocator)
        path = tmp_path / "pages"
        path.write_bytes(pattern(3 * mmap.PAGESIZE + 5).numpy().tobytes())
        memory = file_memory(path)
        if not capabilities.readonly_registration:
            pytest.skip("Capabilities.readonly_registration is False")
        registration = allocator.register(memory, readonly=True)
        assert is_locked(memory)
        registration.release()
        assert torch.equal(memory, pattern(3 * mmap.PAGESIZE + 5))

    def test_registration_that_cannot_be_had_is_named(self, allocator: PinnedAllocator) -> None:
        if type(allocator).register is not PinnedAllocator.register:
            pytest.skip("this allocator registers memory")
        with pytest.raises(HostMemoryError, match=r"8,192 bytes .* no host registration"):
            allocator.register(shared_memory(8192))

    @staticmethod
    def register_or_skip(allocator: PinnedAllocator) -> None:
        """Skip where the allocator leaves ``register`` as the interface has it."""
        if type(allocator).register is PinnedAllocator.register:
            pytest.skip("this allocator does not register memory")

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


def shared_memory(nbytes: int) -> torch.Tensor:
    """Return anonymous memory that processes may share, from the beginning of a page on."""
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED), dtype=torch.uint8)


def file_memory(path: Path) -> torch.Tensor:
    """Return the pages of a file, shared and read-only."""
    with path.open("rb") as file, warnings.catch_warnings():
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        # Torch has no read-only tensors; nobody writes to this one.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(pages, dtype=torch.uint8)


def page_locked(tensor: torch.Tensor) -> bool:
    """Return whether the memory is locked, as torch's accelerator or the system sees it."""
    # torch looks at the first byte of the storage, and a view may begin elsewhere.
    first = (ctypes.c_uint8 * 1).from_address(tensor.data_ptr())
    if torch.accelerator.is_available() and torch.frombuffer(first, dtype=torch.uint8).is_pinned():
        return True
    # A driver's own locks are in no account of the system; those of mlock() are.
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
