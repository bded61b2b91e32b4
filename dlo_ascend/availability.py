"""Availability: whether torch_npu can be imported here, and if not, what to do about it.

torch_npu without CANN breaks ``import torch`` itself, a release of it beside another release of
torch crashes, and beside a torch that was built for CUDA it ends the process while it loads. So all
of this is looked at before torch_npu is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
import sys
from importlib import metadata
from typing import Any

import torch

from dlo_core.errors import BackendError

__all__ = ["import_torch_npu"]

# Those of CANN's libraries that torch_npu is linked against.
CANN_LIBRARIES = ("libascendcl.so", "libhccl.so", "libge_runner.so", "libgraph.so")
_GET_CANN = (
    "install CANN and, in the shell that starts Python, `source .../ascend-toolkit/set_env.sh`. "
    "Without CANN torch_npu breaks `import torch` itself: set TORCH_DEVICE_BACKEND_AUTOLOAD=0 "
    "there, or uninstall torch-npu"
)


def import_torch_npu(device: str) -> Any:
    """Return the module ``torch_npu``, imported now if it was not before.

    Args:
        device: What was asked for, for the error.

    Raises:
        BackendError: It cannot be imported; says why and what to do.
    """
    if "torch_npu" not in sys.modules:
        reason = why_absent() or why_unfit(torch.__version__, build_of_torch()) or why_no_cann()
        if reason is not None:
            raise BackendError(f"device {device!r}: {reason}")
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(
            f"device {device!r}: torch_npu cannot be imported: {type(error).__name__}: {error}; "
            f"{_GET_CANN}"
        ) from error


def why_absent() -> str | None:
    """Return why there is no torch_npu to import, or None."""
    if importlib.util.find_spec("torch_npu") is not None:
        return None
    wanted = ".".join(map(str, release(torch.__version__)))
    return (
        f"torch_npu is not installed; on a machine with an Ascend NPU and CANN: pip install "
        f"torch-npu=={wanted} (its release must be that of torch, which is {torch.__version__})"
    )


def why_unfit(torch_version: str, build: str | None) -> str | None:
    """Return why torch_npu must not be imported beside this torch, or None.

    Args:
        torch_version: Of torch.
        build: The accelerator that torch was built for, or None.
    """
    try:
        version = metadata.version("torch-npu")
    except metadata.PackageNotFoundError:
        # Not from a wheel: nothing is known of what it was made for.
        version = None
    if build is not None:
        return (
            f"torch {torch_version} is built for {build}, and torch_npu ends the process beside "
            f"it; the backends for {build} and Ascend need environments of their own: install the "
            "CPU build of torch in this one"
        )
    if version is not None and release(version) != release(torch_version):
        wanted = ".".join(map(str, release(torch_version)))
        return (
            f"torch-npu {version} works with torch {'.'.join(map(str, release(version)))} only, "
            f"and torch is {torch_version}: pip install torch-npu=={wanted}, or that torch"
        )
    return None


def why_no_cann() -> str | None:
    """Return why CANN cannot be loaded, or None."""
    for name in CANN_LIBRARIES:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            return f"torch_npu is installed, but CANN is not to be found ({error}); {_GET_CANN}"
    return None


def build_of_torch() -> str | None:
    """Return the accelerator that torch was built for: ``"CUDA 13.0"``, or None for the CPU."""
    for name in ("cuda", "hip", "xpu"):
        version = getattr(torch.version, name, None)
        if version is not None:
            return f"{name.upper()} {version}"
    return None


def release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of ``version``: ``(2, 7, 1)`` of ``"2.7.1.post2+cpu"``."""
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])
