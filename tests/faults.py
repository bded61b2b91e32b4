"""Faults: an exception at the first call of a chosen function of dlo, on this thread."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

__all__ = ["Injected", "called", "failing_at"]


class Injected(Exception):
    """The fault."""


def _name(frame: FrameType) -> str | None:
    module = frame.f_globals.get("__name__", "")
    if not module.startswith("dlo_core.") or frame.f_code.co_name.startswith("<"):
        return None
    code = frame.f_code
    return f"{module}:{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"


@contextmanager
def _traced(see: Callable[[str], None]) -> Iterator[None]:
    def trace(frame: FrameType, event: str, arg: Any) -> None:
        name = _name(frame)
        if event == "call" and name is not None:
            see(name)

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def called(names: list[str]) -> Iterator[None]:
    """Append to ``names`` every function of dlo that is called inside, once, in order."""

    def see(name: str) -> None:
        if name not in names:
            names.append(name)

    with _traced(see):
        yield


@contextmanager
def failing_at(name: str) -> Iterator[None]:
    """Raise ``Injected`` at the first call of the function ``name`` inside."""
    pending = [name]

    def see(seen: str) -> None:
        if pending and seen == pending[0]:
            pending.clear()
            raise Injected(f"injected into {name}")

    with _traced(see):
        yield
