"""Grown memory: what a virtual machine takes from its host as it is touched, taken beforehand.

Such a machine may begin with a part of its memory and get the rest page by page, at a few GB/s at
best. Whoever allocates first would pay for it; memory that was used once stays.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["grow"]

_STEP_NBYTES = 4 << 30


def grow(nbytes: int, *, limit_s: float) -> dict[str, Any]:
    """Touch so many bytes, as far as it comes in time and memory, and let them go.

    Args:
        nbytes: How much is wanted; at most 0.6 of what the machine may have is taken.
        limit_s: After so many seconds nothing more is begun.

    Returns:
        ``gb``, ``s`` and ``gb_s``, and ``stopped`` where the system had no more.
    """
    from dlo_core.touch import touch

    wanted = min(nbytes, int(0.6 * _most_nbytes()))
    held: list[mmap.mmap] = []
    done, start = 0, time.perf_counter()
    found: dict[str, Any] = {}
    while done < wanted and time.perf_counter() - start < limit_s:
        step = min(_STEP_NBYTES, wanted - done)
        try:
            pages = mmap.mmap(-1, step, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            found["stopped"] = str(error)
            break
        with suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        code = touch(address_of(pages), step)
        if code:
            found["stopped"] = os.strerror(code)
            break
        held.append(pages)
        done += step
    seconds = time.perf_counter() - start
    for pages in held:
        pages.close()
    rate = round(done / seconds / 1e9, 2)
    return found | {"gb": round(done / 1e9, 2), "s": round(seconds, 2), "gb_s": rate}


def address_of(pages: mmap.mmap) -> int:
    """Return where a writable mapping begins."""
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


def _most_nbytes() -> int:
    """Return the bytes that this machine may come to have; its cgroup may tell of more."""
    import psutil

    known = int(psutil.virtual_memory().total)
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return known
    return max(known, int(limit)) if limit.isdecimal() and int(limit) < 1 << 42 else known
