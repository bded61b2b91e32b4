"""Verify the Ascend backend on this machine's NPUs; writes ascend-report.txt (docs/ascend.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = Path("ascend-report.txt")
TESTS = ("tests/test_ascend_ranks.py", "tests/test_ascend_backend.py")
LIMIT_S = 3600


def commands() -> list[list[str]]:
    """Return what is run, in order."""
    python = [sys.executable, "-m"]
    return [
        [*python, "dlo_core", "info", "--json"],
        [*python, "pip", "freeze"],
        [*python, "pytest", "--require", "npu", *TESTS],
        [*python, "dlo_core", "demo", "--device", "npu", "--json"],
    ]


def run(command: list[str]) -> tuple[int, str]:
    """Return the exit status and all that was printed."""
    print("==>", *command, flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            env={**os.environ, "COLUMNS": "160"},
        )
    except subprocess.TimeoutExpired as error:
        return 124, f"{error.stdout or ''}\nnot done after {LIMIT_S} s"
    return done.returncode, done.stdout


def main() -> int:
    """Run all, write the report, and return 0 only when all went well."""
    parts, failed = [], []
    for command in commands():
        status, said = run(command)
        name = " ".join(command[2:])
        parts.append(f"=== {name}\n=== exit status {status}\n{said}")
        if status:
            failed.append(name)
    verdict = f"FAILED: {'; '.join(failed)}" if failed else "all passed"
    REPORT.write_text("\n".join([verdict, *parts]), encoding="utf-8")
    print(f"{verdict}; wrote {REPORT.resolve()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
