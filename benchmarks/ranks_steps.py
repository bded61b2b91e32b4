"""The steps of several ranks: contenders one after the other, measured on every rank."""

from __future__ import annotations

import gc
import hashlib
import json
import re
import statistics
import time
import traceback
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from checks import Skip
from ranks_activity import device_activity
from ranks_contenders import CONTENDERS, Attached
from ranks_model import arguments, make_model
from ranks_weights import Weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.bench.launch import Member
    from dlo_core.bench.model import Shape

__all__ = ["StepsJob", "measure_steps"]

_WARM = 2


@dataclass(frozen=True, slots=True)
class StepsJob:
    """What the ranks measure; the same on all of them.

    Attributes:
        weights: Where the weights are.
        shape: Of the model.
        parallel: ``"dp"`` or ``"sp"``.
        runs: (tokens of a rank, timed passes).
        contenders: Their names, in order.
        until: When the ranks begin nothing more, in seconds since 1970.
        activity: Whether to say what the devices did, too.
    """

    weights: str
    shape: Shape
    parallel: str
    runs: tuple[tuple[int, int], ...]
    contenders: tuple[str, ...]
    until: float
    activity: bool = False


def measure_steps(member: Member, job: StepsJob) -> None:
    """Measure every contender there is time for; tells each finding at once, as JSON.

    Who fails may leave the device or the comm library in pieces, so it is the last in these
    processes.
    """
    weights = Weights(job.weights)
    exchange = None
    if job.parallel == "sp":
        exchange = dist.new_group(backend=member.backend.comm_library)
    longest = 5.0
    for name in job.contenders:
        left = _of_first(job.until - time.time())
        if left < longest:
            late = f"out of time: {left:.0f} s left in the section"
            _tell(member, name, {"skipped": late, "done": True})
            continue
        start = time.monotonic()
        error = _measure_contender(member, job, weights, name, exchange)
        _forget(member)
        longest = max(longest, time.monotonic() - start)
        errors: list[Any] = [None] * member.size
        dist.all_gather_object(errors, error)
        if any(errors):
            _tell(member, name, {"errors": errors, "done": True})
            return
        _tell(member, name, {"done": True})


def _measure_contender(
    member: Member, job: StepsJob, weights: Weights, name: str, exchange: Any
) -> str | None:
    """Measure one contender; return what went wrong."""
    found: dict[str, Any] = {"runs": {}}
    contender, before = CONTENDERS[name], _host_memory(member, weights)
    device = member.backend.device if contender.kind == "resident" else "cpu"
    attached: Attached | None = None
    error: str | None = None
    try:
        model = make_model(job.shape, job.parallel, exchange)
        member.barrier()
        start = time.perf_counter()
        weights.lay_out(model, job.shape, device)
        found["blocks_nbytes"] = [_nbytes(block) for block in model.blocks]
        attached = contender.attach(member, model)
        member.backend.synchronize()
        found["start_s"] = round(time.perf_counter() - start, 3)
        for tokens, passes in job.runs:
            args = arguments(member, job.shape, tokens, job.parallel)
            with torch.inference_mode():
                run = _run(member, attached, args, passes)
                if contender.kind == "resident":
                    run["block_ms"] = _time_blocks(member, model, args)
                if job.activity:
                    run["activity"] = device_activity(member, partial(attached.call, *args))
            facts = attached.facts()
            run["exposed_ms"] = facts.pop("exposed_ms", None)
            found["runs"][str(tokens)] = run
            found |= facts
            _tell(member, name, found)
        found["host_nbytes"] = _host_memory(member, weights) - before
        _tell(member, name, found)
    except Skip as skip:
        _tell(member, name, {"skipped": str(skip)})
    # Every contender has its turn, and the ranks say what they saw.
    except Exception as raised:
        error = _said(raised)
    if attached is not None:
        try:
            attached.close()
        except Exception as raised:
            error = error or _said(raised)
    return error


def _said(error: Exception) -> str:
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}"[:1500]


