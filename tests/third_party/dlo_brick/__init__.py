"""A backend for dlo from a third party: a device that does everything at once, on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core import hookimpl

if TYPE_CHECKING:
    from dlo_core import Backend

__all__ = ["dlo_backend"]


@hookimpl
def dlo_backend(device: str) -> Backend:
    """Return a backend for ``device``, such as ``"brick:1"``."""
    from dlo_brick.backend import BrickBackend

    return BrickBackend(device)
