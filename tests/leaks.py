"""Leaks: what dlo holds in this process, and that it is no more than before."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from poison import PoisonBackend

__all__ = ["holdings", "nothing_left"]

_PATIENCE_S = 3.0


def holdings(backend: PoisonBackend) -> dict[str, object]:
    """Return device bytes, host bytes, process groups, worker threads and open files."""
    gc.collect()
    files = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            files.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:  # the listing's own
            continue
    return {
        "device bytes": backend.memory().allocated,
        "host bytes": backend.watched.held_nbytes,
        "groups": len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0,
        "threads": sum(thread.name.startswith("dlo") for thread in threading.enumerate()),
        "files": sorted(name for name in files if name.endswith((".safetensors", ".json"))),
    }


@contextmanager
def nothing_left(backend: PoisonBackend) -> Iterator[None]:
    """Check that what is done inside leaves nothing behind; threads may take a moment to end."""
    before = holdings(backend)
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while (after := holdings(backend)) != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert after == before, f"{before} became {after}"
