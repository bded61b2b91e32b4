"""Settings: what of the environment decides speed and memory on a GPU, for ``dlo info``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["OWN_GROUPS", "describe"]

OWN_GROUPS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
"""For groups of dlo's own. Otherwise torch's watchdog, which sees a peer go before anybody else,
has the default group write a dump of all groups and ends the process."""
_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_NCCL_MIB = "4"


def describe(*, exact: bool) -> dict[str, str]:
    """Return names and values, with a remark where a value costs something.

    Args:
        exact: Whether host memory is page-locked in slabs of dlo's own.
    """
    return {
        "CUDA": torch.version.cuda or "unknown",
        "driver": driver_version(),
        "NCCL": nccl_version(),
        "pinned memory": pinned_memory(exact=exact),
        "huge pages": huge_pages(),
        "PYTORCH_CUDA_ALLOC_CONF": device_memory(os.environ),
        "CUDA_DEVICE_MAX_CONNECTIONS": connections(
            os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        ),
        "NCCL_BUFFSIZE": nccl_buffers(os.environ.get("NCCL_BUFFSIZE", "")),
        **costly(os.environ),
    }


def driver_version(path: Path = _DRIVER) -> str:
    """Return the driver's version, as the kernel tells it."""
    try:
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(errors="replace"))
    except OSError:
        return "unknown"
    return found.group(1) if found else "unknown"


def nccl_version() -> str:
    """Return the version of NCCL that torch has, or that it has none."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        return "not in this torch: no gathers"


def pinned_memory(*, exact: bool) -> str:
    """Return how pinned memory is rounded."""
    if exact:
        return "exact: slabs that are registered where they lie"
    return "rounded up to powers of two by torch, since this machine registers no memory"


def huge_pages(path: Path = _HUGE_PAGES) -> str:
    """Return whether slabs lie on huge pages, which are locked several times as fast."""
    try:
        chosen = re.search(r"\[(\w+)\]", path.read_text())
    except OSError:
        return "unknown"
    if chosen is None or chosen.group(1) != "never":
        return chosen.group(1) if chosen else "unknown"
    return f"never: page-locking takes longer; write madvise to {path}"


def device_memory(environment: Mapping[str, str]) -> str:
    """Return how torch's allocator takes memory of the device."""
    conf = environment.get("PYTORCH_CUDA_ALLOC_CONF") or environment.get("PYTORCH_ALLOC_CONF", "")
    if not conf:
        return "not set; expandable_segments:True lets activations of several sizes share memory"
    if "cudaMallocAsync" in conf:
        return f"{conf}: the driver's allocator, whose reserved memory dlo cannot tell exactly"
    return conf


def connections(count: str) -> str:
    """Return over how many queues the streams go to the device."""
    if count == "1":
        return "1: copies and gathers wait behind the kernels that were queued before them"
    return count or "8 (default)"


def nccl_buffers(size: str) -> str:
    """Return what a communicator takes of the device, from ``NCCL_BUFFSIZE``."""
    told = f"{size} bytes" if size else f"{_NCCL_MIB} MiB (default)"
    return f"{told} of device memory a channel and peer of each group"


def costly(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that are on and make the host wait, or the links slower."""
    found = {
        "CUDA_LAUNCH_BLOCKING": "every kernel holds the host: nothing overlaps",
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the device",
        "TORCH_NCCL_BLOCKING_WAIT": "every gather holds the host: nothing overlaps",
        "NCCL_BLOCKING_WAIT": "every gather holds the host: nothing overlaps",
        "NCCL_P2P_DISABLE": "gathers go through host memory, beside the copies",
        "NCCL_SHM_DISABLE": "gathers within a node go over the network",
    }
    return {
        name: f"{environment[name]}: {why}"
        for name, why in found.items()
        if environment.get(name, "0") not in ("", "0")
    }
