"""The packed format: every pattern of bits comes back, whatever is damaged is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_core.errors import CheckpointError
from dlo_core.packed import (
    check_segment,
    index_checksum,
    measure,
    pack,
    padded,
    unpack,
    write_segment,
)
from dlo_core.packed_format import CHUNK_NBYTES, HEADER_NBYTES, Header
from dlo_core.packed_torch import TorchCodec

if TYPE_CHECKING:
    from collections.abc import Callable

bounded = settings(deadline=None, derandomize=True, max_examples=25, database=None)
_CHUNK = CHUNK_NBYTES // 2


def raw(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8).flatten()


def weights(count: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.02
    return made.to(torch.bfloat16)


def patterns(count: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, (count,), dtype=torch.int16, generator=gen)


def powers(count: int, least: int, seed: int = 0) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    exponents = torch.randint(least, 0, (count,), generator=gen)
    return (torch.exp2(exponents.float()) * -1.3).to(torch.bfloat16)


def sprinkled(count: int, share: float, seed: int = 0) -> torch.Tensor:
    """Weights among which there are patterns of any kind."""
    gen = torch.Generator().manual_seed(seed)
    here = torch.rand(count, generator=gen) < share
    return torch.where(here, patterns(count, seed), weights(count, seed).view(torch.int16))


HARD = {
    "weights": weights(3 * _CHUNK + 17),
    "patterns": patterns(2 * _CHUNK + 1),
    "zeros": torch.zeros(_CHUNK, dtype=torch.bfloat16),
    "negative zero": torch.full((_CHUNK + 3,), -0.0, dtype=torch.bfloat16),
    "nan payloads": torch.arange(0x7F80, 0x8000, dtype=torch.int32).to(torch.int16).repeat(70),
    "denormals": torch.arange(0, 0x80, dtype=torch.int16).repeat(70),
    "infinities": torch.tensor([float("inf"), float("-inf")]).to(torch.bfloat16).repeat(5000),
    "third level": powers(2 * _CHUNK, -13),
    "third level only": powers(_CHUNK, -8),
    "a few patches": sprinkled(2 * _CHUNK, 0.003),
    "many patches": sprinkled(3 * _CHUNK, 0.1),
    "empty": torch.zeros(0, dtype=torch.bfloat16),
    "one": torch.tensor([1.5], dtype=torch.bfloat16),
    "odd": torch.tensor([1, 2, 3], dtype=torch.uint8),
}


@pytest.mark.parametrize("name", HARD)
def test_every_pattern_of_bits_comes_back(name: str) -> None:
    data = raw(HARD[name])
    row = pack(data)
    assert torch.equal(unpack(row), data)
    assert row.numel() <= padded(data.numel()) + 8192, "nothing grows by more than its index"


# Kind, number of values and seed of each part.
MIXTURES = st.lists(
    st.tuples(
        st.sampled_from(("weights", "patterns", "powers", "sprinkled", "same")),
        st.integers(1, 5000),
        st.integers(0, 1000),
    ),
    max_size=4,
)


def mixture(parts: list[tuple[str, int, int]]) -> torch.Tensor:
    """Return the bytes of these parts, one behind the other."""
    makers: dict[str, Callable[[int, int], torch.Tensor]] = {
        "weights": weights,
        "patterns": patterns,
        "powers": lambda count, seed: powers(count, -1 - seed % 30, seed),
        "sprinkled": lambda count, seed: sprinkled(count, seed / 5000, seed),
        "same": lambda count, seed: patterns(1, seed).repeat(count),
    }
    made = [raw(makers[kind](count, seed)) for kind, count, seed in parts]
    return torch.cat([torch.zeros(0, dtype=torch.uint8), *made])


@bounded
@given(MIXTURES)
def test_any_mixture_comes_back(parts: list[tuple[str, int, int]]) -> None:
    data = mixture(parts)
    assert torch.equal(unpack(pack(data)), data)


def test_weights_take_two_thirds() -> None:
    data = raw(weights(200 * _CHUNK))
    assert pack(data).numel() / data.numel() < 0.685


def test_each_tensor_has_its_table_and_other_dtypes_stay_as_they_are() -> None:
    first, second = raw(weights(2 * _CHUNK) * 1e-20), raw(weights(_CHUNK) * 1e20)
    other = raw(torch.randn(_CHUNK // 2))
    data = torch.cat([first, other, second])
    ends = [len(first), len(first) + len(other), len(data)]
    row = pack(data, [(0, ends[0]), (ends[1], ends[2])])
    assert torch.equal(unpack(row), data)
    assert check_segment(row).num_tables == 2
    assert row.numel() - 4096 < 0.72 * (len(first) + len(second)) + len(other) + 200


def test_the_size_is_known_before_anything_is_written() -> None:
    run = torch.zeros(4 * CHUNK_NBYTES, dtype=torch.uint8)
    data = raw(weights(3 * _CHUNK + 5))
    run[: len(data)] = data
    index = measure(TorchCodec(), run, len(data), [(0, len(data))])
    row = torch.full((index.header.nbytes + 64,), 0xEE, dtype=torch.uint8)
    write_segment(TorchCodec(), run, index, row)
    assert torch.equal(row[: index.header.nbytes], pack(data))
    assert not row[index.header.nbytes :].any()


@bounded
@given(st.integers(0, 10**9), st.integers(0, 255), st.integers(0, 2**20))
def test_damage_is_noticed_or_without_effect(place: int, value: int, cut: int) -> None:
    data = raw(sprinkled(2 * _CHUNK + 9, 0.02))
    row = pack(data)
    row[place % row.numel()] = value
    row = row[: row.numel() - (cut % row.numel() if cut % 3 == 0 else 0)]
    try:
        got = unpack(row)
    except CheckpointError as error:
        said = str(error)
    else:
        assert torch.equal(got, data)
        return
    assert any(word in said for word in ("damaged", "cut short", "version"))


def test_every_byte_of_header_and_index_counts() -> None:
    row = pack(raw(weights(2 * _CHUNK)))
    for place in range(check_segment(row).index_nbytes):
        row[place] ^= 0x10
        with pytest.raises(CheckpointError):
            check_segment(row)
        row[place] ^= 0x10
    check_segment(row)
    with pytest.raises(CheckpointError, match=r"it says [\d,]+ bytes, and"):
        check_segment(row[:-1])


@pytest.mark.parametrize("place", [0, 1, 1 << 27])
def test_an_entry_that_points_outside_is_refused_though_its_checksum_is_right(place: int) -> None:
    row = pack(raw(weights(2 * _CHUNK)))
    header = check_segment(row)
    words = row[HEADER_NBYTES : header.index_nbytes].view(torch.int32)
    words[4] = place
    told = replace(header, checksum=index_checksum(words) % 2**64)
    row[:HEADER_NBYTES] = torch.tensor(list(told.to_bytes()), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="entry 1 of packed data points outside"):
        check_segment(row)


def test_another_version_and_other_data_are_named() -> None:
    row = pack(raw(weights(_CHUNK)))
    other = row.clone()
    other[8] = 9
    with pytest.raises(CheckpointError, match="version 9, this dlo reads 1"):
        unpack(other)
    with pytest.raises(CheckpointError, match="begins with"):
        unpack(torch.arange(256, dtype=torch.uint8).repeat(99))
    with pytest.raises(CheckpointError, match="cut short"):
        Header.parse(b"DLO", 3)


@bounded
@given(st.integers(0, 10**6), st.integers(1, 3))
def test_decoding_garbage_touches_nothing_outside(seed: int, num_rows: int) -> None:
    """Indexing in torch raises where it would leave a tensor, and the guards stay whole."""
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (num_rows, 20480), dtype=torch.uint8, generator=gen)
    good = pack(raw(sprinkled(_CHUNK * 2, 0.01)))[:20480]
    if seed % 2:
        rows[:, HEADER_NBYTES + 16 :][:, : len(good) - 80] = good[80:]
    whole = torch.full((num_rows * 2 * CHUNK_NBYTES + 512,), 0xAB, dtype=torch.uint8)
    TorchCodec().decode(rows, whole[256:-256])
    assert bool((whole[:256] == 0xAB).all())
    assert bool((whole[-256:] == 0xAB).all())


def test_a_row_too_short_is_refused() -> None:
    rows = torch.zeros(1, 1024, dtype=torch.uint8)
    with pytest.raises(ValueError, match="holds no 1 chunks"):
        TorchCodec().decode(rows, torch.zeros(CHUNK_NBYTES, dtype=torch.uint8))
