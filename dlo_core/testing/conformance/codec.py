"""Codecs: the reference's bytes and bits, in the order of the stream, and nothing outside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.packed import measure, pack, padded, write_segment
from dlo_core.packed_format import CHUNK_NBYTES
from dlo_core.testing.conformance.base import BackendSuite

if TYPE_CHECKING:
    from dlo_core.interface import Codec
    from dlo_core.testing.conformance.lab import Lab

__all__ = ["CodecConformance"]

_COUNT = 2 * CHUNK_NBYTES // 2 + 77
_MARGIN = 4096


def _values(kind: str) -> torch.Tensor:
    """Return bytes of 16-bit values: weights, all patterns, and weights with some of them."""
    gen = torch.Generator().manual_seed(5)
    weights = (torch.randn(_COUNT, generator=gen) * 0.02).to(torch.bfloat16).view(torch.int16)
    noise = torch.randint(-32768, 32768, (_COUNT,), dtype=torch.int16, generator=gen)
    share = {"weights": 0.0, "noise": 1.0, "some noise": 0.01}[kind]
    here = torch.rand(_COUNT, generator=gen) < share
    return torch.where(here, noise, weights).view(torch.uint8)


KINDS = pytest.mark.parametrize("kind", ["weights", "noise", "some noise"])


class CodecConformance(BackendSuite):
    """What the interface promises of a ``Codec``, where the backend has one."""

    @pytest.fixture
    def codec(self, lab: Lab) -> Codec:
        """Return the backend's codec."""
        codec = lab.backend.codec()
        if codec is None:
            pytest.skip("the backend has no codec of its own")
        return codec

    @KINDS
    def test_a_codec_writes_the_reference_bytes(self, lab: Lab, codec: Codec, kind: str) -> None:
        data = _values(kind)
        run = lab.device(padded(len(data)))
        run.zero_()
        run[: len(data)].copy_(data)
        lab.settle()
        index = measure(codec, run, len(data), [(0, len(data))])
        row = lab.device(index.header.nbytes)
        write_segment(codec, run, index, row)
        lab.settle()
        assert torch.equal(lab.read(row), pack(data))

    @KINDS
    def test_a_codec_decodes_rows_in_the_order_of_the_stream(
        self, lab: Lab, codec: Codec, kind: str
    ) -> None:
        data, backend = _values(kind), lab.backend
        segment = pack(data)
        nbytes = -(-len(segment) // 256) * 256
        source, rows = lab.device(2 * nbytes).view(2, nbytes), lab.device(2 * nbytes)
        out = lab.device(2 * padded(len(data)))
        source[:, : len(segment)].copy_(segment.to(source.device))
        lab.settle()
        stream = backend.new_stream()
        with backend.stream(stream):
            backend.copy(rows, source.view(-1))
            codec.decode(rows.view(2, nbytes), out)
        stream.synchronize()
        for half in lab.read(out).view(2, -1):
            assert torch.equal(half[: len(data)], data)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_codec_touches_nothing_outside(self, lab: Lab, codec: Codec, seed: int) -> None:
        """Decode garbage, in part of it a good row with a damaged index."""
        gen = torch.Generator().manual_seed(seed)
        garbage = torch.randint(0, 256, (32768,), dtype=torch.uint8, generator=gen)
        if seed % 2:
            segment = pack(_values("some noise"))
            garbage[: len(segment)] = segment
            garbage[64 + 16 * seed] ^= 0x5A
        rows = lab.device(len(garbage))
        rows.copy_(garbage.to(rows.device))
        whole = lab.device(3 * CHUNK_NBYTES + 2 * _MARGIN)
        whole.fill_(0xAB)
        lab.settle()
        codec.decode(rows.view(1, -1), whole[_MARGIN:-_MARGIN])
        lab.settle()
        seen = lab.read(whole)
        assert bool((seen[:_MARGIN] == 0xAB).all())
        assert bool((seen[-_MARGIN:] == 0xAB).all())

    def test_a_codec_refuses_a_row_that_is_too_short(self, lab: Lab, codec: Codec) -> None:
        with pytest.raises(ValueError, match="row"):
            codec.decode(lab.device(1024).view(1, -1), lab.device(CHUNK_NBYTES))
