"""The links of several ranks: their rates, alone and together, and what gathers slow down."""

from __future__ import annotations

import json
import statistics
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from ranks_weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlo_core.bench.launch import Member

__all__ = ["LinksJob", "measure_contention", "measure_links"]

_REPEATS = 20


@dataclass(frozen=True, slots=True)
class LinksJob:
    """What the ranks measure.

    Attributes:
        weights: Where memory is that all ranks share.
        block_nbytes: Of a whole block.
        copy_nbytes: Of a copy whose rate is measured.
        gemm_size: Rows of the matrix product that gathers run beside.
    """

    weights: str
    block_nbytes: int
    copy_nbytes: int
    gemm_size: int


class _Told:
    """Findings of one rank, each told at once; what fails costs its own figure only."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self.found: dict[str, Any] = {}

    def note(self, name: str, measure: Callable[[], Any]) -> None:
        """Measure on all ranks."""
        try:
            self.found[name] = measure()
        # One figure that cannot be had; all ranks go on with the next.
        except Exception as error:
            traceback.print_exc()
            self.found[name] = f"{type(error).__name__}: {error}"[:300]
        message = {"name": "", "rank": self._member.rank, "found": self.found}
        self._member.tell(json.dumps(message))


def measure_links(member: Member, job: LinksJob) -> None:
    """Measure the rates that the limits are made of."""
    backend, told = member.backend, _Told(member)
    backend.empty(1)
    backend.synchronize()
    start = time.perf_counter()
    buffer = backend.allocator.allocate(job.copy_nbytes)
    pin_s = time.perf_counter() - start
    host = buffer.tensor.fill_(member.rank + 1)
    told.note("pin_gb_s", lambda: round(job.copy_nbytes / pin_s / 1e9, 2))
    told.note("pinned", lambda: buffer.pinned)
    shard = host[: job.block_nbytes // member.size]
    told.note("link_gb_s", lambda: _in_turn(member, partial(_link_rate, member, host)))
    told.note("link_all_gb_s", lambda: _together(member, partial(_link_rate, member, host)))
    told.note("link_all_shard_gb_s", lambda: _together(member, partial(_link_rate, member, shard)))
    told.note("gather_gb_s", lambda: _gather_rate(member, job))
    told.note("link_all_shared_gb_s", lambda: _shared(member, job))
    told.note("device_gb_s", lambda: _in_turn(member, partial(_device_rate, member, job)))
    buffer.release()


def _together(member: Member, measure: Callable[[], float]) -> float:
    member.barrier()
    found = round(measure(), 3)
    member.barrier()
    return found


def _in_turn(member: Member, measure: Callable[[], float]) -> float:
    found = 0.0
    for rank in range(member.size):
        member.barrier()
        if rank == member.rank:
            found = round(measure(), 3)
    member.barrier()
    return found


@contextmanager
def _collective(member: Member) -> Iterator[Any]:
    made = member.backend.collective(dist.new_group(backend=member.backend.comm_library))
    try:
        yield made
    finally:
        member.backend.synchronize()
        member.barrier()
        made.close()


def _gather_rate(member: Member, job: LinksJob) -> float:
    backend = member.backend
    nbytes = job.block_nbytes // member.size
    out, shard = backend.empty(nbytes * member.size), backend.empty(nbytes)
    out.zero_()
    shard.zero_()
    with _collective(member) as collective:
        work = partial(collective.all_gather, out, shard)
        return _together(member, lambda: out.nbytes / _queued_ms(member, work) / 1e6)


def _link_rate(member: Member, host: torch.Tensor) -> float:
    dst = member.backend.empty(host.nbytes)
    work = partial(member.backend.copy, dst, host)
    return host.nbytes / _queued_ms(member, work) / 1e6


def _queued_ms(member: Member, work: Callable[[], object], repeats: int = _REPEATS) -> float:
    """Return the median milliseconds of work that is queued again and again without a wait."""
    backend, stream = member.backend, member.backend.new_stream()
    marks = [backend.new_event(timing=True) for _ in range(repeats + 1)]
    with backend.stream(stream):
        for _ in range(3):
            work()
        for mark in marks:
            mark.record(stream)
            if mark is not marks[-1]:
                work()
    stream.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


def _shared(member: Member, job: LinksJob) -> Any:
    """Return the rate while all ranks copy from the same pages."""
    backend = member.backend
    run = Weights(job.weights).bytes[: job.copy_nbytes]
    registered = None
    if backend.capabilities.host_registration:
        registered = backend.allocator.register(run)
    try:
        return _together(member, partial(_link_rate, member, run))
    finally:
        backend.synchronize()
        if registered is not None:
            registered.release()


def _device_rate(member: Member, job: LinksJob) -> float:
    backend = member.backend
    src, dst = backend.empty(job.copy_nbytes), backend.empty(job.copy_nbytes)
    return 2 * job.copy_nbytes / _queued_ms(member, partial(backend.copy, dst, src)) / 1e6


# --- who is in the way of whom --------------------------------------------------------------------


def measure_contention(member: Member, job: LinksJob) -> None:
    """Run matrix products while blocks are gathered, each way, and while they are copied."""
    backend, told = member.backend, _Told(member)
    copy_buffer = backend.allocator.allocate(job.block_nbytes // member.size)
    source = copy_buffer.tensor.fill_(1)
    bench = _Products(member, job.gemm_size)
    target = backend.empty(source.nbytes)
    told.note("copy", lambda: bench.beside(partial(backend.copy, target, source)))
    for name, peers in ((backend.comm_library, False), ("peer_copies", True)):
        if peers and backend.device.type != "cuda":
            told.note(name, lambda: "peer copies need a CUDA device")
            continue
        told.note(name, lambda peers=peers: _beside_gathers(member, job, bench, peers=peers))  # type: ignore[misc]
    copy_buffer.release()


def _beside_gathers(
    member: Member, job: LinksJob, bench: _Products, *, peers: bool
) -> dict[str, Any]:
    """Return the figures of gathers out of place and in place; checks what they gathered."""
    backend: Any = member.backend
    group = dist.new_group(backend=backend.comm_library)
    if peers:
        from peer_copies import PeerBackend

        backend = PeerBackend(backend.device, group)
    collective = backend.collective(dist.new_group(backend=backend.comm_library))
    nbytes = job.block_nbytes // member.size // 256 * 256
    out, shard = backend.empty(nbytes * member.size), backend.empty(nbytes).fill_(member.rank + 1)
    own = out[member.rank * nbytes : (member.rank + 1) * nbytes]
    found: dict[str, Any] = {}
    try:
        for name, src in (("out_of_place", shard), ("in_place", own)):
            out.zero_()
            src.fill_(member.rank + 1)
            backend.synchronize()
            member.barrier()
            collective.all_gather(out, src)
            backend.synchronize()
            right = [
                bool((part == rank + 1).all()) for rank, part in enumerate(out.view(-1, nbytes))
            ]
            figures = bench.beside(partial(collective.all_gather, out, src))
            figures["gb_s"] = round(out.nbytes / figures["alone_ms"] / 1e6, 1)
            found[name] = figures | {"right": all(right)}
    finally:
        backend.synchronize()
        member.barrier()
        collective.close()
        if peers:
            backend.clear()
    return found


class _Products:
    """Matrix products on the current stream, and what slows them down."""

    def __init__(self, member: Member, size: int) -> None:
        self._member = member
        dtype = torch.float32 if member.backend.device.type == "cpu" else torch.bfloat16
        generator = torch.Generator("cpu").manual_seed(0)
        self._a, self._b = (
            torch.randn(size, size, generator=generator).to(dtype).to(member.backend.device)
            for _ in range(2)
        )
        self._out = torch.empty_like(self._a)
        self._flop = 2 * size**3
        self._stream = member.backend.new_stream(priority=-1)
        self._count = 60 if member.backend.device.type != "cpu" else 2
        self._run(lambda: None, 0)

    def beside(self, work: Callable[[], object]) -> dict[str, Any]:
        """Return how fast the products are alone and beside ``work`` on a stream of its own."""
        member = self._member
        member.barrier()
        alone_ms = _queued_ms(member, work)
        before = [self._run(lambda: None, 0)[0] for _ in range(2)]
        # As often as covers the products, and the same on every rank.
        repeats = [max(2, int(before[-1] / alone_ms))]
        dist.broadcast_object_list(repeats, src=0)
        runs = [self._run(work, repeats[0]) for _ in range(3)]
        after = [self._run(lambda: None, 0)[0] for _ in range(2)]
        alone = statistics.median(before + after)
        beside, covered = (statistics.median(run[i] for run in runs) for i in range(2))
        return {
            "alone_ms": round(alone_ms, 4),
            "beside_ms": round(covered / repeats[0], 4),
            "tflop_s": round(self._flop * self._count / beside / 1e9, 1),
            "tflop_s_alone": round(self._flop * self._count / alone / 1e9, 1),
            "slow_down": round(beside / alone, 4),
            "covered": round(covered / beside, 2),
        }

    def _run(self, work: Callable[[], object], repeats: int) -> tuple[float, float]:
        """Return the milliseconds of the products and of the work beside them."""
        backend = self._member.backend
        backend.synchronize()
        self._member.barrier()
        side = [backend.new_event(timing=True) for _ in range(2)]
        main = [backend.new_event(timing=True) for _ in range(2)]
        with backend.stream(self._stream):
            side[0].record(self._stream)
            for _ in range(repeats):
                work()
            side[1].record(self._stream)
        main[0].record(backend.current_stream())
        with torch.no_grad():
            for _ in range(self._count):
                torch.mm(self._a, self._b, out=self._out)
        main[1].record(backend.current_stream())
        backend.synchronize()
        return main[0].elapsed_time(main[1]), side[0].elapsed_time(side[1])
