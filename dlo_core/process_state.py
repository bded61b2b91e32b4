"""The process state: what the system says about a process of this node."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessName", "state_of", "this_process"]

_STARTED = 19  # field 22 of /proc/PID/stat, counted behind the name


@dataclass(frozen=True, slots=True)
class ProcessName:
    """Names one process among all of all nodes.

    Attributes:
        pid: Its number on its node.
        node: Names the space of process numbers; empty where the system does not say.
        started: When it started, in the system's ticks.
    """

    pid: int
    node: str
    started: str


def this_process() -> ProcessName:
    """Return the name of this process."""
    pid = os.getpid()
    node = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        node = f"{boot}-{os.stat('/proc/self/ns/pid').st_ino}"
    fields = _stat(pid)
    return ProcessName(pid, node if fields else "", fields[_STARTED] if fields else "")


def state_of(process: ProcessName, me: ProcessName) -> str:
    """Return "gone", "stopped", "running", or "" where it cannot be known from here.

    Args:
        process: Any process.
        me: This one.
    """
    if not me.node or process.node != me.node:
        return ""
    fields = _stat(process.pid)
    if fields is None:
        return ""
    if not fields or fields[_STARTED] != process.started or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str] | None:
    """Return the fields behind the process's name; none: there is no such process; None: unknown.

    The name may be any bytes, also half a character.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return []
    # This process has no more files to open, say: that says nothing of the other.
    except OSError:
        return None
    return text.rpartition(b")")[2].decode("ascii").split()
