"""The cgroups of this process: what each of them still lets it use of memory.

A container's limit is not the machine's. Both versions of the interface are read, and every
cgroup from the process's own up to the root, for the tightest of them holds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Bound", "memory_bounds"]

# Version 1 writes "no limit" as the largest number of pages.
_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Bound:
    """Something that limits memory, as one process sees it.

    Attributes:
        key: Equal for all processes that are under the same limit together.
        name: For people.
        free_nbytes: Bytes that it still lets them use, all together.
    """

    key: str
    name: str
    free_nbytes: int


def memory_bounds(root: Path) -> tuple[Bound, ...]:
    """Return a bound for every cgroup above this process that limits memory; own ones first.

    Args:
        root: Folder that holds ``proc``, and in which the mount points lie; ``/`` but in tests.
    """
    bounds: dict[str, Bound] = {}
    for mount, own, second in _hierarchies(root):
        for folder in _chain(mount, own):
            found = _second(folder) if second else _first(folder)
            if found is None:
                continue
            limit, used = found
            status = os.stat(folder)
            key = f"cgroup {status.st_dev}:{status.st_ino}"
            name = f"cgroup /{folder.relative_to(mount)}" if folder != mount else "cgroup /"
            bounds[key] = Bound(key, name, max(0, limit - used))
    return tuple(bounds.values())


def _hierarchies(root: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield (mount point, path of this process below it, whether version 2) of memory cgroups."""
    own: dict[bool, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            own[True] = path
        elif "memory" in controllers.split(","):
            own[False] = path
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kinds = before.split(), after.split()
        if len(fields) < 5 or len(kinds) < 3:
            continue
        second = kinds[0] == "cgroup2"
        first = kinds[0] == "cgroup" and "memory" in kinds[2].split(",")
        if (second or first) and second in own:
            top, mount = (_unescaped(field) for field in fields[3:5])
            yield root / mount.lstrip("/"), _below(own[second], top), second


def _below(path: str, top: str) -> str:
    """Return ``path`` as seen from ``top``, the cgroup that is mounted; outside of it: ``top``."""
    top = top.rstrip("/")
    if path != top and not path.startswith(top + "/"):
        return ""
    below = path[len(top) :].strip("/")
    return "" if ".." in below.split("/") else below


def _chain(mount: Path, own: str) -> Iterator[Path]:
    folder = mount / own
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    if mount.is_dir():
        yield mount


def _second(folder: Path) -> tuple[int, int] | None:
    """Return (limit, bytes in use that cannot be dropped) by version 2, or None without a limit."""
    limits = [_number(folder / name) for name in ("memory.max", "memory.high")]
    known = [limit for limit in limits if limit is not None]
    used = _number(folder / "memory.current")
    if not known or used is None:
        return None
    return min(known), used - _droppable(folder, "")


def _first(folder: Path) -> tuple[int, int] | None:
    """Return the same by version 1."""
    used = _number(folder / "memory.usage_in_bytes")
    limits = [_number(folder / "memory.limit_in_bytes"), _stat(folder, "hierarchical_memory_limit")]
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    if not known or used is None:
        return None
    return min(known), used - _droppable(folder, "total_")


def _droppable(folder: Path, prefix: str) -> int:
    """Return the bytes of page cache, which the system drops before anybody is killed."""
    parts = (_stat(folder, f"{prefix}{name}_file") for name in ("inactive", "active"))
    return sum(part or 0 for part in parts)


def _stat(folder: Path, name: str) -> int | None:
    for line in _lines(folder / "memory.stat"):
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdecimal():
            return int(value)
    return None


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].strip().isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def _unescaped(field: str) -> str:
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, character)
    return field
