"""Settings: what of the environment decides speed and memory on an NPU, for ``dlo info``."""

from __future__ import annotations

import os
from typing import Any

from dlo_ascend.memory import EXACT

__all__ = ["describe"]

_HCCL_MIB = "200"


def describe(torch_npu: Any) -> dict[str, str]:
    """Return names and values, with a remark where a value costs something.

    Args:
        torch_npu: The module.
    """
    return {
        "torch_npu": torch_npu.__version__,
        "CANN": cann_version(torch_npu) or "unknown",
        "pinned memory": pinned_memory(os.environ.get("PYTORCH_NPU_ALLOC_CONF", "")),
        "host registration": host_registration(torch_npu),
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "1 (default)"),
        "HCCL_BUFFSIZE": hccl_buffers(os.environ.get("HCCL_BUFFSIZE", "")),
        **costly(os.environ),
    }


def cann_version(torch_npu: Any) -> str | None:
    """Return the version of CANN, or None where torch_npu does not tell it."""
    tell = getattr(torch_npu.npu.utils, "get_cann_version", None)
    return str(tell()) if tell is not None else None


def pinned_memory(allocator: str) -> str:
    """Return how pinned memory is rounded, from ``PYTORCH_NPU_ALLOC_CONF``."""
    keys = dict(part.strip().partition(":")[::2] for part in allocator.split(",") if part.strip())
    expandable = keys.get("pin_memory_expandable_segments", "").lower() == "true"
    if "pinned_max_round_threshold_mb" in keys and not expandable:
        return f"exact above {keys['pinned_max_round_threshold_mb']} MiB ({allocator})"
    return f"rounded up to powers of two; set PYTORCH_NPU_ALLOC_CONF={EXACT} for exact sizes"


def host_registration(torch_npu: Any) -> str:
    """Return whether memory that another allocator made could be registered with the driver.

    Where it can, torch_npu waits for the stream at every copy from it, unless CANN and the driver
    are new enough; dlo therefore uses pinned memory and registers nothing.
    """
    # To ask npurt() itself would start the device.
    if not hasattr(torch_npu.npu, "npurt"):
        return "not in this torch_npu; not used"
    newer = getattr(torch_npu.npu.utils, "_is_gte_cann_version", None)
    if newer is None or not newer("8.5.0"):
        return "copies would hold the host: CANN is older than 8.5.0; not used"
    return "copies hold the host unless the driver is 25.5.0 or newer; not used"


def hccl_buffers(size: str) -> str:
    """Return what a communicator takes of the device, from ``HCCL_BUFFSIZE``."""
    return f"{size or f'{_HCCL_MIB} (default)'} MiB of device memory a buffer of each group"


def costly(environment: Any) -> dict[str, str]:
    """Return the settings that are on and make the host wait, or are known to hang."""
    found = {
        "ASCEND_LAUNCH_BLOCKING": "every operator holds the host: nothing overlaps",
        "TORCH_HCCL_BLOCKING_WAIT": "every gather holds the host: nothing overlaps",
        "HCCL_BLOCKING_WAIT": "every gather holds the host: nothing overlaps",
    }
    told = {
        name: f"{environment[name]}: {why}"
        for name, why in found.items()
        if environment.get(name, "0") not in ("", "0")
    }
    if environment.get("HCCL_OP_EXPANSION_MODE") == "AIV":
        told["HCCL_OP_EXPANSION_MODE"] = "AIV: hangs were reported with it"
    return told
