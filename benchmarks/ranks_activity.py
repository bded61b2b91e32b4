"""Activity: what a device did in a pass, by kind: who gathered, the kernels or the copy engines."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dlo_core.bench.launch import Member

__all__ = ["device_activity", "summary"]

_PASSES = 2
_LONGEST = 12
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
    return summary(events, _PASSES)


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