def _run(
    member: Member, attached: Attached, args: tuple[torch.Tensor, ...], passes: int
) -> dict[str, Any]:
    """Time passes that follow each other with no wait of the host between."""
    backend = member.backend
    outputs = [attached.call(*args) for _ in range(_WARM)]
    backend.synchronize()
    member.barrier()
    _reset_peaks(member)
    energy = _energy_mj(member)
    marks = [backend.new_event(timing=True) for _ in range(passes + 1)]
    marks[0].record(backend.current_stream())
    host = []
    for end in marks[1:]:
        start = time.perf_counter()
        outputs.append(attached.call(*args))
        host.append((time.perf_counter() - start) * 1e3)
        end.record(backend.current_stream())
    backend.synchronize()
    used = _energy_mj(member)
    steps = [a.elapsed_time(b) for a, b in pairwise(marks)]
    found = {
        "step_ms": round(statistics.median(steps), 3),
        "steps_ms": [round(ms, 3) for ms in steps],
        "host_ms": round(statistics.median(host), 3),
        "digests": sorted({_digest(output) for output in outputs}),
        "finite": all(bool(output.isfinite().all()) for output in outputs),
    }
    if energy is not None and used is not None:
        found["energy_j"] = round((used - energy) / 1e3 / passes, 2)
    return found | _peaks(member)


def _time_blocks(member: Member, model: Any, args: tuple[torch.Tensor, ...]) -> list[float]:
    """Return the milliseconds of each block in one more pass."""
    backend, handles, times = member.backend, [], []

    def recorder(event: Any) -> Callable[..., None]:
        return lambda *_: event.record(backend.current_stream())

    for block in model.blocks:
        pair = [backend.new_event(timing=True) for _ in range(2)]
        times.append(pair)
        handles.append(block.register_forward_pre_hook(recorder(pair[0])))
        handles.append(block.register_forward_hook(recorder(pair[1])))
    model(*args)
    backend.synchronize()
    for handle in handles:
        handle.remove()
    return [round(start.elapsed_time(end), 4) for start, end in times]


def _host_memory(member: Member, weights: Weights) -> int:
    """Return this process's share of the host memory, without the weights that all have."""
    weights.forget()
    member.barrier()
    text = Path("/proc/self/smaps_rollup").read_text()
    nbytes = int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0]) * 1024
    member.barrier()
    return nbytes


def _reset_peaks(member: Member) -> None:
    if member.backend.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(member.backend.device)


def _peaks(member: Member) -> dict[str, int]:
    """Return the most device memory in tensors and in the allocator's hands, and what is gone."""
    device, memory = member.backend.device, member.backend.memory()
    stats = memory.allocated, memory.reserved
    if device.type == "cuda":
        stats = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    used = memory.total - memory.free
    return {"allocated_nbytes": stats[0], "reserved_nbytes": stats[1], "used_nbytes": used}


def _energy_mj(member: Member) -> int | None:
    """Return what the device used since its driver was loaded, where it tells."""
    if member.backend.device.type != "cuda":
        return None
    try:
        import pynvml  # type: ignore[import-not-found,import-untyped,unused-ignore]

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(member.backend.device.index or 0)
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))
    # It is one figure; not every driver gives it.
    except Exception:
        return None


def _digest(output: torch.Tensor) -> str:
    raw = output.detach().cpu().contiguous().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


def _nbytes(module: torch.nn.Module) -> int:
    return sum(parameter.numel() * parameter.dtype.itemsize for parameter in module.parameters())


def _forget(member: Member) -> None:
    """Let the contender's memory go, so that it does not count as the next one's."""
    gc.collect()
    if member.backend.device.type == "cuda":
        torch.cuda.empty_cache()


def _of_first(value: float) -> float:
    """Return what the first rank has, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def _tell(member: Member, name: str, found: dict[str, Any]) -> None:
    member.tell(json.dumps({"name": name, "rank": member.rank, "found": found}))
