"""A child: one measurement in a process of its own, ended for sure when its time is up."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from scratch import sweep

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["answer", "end_with_parent", "keep", "machine", "run_child", "said"]

_TAIL = 3000
_LOOK_S = 1.0
_PACKAGES = ("dlo_core", "dlo_cuda", "dlo_ascend")


def run_child(
    script: str,
    arguments: list[str],
    *,
    limit_s: float,
    on_answer: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Run ``script`` with ``arguments`` and return what it hands to ``answer``.

    Args:
        script: Calls ``end_with_parent`` first.
        arguments: Of the script.
        limit_s: After so many seconds it is killed with all that it started.
        on_answer: Is told what the child has handed over while it goes on, about once a second.

    Returns:
        The answer, or ``{"error": ..., "log": ...}`` with the end of what the child printed; with
        ``seconds`` in both.
    """
    start = time.monotonic()
    # Of a run that was killed before this one.
    sweep()
    with tempfile.TemporaryDirectory(prefix="dlo-child-") as folder:
        file, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, script, *arguments, "--answer", str(file)],
                # Never written to; it ends when this process does, however that comes.
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                found = _wait(child, file, start + limit_s, on_answer)
            finally:
                _end(child)
                sweep()
        found = {"error": f"killed after {limit_s:.0f} s"} if found is None else found
        if file.exists():
            # What the child says of its own failure says more.
            found |= json.loads(file.read_text())
        elif not found:
            found = {"error": "no answer"}
        if "error" in found:
            found.setdefault("log", log.read_text(errors="replace")[-_TAIL:])
    return found | {"seconds": round(time.monotonic() - start, 1)}


def answer(path: str, value: dict[str, Any]) -> None:
    """Hand ``value`` to the parent; may be called again with more."""
    keep(Path(path), json.dumps(value))


def keep(path: Path, text: str) -> None:
    """Write a file whole or not at all: whoever is killed here leaves what was there before."""
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text)
    temporary.replace(path)


def end_with_parent() -> None:
    """Let this process, and all that it starts, end when the one that runs it does.

    A child is in a session of its own, so nothing else ends it with a parent that is killed: it
    would stay on the device and be measured with what comes next.
    """
    if not stat.S_ISFIFO(os.fstat(0).st_mode):
        # Somebody runs the measurement by hand.
        return

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.killpg(0, signal.SIGKILL)

    Thread(target=wait, name="parent", daemon=True).start()


def _wait(
    child: subprocess.Popen[bytes],
    file: Path,
    deadline: float,
    on_answer: Callable[[dict[str, Any]], None],
) -> dict[str, Any] | None:
    """Wait for the child; return what its exit code says, None when its time is up."""
    seen = 0
    while (left := deadline - time.monotonic()) > 0:
        try:
            code = child.wait(timeout=min(left, _LOOK_S))
        except subprocess.TimeoutExpired:
            now = file.stat().st_mtime_ns if file.exists() else 0
            if now != seen:
                seen = now
                on_answer(json.loads(file.read_text()))
        else:
            return {"error": f"exit code {code}"} if code else {}
    return None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's own session: the child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def machine(device: str) -> dict[str, Any]:
    """Return where a measurement was made, and with what."""
    import platform
    from importlib import metadata

    import torch

    import dlo_core

    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "device": device,
        "dlo": dlo_core.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "commit": said(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]),
        "code": code_digest(),
    }
    for package in ("diffusers", "accelerate", "mmgp", "vllm-omni", "safetensors"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.partition(":")[0] == "cuda":
        query = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
        found["gpu"] = said(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def code_digest() -> str:
    """Return what tells one version of dlo's code from another, also where there is no git."""
    import dlo_core

    made = hashlib.sha256()
    top = Path(dlo_core.__file__).parent.parent
    for path in sorted(path for name in _PACKAGES for path in (top / name).rglob("*.py")):
        made.update(path.relative_to(top).as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()[:12]


def said(command: list[str]) -> str:
    """Return what a command says, or why it says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return done.stdout.strip() or "unknown"
