"""The codec for packed weights in Triton; imported only when it is asked for."""

from __future__ import annotations

import torch
from triton.runtime.interpreter import InterpretedFunction

from dlo_core.interface import Codec
from dlo_cuda import packed_kernels as kernels

__all__ = ["TritonCodec"]

_CHUNK_NBYTES = 8192
_HEADER_NBYTES = 64
_ENTRY_NBYTES = 16
_LANES = 256
_WARPS = 8


class TritonCodec(Codec):
    """One program a chunk; the first call of each kernel compiles it."""

    def __init__(self) -> None:
        """Choose between the vendor's byte permutation and a portable one."""
        interpreted = isinstance(kernels.decode, InterpretedFunction)
        self._portable = interpreted or torch.version.cuda is None

    def count(self, run: torch.Tensor, ranks: torch.Tensor, table_of: torch.Tensor) -> torch.Tensor:
        """Return second and third codes, patches and checksum of each chunk."""
        num_chunks = run.numel() // _CHUNK_NBYTES
        counts = torch.zeros(num_chunks, 4, dtype=torch.int32, device=run.device)
        if num_chunks:
            grid = (num_chunks,)
            args = (run.view(torch.int64), _some(ranks), table_of, counts)
            # A kernel is launched on the current device, whatever it is given.
            with torch.cuda.device_of(run):
                kernels.count[grid](*args, L=_LANES, num_warps=_WARPS)
        return counts

    def write(self, run: torch.Tensor, ranks: torch.Tensor, row: torch.Tensor) -> None:
        """Write the blobs of all chunks where the row's entries say."""
        num_chunks = run.numel() // _CHUNK_NBYTES
        if num_chunks:
            grid = (num_chunks,)
            args = (run.view(torch.int64), _some(ranks), row.view(torch.int32))
            with torch.cuda.device_of(run):
                kernels.write[grid](*args, row.view(torch.int64), L=_LANES, num_warps=_WARPS)

    def decode(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Decode every row into its part of ``out``."""
        num_rows, row_nbytes = rows.shape
        num_chunks = out.numel() // _CHUNK_NBYTES // num_rows
        least = _HEADER_NBYTES + _ENTRY_NBYTES * num_chunks + _CHUNK_NBYTES
        if row_nbytes < least or row_nbytes % 16:
            raise ValueError(
                f"a row of {row_nbytes:,} bytes holds no {num_chunks:,} chunks, or is no multiple "
                "of 16"
            )
        if num_chunks:
            flat = rows.view(-1)
            with torch.cuda.device_of(out):
                kernels.decode[num_chunks, num_rows](
                    flat.view(torch.int32),
                    flat.view(torch.int64),
                    out.view(torch.int64),
                    out.view(torch.int16),
                    row_nbytes // 4,
                    num_chunks,
                    L=_LANES,
                    PORTABLE=self._portable,
                    num_warps=_WARPS,
                )


def _some(ranks: torch.Tensor) -> torch.Tensor:
    """Return ``ranks``, or one row that nobody looks at."""
    return ranks if len(ranks) else ranks.new_zeros(1, 256)
