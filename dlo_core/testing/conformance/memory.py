"""Device memory: sizes, the account of ``memory()``, and what the capabilities declare."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.interface import Backend, Capabilities, PinnedAllocator
from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.conformance.lab import SIZES

if TYPE_CHECKING:
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["MemoryConformance"]

# A device's allocator may cut its blocks no finer than this.
_SMALL_NBYTES = 4096
_LARGE_NBYTES = 1 << 20


class MemoryConformance(BackendSuite):
    """What the interface promises of device memory and of the backend's attributes."""

    def test_the_attributes_are_there(self, backend: Backend) -> None:
        assert isinstance(backend, Backend)
        assert isinstance(backend.capabilities, Capabilities)
        assert isinstance(backend.allocator, PinnedAllocator)
        assert isinstance(backend.device, torch.device)
        assert backend.name
        assert isinstance(backend.name, str)
        assert backend.comm_library
        assert isinstance(backend.comm_library, str)

    def test_the_name_is_the_device_type_where_torch_knows_it(self, backend: Backend) -> None:
        try:
            known = torch.device(backend.name).type
        except RuntimeError:
            pytest.skip(f"torch knows no device {backend.name!r}; its tensors are elsewhere")
        assert backend.device.type == known

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_device_memory_has_the_exact_size(self, backend: Backend, nbytes: int) -> None:
        made = backend.empty(nbytes)
        assert made.dtype == torch.uint8
        assert made.shape == (nbytes,)
        assert made.is_contiguous()
        assert made.device == backend.device or backend.device.index is None
        assert made.device.type == backend.device.type
        assert not made.requires_grad

    def test_pieces_of_device_memory_do_not_overlap(self, lab: Lab) -> None:
        pieces = [lab.device(nbytes) for nbytes in SIZES for _ in range(2)]
        for value, piece in enumerate(pieces):
            piece.fill_(value)
        for value, piece in enumerate(pieces):
            assert bool((lab.read(piece) == value).all())

    @pytest.mark.parametrize("nbytes", [1, 70_000, (8 << 20) + 1])
    def test_memory_counts_what_lives(self, lab: Lab, nbytes: int) -> None:
        before = lab.allocated()
        made = [lab.backend.empty(nbytes) for _ in range(3)]
        counted = lab.backend.memory().allocated - before
        slack = 3 * (_SMALL_NBYTES if nbytes < _LARGE_NBYTES else _LARGE_NBYTES)
        assert 3 * nbytes <= counted <= 3 * nbytes + slack
        view = made[0][:1].view(torch.int8)
        made.clear()
        counted = lab.allocated() - before
        assert nbytes <= counted <= nbytes + slack, "a view keeps its storage, and no other, alive"
        del view
        assert lab.allocated() == before

    def test_memory_is_told_consistently(self, lab: Lab) -> None:
        kept = lab.device(1 << 20, 1)
        memory = lab.backend.memory()
        assert kept.nbytes <= memory.allocated <= memory.reserved
        assert 0 <= memory.free <= memory.total
        assert memory.allocated <= memory.total
        assert all(
            isinstance(n, int)
            for n in (memory.allocated, memory.reserved, memory.free, memory.total)
        )

    @pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "enable_grad"])
    def test_memory_made_in_any_grad_mode_is_ordinary_memory(self, lab: Lab, mode: str) -> None:
        with getattr(torch, mode)():
            device = lab.backend.empty(256)
            host = lab.backend.allocator.allocate(256).tensor
        for made in (device, host):
            assert not made.is_inference(), (
                f"memory made under {mode} is an inference tensor: wrap the allocation in "
                "torch.inference_mode(False)"
            )
            made.fill_(1)
            assert made.view(torch.float32).shape == (64,)

    def test_pinned_memory_is_as_declared(self, backend: Backend) -> None:
        buffer = backend.allocator.allocate(4096)
        declared = backend.capabilities.pinned_memory
        assert buffer.pinned == declared, (
            f"Capabilities.pinned_memory is {declared}, but the allocator's buffer says "
            f"pinned={buffer.pinned}; declare what the device can do"
        )
        buffer.release()

    def test_host_registration_is_as_declared(self, backend: Backend) -> None:
        can, kind = backend.capabilities, type(backend.allocator)
        overrides = kind.register is not PinnedAllocator.register
        assert can.host_registration == overrides, (
            f"Capabilities.host_registration is {can.host_registration}, but {kind.__name__} "
            f"{'has a' if overrides else 'has no'} register() of its own; declare what it can do"
        )
        assert can.host_registration or not can.readonly_registration
        assert can.pinned_memory or not can.host_registration
