"""The Ascend backend of dlo: its plug-in hook, which imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.registry import hookimpl

if TYPE_CHECKING:
    from dlo_core.interface import Backend

__all__ = ["dlo_backend"]


@hookimpl
def dlo_backend(device: str) -> Backend:
    """Return a backend for ``device``, such as ``"npu:1"``.

    Raises:
        BackendError: torch_npu cannot be used here, or this machine has no NPU like that.
    """
    from dlo_ascend.backend import make_backend

    return make_backend(device)
