"""The codec in Triton gives the reference's bytes and bits.

It runs on a GPU, or in Triton's interpreter where ``TRITON_INTERPRET=1`` says so.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_packed import HARD, MIXTURES, mixture, raw, sprinkled

from dlo_core.packed import measure, pack, padded, write_segment
from dlo_core.packed_format import CHUNK_NBYTES

pytest.importorskip("triton")
from dlo_cuda.packed import TritonCodec

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        not (_INTERPRETED or torch.cuda.is_available()), reason="needs a GPU, or the interpreter"
    ),
    pytest.mark.timeout(300),
    # The interpreter's own, with newer NumPy.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]


def device() -> str:
    return "cpu" if _INTERPRETED else "cuda"


def compare(data: torch.Tensor) -> None:
    """Pack and decode on the device; the bytes and the bits are those of the reference."""
    codec = TritonCodec()
    run = torch.zeros(padded(len(data)), dtype=torch.uint8, device=device())
    run[: len(data)] = data.to(device())
    whole = [(0, len(data))] if len(data) else []
    index = measure(codec, run, len(data), whole)
    row = torch.empty(index.header.nbytes, dtype=torch.uint8, device=device())
    write_segment(codec, run, index, row)
    assert torch.equal(row.cpu(), pack(data))
    if len(data):
        out = torch.full_like(run, 0xEE)
        wide = torch.zeros(2, len(row) + 16384, dtype=torch.uint8, device=device())
        wide[0, : len(row)], wide[1, : len(row)] = row, row
        codec.decode(wide[:1], out)
        assert torch.equal(out, run)
        both = torch.full((2 * len(run),), 0xEE, dtype=torch.uint8, device=device())
        codec.decode(wide, both)
        assert torch.equal(both, torch.cat([run, run]))


@pytest.mark.parametrize("name", HARD)
def test_it_writes_the_bytes_of_the_reference_and_reads_them(name: str) -> None:
    compare(raw(HARD[name]))


@settings(max_examples=2 if _INTERPRETED else 300, deadline=None, database=None)
@given(MIXTURES, st.sampled_from((0, 0, 1)))
def test_any_mixture_comes_back_bit_for_bit(parts: list[tuple[str, int, int]], odd: int) -> None:
    data = mixture(parts)
    compare(data[: len(data) - odd] if len(data) else data)


@pytest.mark.parametrize("seed", range(6))
def test_garbage_touches_nothing_outside(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (2, 20480), dtype=torch.uint8, generator=gen)
    if seed % 2:
        good = pack(raw(sprinkled(CHUNK_NBYTES, 0.01, seed)))[:20480]
        rows[:, 80 : len(good)] = good[80:]
    whole = torch.full((2 * 2 * CHUNK_NBYTES + 512,), 0xAB, dtype=torch.uint8, device=device())
    TritonCodec().decode(rows.to(device()), whole[256:-256])
    assert bool((whole[:256] == 0xAB).all())
    assert bool((whole[-256:] == 0xAB).all())
