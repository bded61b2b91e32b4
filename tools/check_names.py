"""Fail when a file of the repository names a path of one machine or the host of a registry.

Such a name works for one person only. Run it from the root of the repository.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

# A character class around one letter keeps this file from finding itself.
MACHINE_PATH = (
    r"(?<![\w.~}])/(?:[w]ork|[r]oot|[h]ome|[o]pt|[U]sers|[m]nt|[t]mp|var/[t]mp)"
    r"(?:/|\b(?=[\"'`\s]))"
)
OTHER_REPOSITORY = r"\.\./[s]hared"
REGISTRY_HOST = (
    r"[p]ypi\.org|[p]ythonhosted\.org|[d]ownload\.pytorch\.org|[r]egistry\.npmjs\.org"
    r"|[n]pmmirror\.com|mirrors\.[a-z]|[a]naconda\.org|--(?:extra-)?[i]ndex-url"
)
FORBIDDEN = re.compile("|".join((MACHINE_PATH, OTHER_REPOSITORY, REGISTRY_HOST)))


def repository_files() -> list[Path]:
    """List the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [path for name in listed.split("\0") if name and (path := Path(name)).is_file()]


def findings(path: Path) -> list[str]:
    """Describe each forbidden name in ``path``; a file that is not text has none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        return []
    return [
        f"{path}:{number}: {match.group()!r} is a machine path or a registry host"
        for number, line in enumerate(lines, start=1)
        if (match := FORBIDDEN.search(line))
    ]


def main() -> int:
    """Print every finding and return the exit status."""
    files = repository_files()
    found = [text for path in files for text in findings(path)]
    print("\n".join(found) or f"no machine path and no registry host in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
