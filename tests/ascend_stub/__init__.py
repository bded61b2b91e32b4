"""The control of the CANN stand-in: its trace, its knobs and its faults, from Python.

The stand-in itself is C++; see README.md beside this file.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Trace", "failing", "knobs", "loaded", "start_method", "tracing"]


def library() -> Any:
    """Return the stand-in's runtime library.

    Raises:
        OSError: There is no libascendcl.so.
        AttributeError: It is CANN's own.
    """
    found = ctypes.CDLL("libascendcl.so")
    found.dlo_stub_set.argtypes = [ctypes.c_char_p, ctypes.c_long]
    found.dlo_stub_fail.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_long, ctypes.c_int]
    found.dlo_stub_trace.argtypes = [ctypes.c_char_p]
    return found


def loaded() -> bool:
    """Return whether CANN is the stand-in here."""
    try:
        library()
    except (OSError, AttributeError):
        return False
    return True


def start_method() -> str:
    """Return how ranks are started: forked from a process that has not touched the device yet."""
    import torch

    npu = getattr(torch, "npu", None)
    return "fork" if loaded() and npu is not None and not npu.is_initialized() else "spawn"


@contextmanager
def knobs(**values: int) -> Iterator[None]:
    """Set knobs (``copy_us``, ``op_us``, ``align``, ``hccl_timeout_s``) inside; 0 or 60 after."""
    for name, value in values.items():
        assert library().dlo_stub_set(name.encode(), value), f"there is no knob {name!r}"
    try:
        yield
    finally:
        for name in values:
            variable = f"DLO_STUB_{name.upper()}"
            default = 60 if name == "hccl_timeout_s" else 0
            library().dlo_stub_set(name.encode(), int(os.environ.get(variable, default)))


@contextmanager
def failing(call: str, *, code: int, skip: int = 0, count: int = 1) -> Iterator[None]:
    """Let ``count`` calls of ``call`` fail with ``code``, after ``skip`` that do not."""
    library().dlo_stub_fail(call.encode(), skip, count, code)
    try:
        yield
    finally:
        library().dlo_stub_fail(call.encode(), 0, 0, 0)


class Trace:
    """What the runtime was asked for, call by call."""

    def __init__(self) -> None:
        """Begin empty."""
        self.lines: list[str] = []

    def of(self, *names: str) -> list[str]:
        """Return the lines of calls of these names."""
        return [line for line in self.lines if line.split(" ", 1)[0] in names]

    def count(self, *names: str) -> int:
        """Return how many calls of these names there were."""
        return len(self.of(*names))

    def __repr__(self) -> str:
        """Show all lines."""
        return "\n".join(self.lines)


@contextmanager
def tracing() -> Iterator[Trace]:
    """Collect the runtime's calls inside; the trace is filled when the context ends."""
    trace = Trace()
    with tempfile.TemporaryDirectory(prefix="dlo-trace-") as folder:
        path = Path(folder, "trace")
        library().dlo_stub_trace(str(path).encode())
        try:
            yield trace
        finally:
            library().dlo_stub_trace(b"")
            trace.lines = path.read_text(encoding="utf-8").splitlines()
