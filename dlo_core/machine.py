"""The machine: which node this process runs on, and what it still has of host memory."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from dlo_core.cgroup import Bound, memory_bounds

__all__ = ["Machine"]


class Machine:
    """The node as this process sees it.

    Attributes:
        node: Equal for the processes that can share memory: the host's name and its boot.
    """

    def __init__(self, root: Path | str = "/", node: str | None = None) -> None:
        """Look at the system.

        Args:
            root: Folder in which ``proc`` lies, and the cgroups' mount points; another one in
                tests.
            node: Name of the node; None: the host's name with the id of its boot.
        """
        self._root = Path(root)
        self.node = node or f"{socket.gethostname()} {self._boot()}".strip()

    def memory_bounds(self) -> tuple[Bound, ...]:
        """Return what limits the memory of the node's processes together."""
        free = self._row("proc/meminfo", "MemAvailable:")
        available = psutil.virtual_memory().available if free is None else free * 1024
        machine = Bound(f"MemAvailable of {self.node}", "MemAvailable", available)
        return (machine, *memory_bounds(self._root))

    def lock_bound(self) -> Bound | None:
        """Return what ``ulimit -l`` still lets this process lock, or None where it is unlimited."""
        limit = self._row("proc/self/limits", "Max locked memory")
        if limit is None:
            return None
        used = (self._row("proc/self/status", "VmLck:") or 0) * 1024
        return Bound("ulimit -l", "ulimit -l", max(0, limit - used))

    def _boot(self) -> str:
        try:
            return (self._root / "proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""

    def _row(self, path: str, name: str) -> int | None:
        """Return the first number of the row ``name``; None where there is none."""
        try:
            rows = (self._root / path).read_text().splitlines()
        except OSError:
            return None
        for row in rows:
            if row.startswith(name):
                value = row[len(name) :].split()
                return int(value[0]) if value and value[0].isdecimal() else None
        return None

    def __repr__(self) -> str:
        """Show the node."""
        return f"Machine({self.node!r})"
