"""Activity: what a device did in a pass, by kind: who gathered, the kernels or the copy engines."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlo_core.bench.launch import Member

__all__ = ["device_activity", "lane", "summary"]

_PASSES = 2
_LONGEST = 12
_LONG_US = 6.0
# By what the profiler calls it; the first that fits counts.
_KINDS = (
    ("comm kernels", ("nccl",)),
    ("copies from the host", ("memcpy htod",)),
    ("copies to the host", ("memcpy dtoh",)),
    ("copies between devices", ("memcpy ptop",)),
    ("copies on devices", ("memcpy dtod",)),
    ("fills", ("memset",)),
)


def device_activity(member: Member, call: Callable[[], object]) -> dict[str, Any]:
    """Run some passes under the profiler; return counts and milliseconds of a pass.

    All ranks call it; it slows down what comes after it in the process. A CPU shows nothing.
    """
    if member.backend.device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    member.backend.synchronize()
    member.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PASSES):
            call()
        member.backend.synchronize()
    events = [
        (each.key, each.count, each.self_device_time_total / 1e3)
        for each in profiler.key_averages()
        if not str(each.device_type).endswith("CPU")
    ]
    return summary(events, _PASSES) | {"lane": lane(_work(profiler), _PASSES)}


def _work(profiler: Any) -> list[tuple[int, str, float, float]]:
    """Return stream, name, and the microseconds at which it began and ended, of all work."""
    return [
        (each.device_resource_id(), each.name(), each.start_ns() / 1e3, each.end_ns() / 1e3)
        for each in profiler.profiler.kineto_results.events()
        if not str(each.device_type()).endswith("CPU")
    ]


def lane(work: Iterable[tuple[int, str, float, float]], passes: int) -> dict[str, float]:
    """Return what the busiest stream of computation did in a pass, in milliseconds.

    Args:
        work: Stream, name, beginning and end in microseconds.
        passes: How many there were.

    Returns:
        ``kernels_ms`` of its kernels, ``gaps_ms`` between them, ``long_gaps_ms`` of those of more
        than 6 us, and their number.
    """
    streams: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for stream, name, start, end in work:
        if _kind_of(name) == "other kernels":
            streams[stream].append((start, end))
    if not streams:
        return {}
    busiest = sorted(max(streams.values(), key=lambda rows: sum(b - a for a, b in rows)))
    gaps = [max(0.0, after[0] - row[1]) for row, after in pairwise(busiest)]
    return {
        "kernels": len(busiest) / passes,
        "kernels_ms": round(sum(b - a for a, b in busiest) / passes / 1e3, 3),
        "gaps_ms": round(sum(gaps) / passes / 1e3, 3),
        "long_gaps_ms": round(sum(gap for gap in gaps if gap > _LONG_US) / passes / 1e3, 3),
    }


def summary(events: Iterable[tuple[str, int, float]], passes: int) -> dict[str, Any]:
    """Return ``(count, ms)`` of a pass by kind, and of what took longest by name.

    Args:
        events: Name, count and milliseconds in all passes.
        passes: How many there were.
    """
    kinds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    rows = [(name, count / passes, ms / passes) for name, count, ms in events if ms > 0]
    for name, count, ms in rows:
        kind = kinds[_kind_of(name)]
        kind[0] += count
        kind[1] += ms
    longest = sorted(rows, key=lambda row: -row[2])[:_LONGEST]
    return {
        "kinds": {name: [round(value, 3) for value in pair] for name, pair in kinds.items()},
        "longest": {name[:100]: [count, round(ms, 3)] for name, count, ms in longest},
    }


def _kind_of(name: str) -> str:
    lower = name.lower()
    for kind, signs in _KINDS:
        if any(sign in lower for sign in signs):
            return kind
    return "other kernels"
