"""The Ascend backend of dlo: so far its plug-in hook, which says why it cannot be used."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from dlo_core.errors import BackendError
from dlo_core.registry import hookimpl

if TYPE_CHECKING:
    from dlo_core.interface import Backend

__all__ = ["dlo_backend"]


@hookimpl
def dlo_backend(device: str) -> Backend:
    """Refuse ``device`` with the reason.

    Raises:
        BackendError: Always: the backend is not written yet.
    """
    found = importlib.util.find_spec("torch_npu") is not None
    raise BackendError(
        f"device {device!r}: this version of dlo has no Ascend backend yet (torch_npu is "
        f"{'' if found else 'not '}installed); use device='cpu' or 'cuda'"
    )
