"""The measurements of a bench: one process with all weights resident, one with them streamed."""

from __future__ import annotations

import hashlib
import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dlo_core as dlo
from dlo_core.bench.probe import gather_rate, link_rate
from dlo_core.rawbytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from dlo_core.bench.job import BenchJob
    from dlo_core.bench.launch import Member
    from dlo_core.footprint import Footprint

__all__ = ["Run", "StreamedRank", "measure_resident", "measure_streamed"]

_PROBE_NBYTES = 512 << 20


@dataclass(frozen=True, slots=True)
class Run:
    """The passes over one length on one rank.

    Attributes:
        tokens: The length.
        steps_ms: Milliseconds from the end of one pass to the end of the next.
        digests: A sha256 of each pass's output, in hexadecimal.
        finite: Whether every number of the output is one.
        allocated_nbytes: Device bytes in tensors, after the passes.
        reserved_nbytes: Device bytes that the allocator holds, after the passes.
        exposed_ms: Milliseconds that computation waited for weights in the last pass of them that
            kept times; streamed.
        block_ms: Milliseconds that each block computes; resident.
    """

    tokens: int
    steps_ms: tuple[float, ...]
    digests: tuple[str, ...]
    finite: bool
    allocated_nbytes: int
    reserved_nbytes: int
    exposed_ms: float = 0.0
    block_ms: tuple[float, ...] = ()

    @property
    def step_ms(self) -> float:
        """The median step."""
        return statistics.median(self.steps_ms)


@dataclass(frozen=True, slots=True)
class StreamedRank:
    """What a rank measured with streamed weights.

    Attributes:
        runs: One a length.
        enable_s: Seconds that ``enable`` took.
        blocks_nbytes: Bytes of each block, those that stay on the device included.
        copied_nbytes: Bytes that this rank copies to its device in a pass.
        host_nbytes: Bytes of this rank's shards.
        pinned_nbytes: Bytes of them that the system locked.
        device_nbytes: Weight bytes on the device.
        link_gb_s: From host to device, of a copy as large as a block.
        gather_gb_s: Bytes that a gather of a block writes; None where nothing is gathered.
        host_blocks: Whether a wait blocks the host on this backend.
        ring_nbytes: Of ``device_nbytes``, slots and stages.
        residents_nbytes: Of ``device_nbytes``, blocks that stay.
        num_residents: How many of them there are.
        packed_ratio: Bytes of the blocks as they travel to those that they compute from; None where
            they are not packed.
        blocks_decode_ms: Milliseconds that decoding each block takes in a pass; 0 for one that is
            not packed.
    """

    runs: tuple[Run, ...]
    enable_s: float
    blocks_nbytes: tuple[int, ...]
    copied_nbytes: int
    host_nbytes: int
    pinned_nbytes: int
    device_nbytes: int
    link_gb_s: float
    gather_gb_s: float | None
    host_blocks: bool
    ring_nbytes: int = 0
    residents_nbytes: int = 0
    num_residents: int = 0
    packed_ratio: float | None = None
    blocks_decode_ms: tuple[float, ...] = ()

    @property
    def decode_ms(self) -> float:
        """Milliseconds that decoding takes in a pass."""
        return sum(self.blocks_decode_ms)


@torch.inference_mode()
def measure_resident(member: Member, job: BenchJob) -> tuple[Run, ...]:
    """Run the model with all weights on the device."""
    with torch.inference_mode(False):
        model = job.make(member.backend.device)
    _forget_cache(member)
    member.tell("weights made")
    names = _block_names(model)
    return tuple(_run(member, job, model, tokens, blocks=names) for tokens in job.runs)


@torch.inference_mode()
def measure_streamed(member: Member, job: BenchJob) -> StreamedRank:
    """Run the model with its blocks on the host, sharded where there are several ranks."""
    backend = member.backend
    with torch.inference_mode(False):
        model = job.make("cpu")
    own = {name: _nbytes(model.get_submodule(name)) for name in _block_names(model)}
    link_gb_s, gather_gb_s = _probe(member, min(max(own.values()), _PROBE_NBYTES), job)
    _forget_cache(member)
    member.tell("weights made")
    member.barrier()
    start = time.perf_counter()
    offloaded = dlo.offload(
        model,
        device=backend,
        group=dist.group.WORLD if member.size > 1 else None,
        **_with_times(job),
    )
    backend.synchronize()
    enable_s = time.perf_counter() - start
    member.tell("enabled")
    runs = tuple(
        _run(member, job, model, tokens, exposed=lambda: offloaded.stats().exposed_ms)
        for tokens in job.runs
    )
    copied = _copied(offloaded, partial(_forward, member, job, model))
    stats = offloaded.stats()
    blocks = {block.name: block for block in stats.blocks}
    made = StreamedRank(
        runs=runs,
        enable_s=enable_s,
        blocks_nbytes=tuple(
            blocks[name].nbytes if name in blocks else nbytes for name, nbytes in own.items()
        ),
        copied_nbytes=copied,
        host_nbytes=stats.host_bytes,
        pinned_nbytes=stats.pinned_bytes,
        device_nbytes=stats.device_bytes,
        link_gb_s=link_gb_s,
        gather_gb_s=gather_gb_s,
        host_blocks=backend.capabilities.host_blocks,
        ring_nbytes=_ring_nbytes(offloaded.footprint),
        residents_nbytes=stats.resident_bytes,
        num_residents=sum(block.resident for block in stats.blocks),
        packed_ratio=stats.packed_ratio,
        blocks_decode_ms=tuple(blocks[name].decode_ms if name in blocks else 0.0 for name in own),
    )
    member.barrier()
    offloaded.shutdown()
    return made


