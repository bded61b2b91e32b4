"""The map of this process's memory: what kind of pages an address range lies on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Region", "regions_of"]

_LINE = re.compile(
    r"(?P<start>[0-9a-f]+)-(?P<stop>[0-9a-f]+) (?P<access>\S{4}) \S+ \S+ (?P<inode>\d+)"
    r"\s*(?P<path>.*)"
)
# Kernel memory with a name; all else that has an inode is a file.
_MEMORY = ("/memfd:", "/dev/zero", "/dev/shm/", "/SYSV", "/anon_hugepage")


@dataclass(frozen=True, slots=True)
class Region:
    """One mapping.

    Attributes:
        start: First address.
        stop: Address behind the last.
        writable: Whether this process may write it.
        shared: Whether writes go to what is mapped (``MAP_SHARED``).
        path: The file, or empty.
        backed: Whether a file or named memory lies behind it; False: plain anonymous pages.
    """

    start: int
    stop: int
    writable: bool
    shared: bool
    path: str
    backed: bool

    @property
    def file(self) -> bool:
        """Whether a file of a file system lies behind it."""
        return self.backed and not self.path.startswith(_MEMORY)


def regions_of(start: int, stop: int, maps: Path = Path("/proc/self/maps")) -> list[Region]:
    """Return the mappings that the range touches, by address."""
    found = (_region(line) for line in maps.read_text().splitlines())
    return [each for each in found if each and each.start < stop and start < each.stop]


def _region(line: str) -> Region | None:
    match = _LINE.match(line)
    if match is None:
        return None
    access, path = match["access"], match["path"]
    return Region(
        int(match["start"], 16),
        int(match["stop"], 16),
        writable=access[1] == "w",
        shared=access[3] == "s",
        path=path,
        backed=match["inode"] != "0" and not path.startswith("["),
    )
