"""The checkout: lets the scripts here run from a clone in which dlo was not installed.

An installed dlo finds its backends by entry points. A clone has none, so the ones that its
``pyproject.toml`` declares are written where Python looks for them, for this process and those that
it starts.

    python benchmarks/checkout.py -m pytest -q tests/test_bits.py    Python, for a clone
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

__all__ = ["ROOT", "use_checkout"]

ROOT = Path(__file__).resolve().parent.parent


def use_checkout() -> None:
    """Make ``dlo_core`` importable and its backends known, where they are not already."""
    paths = []
    if find_spec("dlo_core") is None:
        paths.append(str(ROOT))
    if not metadata.entry_points(group="dlo"):
        paths.append(str(_entry_points()))
    if paths:
        sys.path[:0] = paths
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])


def _entry_points() -> Path:
    """Return a folder that declares what ``pyproject.toml`` declares."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    table = text.partition("[project.entry-points.dlo]\n")[2].partition("\n[")[0]
    points = re.findall(r'^(\w+) = "([\w.]+)"$', table, re.MULTILINE)
    folder = Path(tempfile.mkdtemp(prefix="dlo-checkout-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    info = folder / "dlo-0.dist-info"
    info.mkdir()
    rows = "".join(f"{name} = {value}\n" for name, value in points)
    (info / "entry_points.txt").write_text(f"[dlo]\n{rows}", encoding="utf-8")
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: dlo\nVersion: 0\n", encoding="utf-8"
    )
    return folder


if __name__ == "__main__":
    use_checkout()
    sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))