def _with_times(job: BenchJob) -> dict[str, Any]:
    """Return the settings; by default a pass of every length keeps its times, and all are raw."""
    every = min(dlo.OffloadConfig().time_every, job.num_warm + job.num_passes)
    return {"time_every": every, "packed": False} | job.settings


def _ring_nbytes(footprint: Footprint) -> int:
    return footprint.slots_nbytes + footprint.stages_nbytes + footprint.decoded_nbytes


def _forget_cache(member: Member) -> None:
    """Give back what was reserved so far, so that it does not count as the runs' memory."""
    if member.backend.device.type != "cpu":
        torch.accelerator.empty_cache()


def _forward(member: Member, job: BenchJob, model: nn.Module) -> None:
    args, kwargs = job.arguments(job.runs[0], member.backend.device, member.rank)
    model(*args, **kwargs)
    member.backend.synchronize()


def _copied(offloaded: dlo.LayerwiseOffload, forward: Callable[[], None]) -> int:
    before = offloaded.stats().copied_bytes
    forward()
    return offloaded.stats().copied_bytes - before


def _probe(member: Member, nbytes: int, job: BenchJob) -> tuple[float, float | None]:
    """Return the rates of the link, with all ranks at it, and of a gather."""
    backend = member.backend
    buffer = backend.allocator.allocate(nbytes)
    buffer.tensor.fill_(1)
    member.barrier()
    link = link_rate(backend, buffer.tensor)
    buffer.release()
    if member.size == 1 or not dlo.OffloadConfig.of(job.settings).use_allgather:
        return link, None
    collective = backend.collective(dist.new_group(backend=backend.comm_library))
    try:
        return link, gather_rate(backend, collective, nbytes)
    finally:
        member.barrier()
        collective.close()


def _run(
    member: Member,
    job: BenchJob,
    model: nn.Module,
    tokens: int,
    *,
    exposed: Callable[[], float] = lambda: 0.0,
    blocks: tuple[str, ...] = (),
) -> Run:
    backend = member.backend
    args, kwargs = job.arguments(tokens, backend.device, member.rank)
    for _ in range(job.num_warm):
        model(*args, **kwargs)
    backend.synchronize()
    events = [backend.new_event(timing=True) for _ in range(job.num_passes + 1)]
    outputs = []
    events[0].record(backend.current_stream())
    for end in events[1:]:
        outputs.append(model(*args, **kwargs))
        end.record(backend.current_stream())
        if backend.capabilities.host_blocks:
            member.tell(f"{tokens} tokens")
    backend.synchronize()
    if not backend.capabilities.host_blocks:
        member.tell(f"{tokens} tokens")
    memory = backend.memory()
    steps = [start.elapsed_time(end) for start, end in pairwise(events)]
    found = [tensor for output in outputs for tensor in _tensors(output)]
    return Run(
        tokens=tokens,
        steps_ms=tuple(steps),
        digests=tuple(_digest(output) for output in outputs),
        finite=all(bool(tensor.isfinite().all()) for tensor in found if tensor.is_floating_point()),
        allocated_nbytes=memory.allocated,
        reserved_nbytes=memory.reserved,
        exposed_ms=exposed(),
        block_ms=_time_blocks(member, model, blocks, args, kwargs),
    )


def _time_blocks(
    member: Member,
    model: nn.Module,
    names: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[float, ...]:
    """Return the milliseconds of each block in one more pass."""
    backend, handles, times = member.backend, [], []
    for name in names:
        start, end = backend.new_event(timing=True), backend.new_event(timing=True)
        times.append((start, end))
        block = model.get_submodule(name)
        handles.append(
            block.register_forward_pre_hook(
                lambda *_, event=start: event.record(backend.current_stream())
            )
        )
        handles.append(
            block.register_forward_hook(
                lambda *_, event=end: event.record(backend.current_stream())
            )
        )
    if names:
        model(*args, **kwargs)
        backend.synchronize()
    for handle in handles:
        handle.remove()
    return tuple(start.elapsed_time(end) for start, end in times)


def _block_names(model: nn.Module) -> tuple[str, ...]:
    from dlo_core.discovery import find_blocks

    return tuple(block.name for block in find_blocks(model, None))


def _nbytes(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output
    if not isinstance(output, dict | list | tuple):
        values = [getattr(output, "sample", None)]
    return [tensor for value in values if value is not None for tensor in _tensors(value)]


def _digest(output: Any) -> str:
    digest = hashlib.sha256()
    for tensor in _tensors(output):
        host = tensor.detach().cpu().contiguous()
        digest.update(bytes_of(host, host.nbytes).numpy().tobytes())
    return digest.hexdigest()
