"""Verify the Ascend backend on this machine's NPUs, and write a report (docs/ascend.md).

Every part runs in a process group of its own with a limit, and the report is written as it goes, so
what was found is in it however it ends. The exit status is 0 only when every part went well.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
# Ranks are forked from a process that has not touched a device, so the files with ranks come first.
TESTS = (
    "tests/test_ascend_ranks.py",
    "tests/test_ascend_lifecycle.py",
    "tests/test_ascend_registered.py",
    "tests/test_ascend_backend.py",
)
SMALL = ["--width", "64", "--heads", "2", "--blocks", "3", "--tokens", "16", "--passes", "2"]
SHOWN = ("ASCEND", "HCCL", "TORCH_HCCL", "PYTORCH_NPU", "TASK_QUEUE", "LD_LIBRARY_PATH", "DLO_STUB")


@dataclass(frozen=True, slots=True)
class Part:
    """One command.

    Attributes:
        name: Of the part.
        command: What is run.
        needed: Whether its failure is the report's.
        limit_s: Seconds that it may take.
    """

    name: str
    command: list[str]
    needed: bool = True
    limit_s: float = 1800.0


def parts(small: bool, pytest_arguments: list[str]) -> list[Part]:
    """Return what is run, in order.

    Args:
        small: Speed at toy size only, to try this script out.
        pytest_arguments: Passed on to the tests.
    """
    python = [sys.executable, "-m"]
    dlo = [*python, "dlo_core"]
    npu = ["--device", "npu", "--json"]
    bench = [*dlo, "bench", *npu, *(SMALL if small else [])]
    found = [
        Part("devices", ["npu-smi", "info"], needed=False, limit_s=60.0),
        Part("info", [*dlo, "info", "--json"], limit_s=300.0),
        Part("packages", [*python, "pip", "freeze"], needed=False, limit_s=300.0),
        Part("tests", [*python, "pytest", "--require", "npu", *TESTS, *pytest_arguments]),
        Part("demo", [*dlo, "demo", *npu]),
        Part("bench, rank-local", [*bench, "--no-use-allgather"]),
    ]
    if not small:
        found.insert(5, Part("probe", [*dlo, "probe", *npu]))
        found.append(Part("bench, two ranks", [*bench, "--ranks", "2"], needed=False))
    return found


def run(part: Part) -> tuple[str, str]:
    """Return how a part ended, ``"ok"`` where it went well, and all that it printed."""
    print(f"==> {part.name}:", *part.command, flush=True)
    if shutil.which(part.command[0]) is None:
        return f"there is no {part.command[0]}", ""
    with subprocess.Popen(
        part.command,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "COLUMNS": "160"},
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=part.limit_s)
            ending = f"exit status {process.returncode}" if process.returncode else "ok"
        except subprocess.TimeoutExpired:
            end(process)
            said, _ = process.communicate()
            ending = f"not done after {part.limit_s:g} s"
        except BaseException:
            # An interrupt from the terminal does not reach a process group of its own.
            end(process)
            raise
    return ending, said


def end(process: subprocess.Popen[str]) -> None:
    """Kill a part with its ranks: they would hold the pipe, and the device."""
    os.killpg(process.pid, signal.SIGKILL)


def write(report: TextIO, todo: list[Part]) -> list[str]:
    """Run all and write it down; return what failed."""
    failed = []
    shown = sorted(name for name in os.environ if name.startswith(SHOWN))
    print(f"{platform.platform()}, Python {platform.python_version()}", file=report)
    print(*(f"{name}={os.environ[name]}" for name in shown), sep="\n", file=report)
    for part in todo:
        ending, said = run(part)
        print(f"    {ending}", flush=True)
        print(f"\n=== {part.name}: {ending}\n{' '.join(part.command)}\n{said}", file=report)
        report.flush()
        if part.needed and ending != "ok":
            failed.append(f"{part.name} ({ending})")
    verdict = f"FAILED: {'; '.join(failed)}" if failed else "all passed"
    print(f"\n=== {verdict}", file=report)
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run all, write the report, and return 0 only when all went well."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("ascend-report.txt"))
    parser.add_argument("--small", action="store_true", help="speed at toy size only")
    parser.add_argument("pytest", nargs="*", help="arguments for the tests, after --")
    given = parser.parse_args(arguments)
    with given.out.open("w", encoding="utf-8") as report:
        failed = write(report, parts(given.small, given.pytest))
    print(
        f"{'FAILED: ' + '; '.join(failed) if failed else 'all passed'}; wrote {given.out.resolve()}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
