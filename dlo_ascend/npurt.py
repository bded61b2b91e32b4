"""Host registration: whether CANN can page-lock memory that is there already, and the calls.

torch_npu takes registered memory for pinned, and copies from it without holding the host, only
where CANN and the driver tell it what an address is; elsewhere it waits for the stream at every
copy, which is worse than memory that was never locked.
"""

from __future__ import annotations

import os
import re
from typing import Any

__all__ = ["MAPPED", "Npurt", "why_no_registration"]

MAPPED = 2
"""Flag of a registration that the device reads through a mapping: at the link's full rate."""
_CANN, _DRIVER, _KERNEL = "8.5.0", "25.5.0", "5.11"
# CANN's own names of what a registration may end with.
_MEANING = {
    107000: "ACL_ERROR_RT_PARAM_INVALID",
    207000: "ACL_ERROR_RT_FEATURE_NOT_SUPPORT",
    207001: "ACL_ERROR_RT_MEMORY_ALLOCATION",
    507899: "ACL_ERROR_RT_DRV_INTERNAL_ERROR",
}


class Npurt:
    """torch_npu's runtime calls, for one device."""

    def __init__(self, module: Any, device: Any) -> None:
        """Call nothing yet.

        Args:
            module: ``torch.npu``.
            device: Which device is current in a call.
        """
        self._module = module
        self._device = device

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock a range for the device, and start the device if it was not."""
        with self._module.device(self._device):
            return int(self._module.npurt().npuHostRegister(address, nbytes, flags))

    def host_unregister(self, address: int) -> int:
        """Unlock the range that begins at ``address``."""
        with self._module.device(self._device):
            return int(self._module.npurt().npuHostUnregister(address))

    def take_error(self) -> int:
        """Return 0: a refused registration leaves nothing behind."""
        return 0

    def describe(self, code: int) -> str:
        """Return CANN's name of an error code."""
        return _MEANING.get(code, "see the list of CANN's return codes")

    def synchronize(self) -> int:
        """Block until the device is idle."""
        self._module.synchronize(self._device)
        return 0


def why_no_registration(torch_npu: Any, kernel: str = os.uname().release) -> str | None:
    """Return why memory that is there already should not be page-locked, or None.

    Nothing is started: ``npurt()`` itself would start the device.

    Args:
        torch_npu: The module.
        kernel: Release of the system's kernel.
    """
    if not hasattr(torch_npu.npu, "npurt"):
        return f"torch_npu {torch_npu.__version__} has no npurt()"
    for package, least in (("RUNTIME", _CANN), ("DRIVER", _DRIVER)):
        found = version_of(torch_npu, package)
        name = "CANN" if package == "RUNTIME" else "the driver"
        if not found:
            return f"copies might hold the host: the version of {name} is unknown"
        if _numbers(found) < _numbers(least):
            return f"copies would hold the host: {name} is {found}, and {least} is needed"
    if _numbers(kernel) < _numbers(_KERNEL):
        return f"Linux {kernel} cannot: {_KERNEL} is needed"
    return None


def version_of(torch_npu: Any, package: str) -> str:
    """Return the version of one of CANN's packages; empty where torch_npu does not tell it."""
    tell = getattr(torch_npu.npu.utils, "get_cann_version", None)
    try:
        return str(tell(package)) if tell is not None else ""
    except (RuntimeError, TypeError):
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
