"""Check that ``pip install dlo[ascend]`` resolves, and that it leaves a torch that is there alone.

usage: ascend_install.py FOLDER    make an environment in FOLDER and ask its pip

Nothing is installed but torch: pip only says what it would install.
"""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "2.13.0"


def would_install(python: Path, report: Path) -> dict[str, str]:
    """Return the names and versions that pip would install for ``dlo[ascend]``.

    Args:
        python: Of the environment.
        report: Where pip may write them.

    Raises:
        subprocess.CalledProcessError: It does not resolve; pip has said why.
    """
    command = [str(python), "-m", "pip", "install", "--quiet", "--dry-run", "--report", str(report)]
    subprocess.run([*command, f"{ROOT}[ascend]"], check=True)
    found = json.loads(report.read_text(encoding="utf-8"))["install"]
    data = [each["metadata"] for each in found]
    return {each["name"].lower().replace("_", "-"): each["version"] for each in data}


def main(arguments: list[str]) -> int:
    """Check and return the exit status."""
    if len(arguments) != 1:
        raise SystemExit(__doc__)
    folder = Path(arguments[0])
    venv.create(folder, clear=True, with_pip=True)
    python, report = folder / "bin" / "python", folder / "report.json"
    fresh = would_install(python, report)
    print("fresh:", *(f"{name}=={version}" for name, version in sorted(fresh.items())))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, f"torch=={TORCH}"], check=True)
    beside = would_install(python, report)
    print(f"beside torch {TORCH}:", *(f"{n}=={v}" for n, v in sorted(beside.items())))
    wrong = [
        text
        for text, bad in (
            (f"fresh: torch is {fresh.get('torch')}", not fresh.get("torch", "").startswith(TORCH)),
            ("fresh: no torch-npu", "torch-npu" not in fresh),
            ("beside torch: no torch-npu", "torch-npu" not in beside),
            (f"beside torch: it becomes {beside.get('torch')}", "torch" in beside),
        )
        if bad
    ]
    print(*(wrong or ["torch stays as it is"]), sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
