"""The probe: what this machine's links, its memory and its arithmetic do."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from dlo_core.coder import codec_of
from dlo_core.packed import measure, write_segment
from dlo_core.packed_format import CHUNK_NBYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.bench.launch import Member
    from dlo_core.interface import Backend, Collective

__all__ = ["Rates", "gather_rate", "link_rate", "probe_rank", "timed_ms"]

T = TypeVar("T")

_ALL = 4
_MOST_PACKED = 256 << 20
_MOST_ON_CPU = 1 << 20


@dataclass(frozen=True, slots=True)
class Rates:
    """What one rank measured; GB/s are 1e9 bytes a second.

    Attributes:
        rank: Who.
        device: Where.
        nbytes: Bytes that each copy moved.
        pinned: Whether the host memory was page-locked.
        pin_gb_s: Making page-locked host memory, or pages of ordinary memory.
        link_gb_s: From host to device while no other rank copies.
        link_all_gb_s: The same while all ranks copy; None for a rank alone.
        gather_gb_s: Bytes that an all-gather wrote; None for a rank alone.
        device_gb_s: Bytes read and written by a copy within the device.
        gemm_tflop_s: A square matrix product, as a yardstick.
        gemm_size: Its rows.
        gemm_dtype: Its dtype.
        encode_gb_s: Bytes of synthetic bf16 weights that the device packs.
        decode_gb_s: Bytes of them that it decodes.
        packed_ratio: Bytes that they take packed to those that they have.
    """

    rank: int
    device: str
    nbytes: int
    pinned: bool
    pin_gb_s: float
    link_gb_s: float
    link_all_gb_s: float | None
    gather_gb_s: float | None
    device_gb_s: float
    gemm_tflop_s: float
    gemm_size: int
    gemm_dtype: str
    encode_gb_s: float
    decode_gb_s: float
    packed_ratio: float


def timed_ms(
    backend: Backend, stream: Any, work: Callable[[], object], *, repeats: int = 5
) -> float:
    """Return the median milliseconds of ``work`` on ``stream``; a first run is not counted."""
    taken = []
    for _ in range(repeats + 1):
        start, end = backend.new_event(timing=True), backend.new_event(timing=True)
        with backend.stream(stream):
            start.record(stream)
            work()
            end.record(stream)
        end.synchronize()
        taken.append(start.elapsed_time(end))
    return statistics.median(taken[1:])


def link_rate(backend: Backend, host: torch.Tensor, *, repeats: int = 5) -> float:
    """Return GB/s from ``host`` to the device."""
    dst = backend.empty(host.nbytes)
    copy = partial(backend.copy, dst, host)
    return host.nbytes / timed_ms(backend, backend.new_stream(), copy, repeats=repeats) / 1e6


def gather_rate(
    backend: Backend, collective: Collective, nbytes: int, *, repeats: int = 5
) -> float:
    """Return the GB/s that an all-gather of ``nbytes`` in all writes; every rank must call it."""
    part = nbytes // collective.size
    out, shard = backend.empty(part * collective.size), backend.empty(part)
    # Some comm libraries look at what they are given, so not at uninitialised memory.
    out.zero_()
    shard.zero_()
    backend.synchronize()
    work = partial(collective.all_gather, out, shard)
    return out.nbytes / timed_ms(backend, backend.new_stream(), work, repeats=repeats) / 1e6


def probe_rank(member: Member, nbytes: int, gemm_size: int) -> Rates:
    """Measure everything on one rank.

    Args:
        member: This rank.
        nbytes: Bytes of each copy.
        gemm_size: Rows of the matrix product.
    """
    backend = member.backend
    # The first use starts the device up, which is not to be measured.
    backend.empty(1)
    backend.synchronize()
    start = time.perf_counter()
    buffer = backend.allocator.allocate(nbytes)
    if not buffer.pinned:
        # Pages that nobody wrote are not there yet.
        buffer.tensor.fill_(1)
    pin_s = time.perf_counter() - start
    host = buffer.tensor.fill_(1)
    member.tell("host memory made")
    alone = _in_turn(member, partial(link_rate, backend, host))
    member.tell("link alone")
    together = gather = None
    if member.size > 1:
        member.barrier()
        together = link_rate(backend, host, repeats=_ALL * member.size)
        member.tell("link with all ranks")
        gather = _gather(member, nbytes)
        member.tell("gather")
    inside = _in_turn(member, partial(_device_rate, backend, nbytes))
    dtype = torch.float32 if backend.device.type == "cpu" else torch.bfloat16
    tflop_s = _in_turn(member, partial(_gemm_rate, backend, gemm_size, dtype))
    member.tell("device")
    encode, decode, ratio = _in_turn(member, partial(_packed_rates, backend, nbytes))
    member.tell("packing")
    pinned = buffer.pinned
    buffer.release()
    return Rates(
        rank=member.rank,
        device=str(backend.device),
        nbytes=nbytes,
        pinned=pinned,
        pin_gb_s=nbytes / pin_s / 1e9,
        link_gb_s=alone,
        link_all_gb_s=together,
        gather_gb_s=gather,
        device_gb_s=inside,
        gemm_tflop_s=tflop_s,
        gemm_size=gemm_size,
        gemm_dtype=str(dtype).removeprefix("torch."),
        encode_gb_s=encode,
        decode_gb_s=decode,
        packed_ratio=ratio,
    )


def _in_turn(member: Member, measure: Callable[[], T]) -> T:
    """Let the ranks measure one after the other."""
    found: list[T] = []
    for rank in range(member.size):
        member.barrier()
        if rank == member.rank:
            found.append(measure())
    member.barrier()
    return found[0]


def _gather(member: Member, nbytes: int) -> float:
    group = dist.new_group(backend=member.backend.comm_library)
    collective = member.backend.collective(group)
    try:
        return gather_rate(member.backend, collective, nbytes)
    finally:
        member.barrier()
        collective.close()


def _device_rate(backend: Backend, nbytes: int) -> float:
    src, dst = backend.empty(nbytes), backend.empty(nbytes)
    copy = partial(backend.copy, dst, src)
    return 2 * nbytes / timed_ms(backend, backend.new_stream(), copy) / 1e6


def _packed_rates(backend: Backend, nbytes: int) -> tuple[float, float, float]:
    """Return GB/s of packing and of decoding synthetic weights, and their ratio."""
    most = _MOST_ON_CPU if backend.device.type == "cpu" else _MOST_PACKED
    count = max(min(nbytes, most) // CHUNK_NBYTES, 1) * CHUNK_NBYTES // 2
    weights = torch.randn(count, generator=torch.Generator("cpu").manual_seed(0)) * 0.02
    run = weights.to(torch.bfloat16).view(torch.uint8).to(backend.device)
    codec, whole = codec_of(backend), [(0, run.nbytes)]
    index = measure(codec, run, run.nbytes, whole)
    rows = backend.empty(-(-index.header.nbytes // 256) * 256).view(1, -1)

    def encode() -> None:
        write_segment(codec, run, measure(codec, run, run.nbytes, whole), rows[0])

    out = backend.empty(run.nbytes)
    stream = backend.current_stream()
    encode_ms = timed_ms(backend, stream, encode, repeats=2)
    decode_ms = timed_ms(backend, stream, partial(codec.decode, rows, out), repeats=2)
    ratio = index.header.nbytes / run.nbytes
    return run.nbytes / encode_ms / 1e6, run.nbytes / decode_ms / 1e6, ratio


def _gemm_rate(backend: Backend, size: int, dtype: torch.dtype) -> float:
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (
        torch.randn(size, size, generator=generator).to(dtype).to(backend.device) for _ in range(2)
    )
    work = partial(torch.mm, a, b)
    with torch.no_grad():
        ms = timed_ms(backend, backend.current_stream(), work)
    return 2 * size**3 / ms / 1e9
