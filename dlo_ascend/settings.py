"""Settings: what of the environment decides speed and memory on an NPU, for ``dlo info``."""

from __future__ import annotations

import os
from typing import Any

from dlo_ascend.memory import EXACT, exact_above_mib
from dlo_ascend.npurt import version_of, why_no_registration

__all__ = ["describe"]

_HCCL_MIB = "200"


def describe(torch_npu: Any) -> dict[str, str]:
    """Return names and values, with a remark where a value costs something.

    Args:
        torch_npu: The module.
    """
    return {
        "torch_npu": torch_npu.__version__,
        "CANN": version_of(torch_npu, "CANN") or "unknown",
        "driver": version_of(torch_npu, "DRIVER") or "unknown",
        "pinned memory": pinned_memory(os.environ.get("PYTORCH_NPU_ALLOC_CONF", "")),
        "host registration": host_registration(torch_npu),
        "TASK_QUEUE_ENABLE": os.environ.get("TASK_QUEUE_ENABLE", "1 (default)"),
        "HCCL_BUFFSIZE": hccl_buffers(os.environ.get("HCCL_BUFFSIZE", "")),
        **costly(os.environ),
    }


def pinned_memory(allocator: str) -> str:
    """Return how pinned memory is rounded, from ``PYTORCH_NPU_ALLOC_CONF``."""
    threshold = exact_above_mib(allocator)
    if threshold is not None:
        return f"exact above {threshold} MiB ({allocator})"
    return f"rounded up to powers of two; set PYTORCH_NPU_ALLOC_CONF={EXACT} for exact sizes"


def host_registration(torch_npu: Any) -> str:
    """Return whether memory that is there already can be page-locked, which ranks that share want.

    Args:
        torch_npu: The module.
    """
    reason = why_no_registration(torch_npu)
    return "yes, for memory that ranks share" if reason is None else f"not used: {reason}"


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
