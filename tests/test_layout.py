"""The layout: any tensors of a block find their place in one run and come back as they were."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_core.layout import BlockLayout, TensorSpec, align_up, contiguous_stride, span_nbytes
from dlo_core.rawbytes import bytes_of, move_bytes

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
bounded = settings(deadline=None, derandomize=True, max_examples=80, database=None)


@st.composite
def tensors(draw: DrawFn) -> torch.Tensor:
    """Draw a tensor of any dtype: dense, permuted, with gaps, expanded, 0-dim or empty."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    steps = tuple(draw(st.sampled_from((1, 1, 1, 2))) for _ in shape)
    whole = [length * step for length, step in zip(shape, steps, strict=True)]
    gen = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    made = (torch.rand(whole, generator=gen) * 97).to(torch.uint8)
    # Bools other than 0 and 1 are no values.
    made = made % 2 if dtype == torch.bool else made
    made = made.to(dtype)
    for dim, step in enumerate(steps):
        made = made[(slice(None),) * dim + (slice(None, None, step),)]
    if draw(st.booleans()):
        made = made.permute(draw(st.permutations(range(len(shape)))))
    if draw(st.integers(0, 4)) == 0:
        made = made.unsqueeze(0).expand(3, *made.shape)
    return made


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))


def pack(owned: list[torch.Tensor], alignment: int) -> BlockLayout:
    return BlockLayout.pack(
        "blocks.0", [spec_of(f"t{i}", t) for i, t in enumerate(owned)], alignment
    )


def bytes_in(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements' bytes in row-major order, whatever the strides."""
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    dense.view(tensor.shape).copy_(tensor)
    return dense.view(torch.uint8)


def run_of(layout: BlockLayout, owned: list[torch.Tensor]) -> torch.Tensor:
    run = torch.full((layout.nbytes,), 0xFF, dtype=torch.uint8)
    for spec, tensor in zip(layout.tensors, owned, strict=True):
        part = run[spec.offset : spec.offset + spec.nbytes]
        move_bytes(part, bytes_of(tensor, spec.nbytes))
    return run


@given(st.lists(tensors(), max_size=6), st.sampled_from((64, 256, 512)))
@bounded
def test_any_tensor_comes_back_with_its_bits_shape_strides_and_dtype(
    owned: list[torch.Tensor], alignment: int
) -> None:
    layout = pack(owned, alignment)
    run = run_of(layout, owned)
    for spec, tensor in zip(layout.tensors, owned, strict=True):
        back = spec.view(run)
        assert back.dtype == tensor.dtype
        assert back.shape == tensor.shape
        assert back.stride() == tensor.stride()
        assert torch.equal(bytes_in(back), bytes_in(tensor))
        assert back.numel() == 0 or back.data_ptr() == run.data_ptr() + spec.offset


@given(st.lists(tensors(), max_size=6), st.sampled_from((64, 256, 512)))
@bounded
def test_tensors_are_aligned_in_order_apart_and_waste_less_than_one_alignment_each(
    owned: list[torch.Tensor], alignment: int
) -> None:
    layout = pack(owned, alignment)
    end = 0
    for spec in layout.tensors:
        assert spec.offset % alignment == 0
        assert end <= spec.offset < end + alignment
        end = spec.offset + spec.nbytes
    assert layout.nbytes % alignment == 0
    assert end <= layout.nbytes < end + alignment
    payload = sum(spec.nbytes for spec in layout.tensors)
    assert layout.nbytes <= payload + (alignment - 1) * len(owned)


@given(tensors())
@bounded
def test_the_span_reaches_exactly_from_the_first_element_to_the_last(tensor: torch.Tensor) -> None:
    spec = spec_of("t", tensor)
    where = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    numbers = where.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    expected = 0
    if tensor.numel():
        low, high = int(numbers.min()), int(numbers.max())
        assert low == tensor.storage_offset()
        expected = (high - low + 1) * tensor.element_size()
    assert spec.nbytes == expected


@given(tensors())
@bounded
def test_row_major_says_what_torch_calls_contiguous(tensor: torch.Tensor) -> None:
    assert spec_of("t", tensor).row_major == tensor.is_contiguous()


@given(st.lists(st.integers(0, 6), max_size=5).map(tuple))
@bounded
def test_contiguous_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


def test_a_transposed_and_a_channels_last_weight_keep_their_strides() -> None:
    flat = torch.arange(6.0).view(2, 3).t()
    conv = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layout = pack([flat, conv], 256)
    run = run_of(layout, [flat, conv])
    first, second = (spec.view(run) for spec in layout.tensors)
    assert first.stride() == (1, 3)
    assert second.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(first, flat)
    assert torch.equal(second, conv)
    assert not layout.tensors[0].row_major
    assert not layout.tensors[1].row_major


def test_an_expanded_tensor_travels_once() -> None:
    layout = pack([torch.rand(4).expand(1000, 4)], 64)
    assert layout.tensors[0].nbytes == 16
    assert layout.nbytes == 64


def test_a_scalar_and_an_empty_tensor_have_a_place() -> None:
    layout = pack([torch.tensor(3.0), torch.empty(0, 3), torch.tensor(True)], 256)
    assert [(spec.offset, spec.nbytes) for spec in layout.tensors] == [(0, 4), (256, 0), (256, 1)]
    assert layout.nbytes == 512


def test_a_block_without_tensors_has_an_empty_run() -> None:
    assert pack([], 256).nbytes == 0


def test_align_up_goes_to_the_next_multiple_and_stays_on_one() -> None:
    assert [align_up(nbytes, 64) for nbytes in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]


def test_an_empty_shape_spans_one_element_and_a_zero_in_it_none() -> None:
    assert span_nbytes((), (), 4) == 4
    assert span_nbytes((3, 0), (7, 1), 4) == 0


@given(st.lists(tensors(), min_size=1, max_size=4))
@bounded
def test_equal_layouts_have_equal_digests(owned: list[torch.Tensor]) -> None:
    again = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in owned]
    assert pack(owned, 256).digest() == pack(again, 256).digest()


def test_the_digest_is_the_same_on_every_machine_and_python() -> None:
    layout = pack([torch.empty(2, 3), torch.empty(4, dtype=torch.bfloat16)], 256)
    assert layout.canonical() == (
        b'["blocks.0",512,[["t0","torch.float32",[2,3],[3,1],0],'
        b'["t1","torch.bfloat16",[4],[1],256]]]'
    )
    assert layout.digest().hex().startswith("350a79731a8f7182")


@pytest.mark.parametrize(
    "change",
    [
        {"name": "blocks.1"},
        {"nbytes": 1024},
        {"name_of_tensor": "other"},
        {"dtype": torch.int32},
        {"shape": (3, 2)},
        {"stride": (1, 2)},
        {"offset": 256},
        {"tensors": ()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_layout_that_differs_in_anything_has_another_digest(change: dict[str, object]) -> None:
    layout = pack([torch.empty(2, 3)], 256)
    of_tensor = {"dtype", "shape", "stride", "offset"}
    if "name_of_tensor" in change:
        change = {"tensors": (dataclasses.replace(layout.tensors[0], name="other"),)}
    elif of_tensor & change.keys():
        changed = dataclasses.replace(layout.tensors[0], **change)  # type: ignore[arg-type]
        change = {"tensors": (changed,)}
    other = dataclasses.replace(layout, **change)  # type: ignore[arg-type]
    assert other.digest() != layout.digest()
