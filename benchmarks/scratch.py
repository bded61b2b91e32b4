"""Scratch: a folder for what one process writes, which goes with it, however the process ends."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["SHARED_MEMORY", "room_nbytes", "scratch", "sweep"]

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "dlo-scratch-"


@contextmanager
def scratch(where: Path) -> Iterator[Path]:
    """Make a folder of this process under ``where``, while the context lasts."""
    folder = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=where)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def sweep() -> None:
    """Remove the folders of processes that are gone: who is killed cleans nothing up.

    A checkpoint in shared memory would be missing from the machine's memory until it is restarted.
    """
    for where in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for folder in where.glob(f"{_PREFIX}*-*"):
            owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdecimal() and not Path("/proc", owner).exists():
                shutil.rmtree(folder, ignore_errors=True)


def room_nbytes(where: Path) -> int:
    """Return the bytes that may be written under ``where``; 0 where there is no such place."""
    try:
        room = os.statvfs(where)
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize
