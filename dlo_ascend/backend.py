"""The Ascend backend: Huawei NPUs with HCCL, on torch_npu's streams, events and pinned memory.

What differs from CUDA, and why, is in docs/ascend.md under "What the backend takes care of".
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from dlo_ascend.availability import import_torch_npu
from dlo_ascend.formats import private_format
from dlo_ascend.memory import AscendAllocator, RegisteringAllocator, exact_above_mib
from dlo_ascend.npurt import why_no_registration
from dlo_ascend.settings import describe
from dlo_ascend.streams import StreamTable, Switch
from dlo_core.accelerator import AcceleratorBackend, device_index
from dlo_core.interface import Capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

__all__ = ["AscendBackend", "make_backend"]


class AscendBackend(AcceleratorBackend):
    """A backend for one NPU."""

    def __init__(self, torch_npu: Any, device: torch.device) -> None:
        """Use ``device`` through ``torch_npu``."""
        registers = why_no_registration(torch_npu) is None
        make = RegisteringAllocator if registers else AscendAllocator
        threshold = exact_above_mib(os.environ.get("PYTORCH_NPU_ALLOC_CONF", ""))
        super().__init__(
            torch_npu.npu,
            device,
            comm_library="hccl",
            capabilities=Capabilities(
                # That of torch_npu's own allocator; copies want 64 bytes on both sides.
                alignment=512,
                host_blocks=False,
                pinned_memory=True,
                host_registration=registers,
                # What is rounded below a MiB is a few pages.
                locks_exactly=threshold is not None and threshold <= 1,
            ),
            allocator=make(torch_npu.npu, device),
        )
        self._torch_npu = torch_npu
        self._streams = StreamTable(torch_npu.npu, device)

    def new_stream(self, priority: int = 0) -> Any:
        """Return a new stream; CANN takes no ``priority``."""
        return self._module.Stream(device=self.device)

    def current_stream(self) -> Any:
        """Return this thread's current stream."""
        return self._streams.current()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current."""
        return Switch(self._streams, stream)

    def settings(self) -> Mapping[str, str]:
        """Return versions, and what the environment says of memory, queues and HCCL."""
        return describe(self._torch_npu)

    def refusal(self, tensor: torch.Tensor) -> str | None:
        """Return why a tensor in a private format cannot be offloaded, or None."""
        return private_format(self._torch_npu, tensor)


def make_backend(device: str) -> AscendBackend:
    """Return a backend for ``device``.

    Raises:
        BackendError: torch_npu cannot be used here, or there is no such device.
    """
    torch_npu = import_torch_npu(device)
    number = device_index(
        torch_npu.npu,
        device,
        kind="NPUs",
        absent="torch_npu sees no NPU (the driver is missing, this container was not given the "
        "devices, or ASCEND_RT_VISIBLE_DEVICES hides them)",
    )
    return AscendBackend(torch_npu, torch.device("npu", number))
