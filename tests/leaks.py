"""Leaks: what dlo holds in this process, and that it is no more than before."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poison import PoisonBackend

__all__ = ["holdings", "nothing_left", "segments"]

_PATIENCE_S = 3.0


def holdings(backend: PoisonBackend) -> dict[str, int]:
    """Return device and host bytes, process groups, worker threads, open files, shared memory."""
    gc.collect()
    files = 0
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own is closed by now
            name = os.readlink(f"/proc/self/fd/{entry}")
            files += name.endswith((".safetensors", ".json"))
    return {
        "device bytes": backend.memory().allocated,
        "host bytes": backend.watched.held_nbytes,
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        "threads": sum(thread.name.startswith("dlo") for thread in threading.enumerate()),
        "files": files,
        "segments": len(segments()),
    }


def segments(pid: int | str = "self") -> set[int]:
    """Return the inodes of dlo's shared memory that a process maps or holds open."""
    found = set()
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[5].startswith("/memfd:dlo"):
                found.add(int(fields[4]))
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                path = f"/proc/{pid}/fd/{entry}"
                if os.readlink(path).startswith("/memfd:dlo"):
                    found.add(os.stat(path).st_ino)
    return found


@contextmanager
def nothing_left(backend: PoisonBackend) -> Iterator[None]:
    """Check that what is done inside leaves nothing behind; threads may take a moment to end."""
    before = holdings(backend)
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while grown := _grown(before, holdings(backend)):
        assert time.monotonic() < deadline, f"left behind (before, after): {grown}"
        time.sleep(0.02)


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    return {key: (before[key], after[key]) for key in before if after[key] > before[key]}
