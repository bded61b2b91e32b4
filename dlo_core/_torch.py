"""The first import of torch, which an installed device extension without its driver breaks."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

from dlo_core.errors import BackendError

__all__: list[str] = []

_SWITCH = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _is_command() -> bool:
    """Return whether this process is the command ``dlo`` and no program of a user's."""
    if sys.argv[0] == "-m":
        return ("-m", "dlo_core") in pairwise(sys.orig_argv)
    return Path(sys.argv[0]).stem == "dlo"


try:
    import torch  # noqa: F401 - whoever needs it imports it again
except RuntimeError as error:
    # torch loads every installed device extension when it is imported, and fails with it.
    if _SWITCH not in str(error):
        raise
    told = (
        f"torch itself cannot be imported: {error} The reason: {error.__cause__!r}. Either make "
        "the device's own libraries available in the shell that starts Python (for Ascend: "
        "`source .../ascend-toolkit/set_env.sh`), or set "
        f"{_SWITCH}=0 there to do without the device; it has to be set before Python starts. "
        "`dlo info` then shows which devices can be used"
    )
    if _is_command():
        # Nobody reads a traceback to its end for what to do.
        raise SystemExit(f"dlo: {told}") from None
    raise BackendError(told) from error
