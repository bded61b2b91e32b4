"""A child: one measurement in a process of its own, ended for sure when its time is up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["answer", "machine", "run_child", "said"]

_TAIL = 3000


def run_child(script: str, arguments: list[str], *, limit_s: float) -> dict[str, Any]:
    """Run ``script`` with ``arguments`` and return what it hands to ``answer``.

    Returns:
        The answer, or ``{"error": ..., "log": ...}`` with the end of what the child printed; with
        ``seconds`` in both.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlo-child-") as folder:
        file, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, script, *arguments, "--answer", str(file)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            found: dict[str, Any] = {}
            try:
                code = child.wait(timeout=limit_s)
                if code:
                    found = {"error": f"exit code {code}"}
            except subprocess.TimeoutExpired:
                found = {"error": f"killed after {limit_s:.0f} s"}
            finally:
                _end(child)
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
    temporary = Path(path + ".new")
    temporary.write_text(json.dumps(value))
    temporary.replace(path)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's own session: the child and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


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


def said(command: list[str]) -> str:
    """Return what a command says, or why it says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return done.stdout.strip() or "unknown"
