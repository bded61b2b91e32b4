"""Copies: every direction, size and stride, bits, and sources that are dropped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.testing.conformance.base import BackendSuite
from dlo_core.testing.conformance.lab import SIZES, pattern

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.testing.conformance.lab import Lab

__all__ = ["CopyConformance"]

DIRECTIONS = ("host to device", "device to host", "device to device")
MARGIN = 64

# All that torch has with a size of whole bytes, of this release or an earlier one.
DTYPES = [
    dtype
    for name in [
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint64",
        "uint32",
        "uint16",
        "uint8",
        "bool",
        "complex128",
        "complex64",
    ]
    if (dtype := getattr(torch, name, None)) is not None
]

# Views of a run of bytes, as dlo makes them of a slot (rows of a gathered block), and others.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda run: run[:4096],
    "offset": lambda run: run[5:4101],
    "rows": lambda run: run[:8192].view(8, 1024)[:, 512:],
    "row ends": lambda run: run[:8192].view(512, 16)[:, 8:],
    "every second": lambda run: run[:8192:2],
    "transposed": lambda run: run[:4096].view(64, 64).t(),
}
# The views that a flat run can be copied to or from, of one shape each.
SHAPES = {
    "dense": (4096,),
    "offset": (4096,),
    "rows": (8, 512),
    "row ends": (512, 8),
    "every second": (4096,),
    "transposed": (64, 64),
}


class CopyConformance(BackendSuite):
    """What the interface promises of ``copy``."""

    @pytest.mark.parametrize("nbytes", SIZES)
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_a_copy_moves_its_bytes_and_no_others(
        self, lab: Lab, direction: str, nbytes: int
    ) -> None:
        src, dst = ends(lab, direction, nbytes + 2 * MARGIN)
        before = lab.read(dst)
        stream = lab.stream()
        inner = slice(MARGIN, MARGIN + nbytes)
        lab.copy(stream, dst[inner], src[inner])
        stream.synchronize()
        wanted = before.clone()
        wanted[inner] = lab.read(src)[inner]
        assert torch.equal(lab.read(dst), wanted)

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_a_copy_follows_the_strides_of_both_sides(
        self, lab: Lab, direction: str, view: str
    ) -> None:
        stream = lab.stream()
        for strided_dst, strided_src in ((True, False), (False, True), (True, True)):
            src, dst = ends(lab, direction, 8192)
            views = [
                VIEWS[view](run) if strided else run[:4096].view(SHAPES[view])
                for run, strided in ((dst, strided_dst), (src, strided_src))
            ]
            wanted = lab.read(dst)
            target = VIEWS[view](wanted) if strided_dst else wanted[:4096].view(SHAPES[view])
            target.copy_(lab.read(views[1]))
            lab.copy(stream, views[0], views[1])
            stream.synchronize()
            assert torch.equal(lab.read(dst), wanted)

    def test_a_copy_on_the_compute_stream_is_in_order_with_compute(self, lab: Lab) -> None:
        dst, middle = lab.device(4096), lab.device(4096)
        for value in range(1, 5):
            middle.fill_(value)
            lab.backend.copy(dst, middle)
            middle.fill_(0)
            assert bool((lab.read(dst) == value).all())

    @pytest.mark.parametrize("kind", ["ordinary", "the allocator's"])
    def test_any_host_memory_can_be_copied_in_and_out(self, lab: Lab, kind: str) -> None:
        for nbytes in SIZES:
            ordinary = kind == "ordinary"
            src = pattern(nbytes, 7) if ordinary else lab.host(nbytes, 7)
            out = torch.zeros(nbytes, dtype=torch.uint8) if ordinary else lab.host(nbytes)
            stream, middle = lab.stream(), lab.device(nbytes)
            lab.copy(stream, middle, src)
            lab.copy(stream, out, middle)
            stream.synchronize()
            assert torch.equal(out, src)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_a_source_may_be_dropped_once_its_copy_is_queued(
        self, lab: Lab, direction: str
    ) -> None:
        nbytes, rounds = 1 << 16, 8
        stream = lab.stream()
        lab.busy(stream)
        outs = []
        for seed in range(rounds):
            src, dst = ends(lab, direction, nbytes, seed=seed, keep=False)
            lab.copy(stream, dst, src)
            outs.append(dst)
            del src
            # Whoever asks next may get the memory of what was dropped.
            (lab.backend.empty(nbytes) if "device to" in direction else pattern(nbytes)).fill_(0xEE)
        stream.synchronize()
        for seed, out in enumerate(outs):
            assert torch.equal(lab.read(out), pattern(nbytes, seed)), (
                "the source's memory was used for something else before the copy had read it"
            )

    @pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "enable_grad"])
    def test_copies_work_in_every_grad_mode(self, lab: Lab, mode: str) -> None:
        with getattr(torch, mode)():
            stream, dst, src = lab.stream(), lab.device(257), lab.host(257, 8)
            lab.copy(stream, dst, src)
            lab.backend.current_stream().wait_event(stream.record_event())
            inside = dst.clone()
        lab.copy(stream, dst, src)
        stream.synchronize()
        assert torch.equal(lab.read(inside), src)
        assert torch.equal(lab.read(dst), src)

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
    def test_typed_views_at_aligned_offsets_keep_their_bits(
        self, lab: Lab, dtype: torch.dtype
    ) -> None:
        count, alignment = 96, lab.backend.capabilities.alignment
        nbytes = count * dtype.itemsize
        raw = pattern(nbytes, 9) if dtype is not torch.bool else pattern(nbytes, 9) % 2
        src = lab.host(3 * alignment + nbytes)
        for offset in (0, alignment, 3 * alignment):
            src[offset : offset + nbytes] = raw
            slot, stream = lab.device(src.nbytes), lab.stream()
            lab.copy(stream, slot, src)
            stream.synchronize()
            with torch.inference_mode(False):
                view = slot[offset : offset + nbytes].view(dtype).view(8, 12)
            assert view.data_ptr() % dtype.itemsize == 0
            back = lab.read(view).contiguous().view(-1).view(torch.uint8)
            assert torch.equal(back, raw)

    def test_device_memory_begins_at_an_aligned_address(self, lab: Lab) -> None:
        kept = [lab.backend.empty(nbytes) for nbytes in (1, 300, 70_000, 1 << 20)]
        offsets = [made.data_ptr() % 64 for made in kept]
        assert offsets == [0] * len(kept), (
            "kernels choose their way by alignment, so bits differ where memory begins at an odd "
            f"address; got {offsets} bytes past a multiple of 64"
        )


def ends(
    lab: Lab, direction: str, nbytes: int, *, seed: int = 11, keep: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a source with a pattern, and a destination with another.

    Args:
        lab: Where they live.
        direction: One of ``DIRECTIONS``.
        nbytes: Of each.
        seed: Of the source's pattern.
        keep: Whether the lab keeps host memory alive.
    """
    start, _, stop = direction.split()
    if start == "device":
        src = lab.device(nbytes, seed)
    elif keep:
        src = lab.host(nbytes, seed)
    else:
        src = lab.backend.allocator.allocate(nbytes).tensor.copy_(pattern(nbytes, seed))
    dst = lab.device(nbytes, 12) if stop == "device" else lab.host(nbytes, 12)
    return src, dst
