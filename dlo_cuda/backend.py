"""The CUDA backend: NVIDIA GPUs with NCCL, on torch's own streams and events and our own slabs."""

from __future__ import annotations

import gc
import logging
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from dlo_core.accelerator import AcceleratorBackend, device_index
from dlo_core.errors import BackendError
from dlo_core.interface import Capabilities
from dlo_cuda.availability import check_built
from dlo_cuda.copies import CopyCollective, copies_options, copies_refusal
from dlo_cuda.cudart import load_runtime
from dlo_cuda.pinned import SlabAllocator
from dlo_cuda.settings import OWN_GROUPS, describe
from dlo_cuda.streams import Streams

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from torch.distributed import ProcessGroup

    from dlo_core.interface import Codec, Collective, Graph, Stream
    from dlo_cuda.cudart import Runtime

__all__ = ["CudaBackend", "make_backend"]

_logger = logging.getLogger("dlo")


class CudaBackend(AcceleratorBackend):
    """What ``torch.cuda`` gives, with pinned slabs of exact size."""

    def __init__(
        self, device: torch.device, slabs: SlabAllocator | None, *, readonly: bool = False
    ) -> None:
        """Take what was probed.

        Args:
            device: The device, with its index.
            slabs: Makes the host buffers; None: torch's own pinned memory.
            readonly: Whether memory that may not be written can be locked in place.
        """
        super().__init__(
            torch.cuda,
            device,
            comm_library="nccl",
            capabilities=Capabilities(
                alignment=256,
                host_blocks=False,
                pinned_memory=True,
                host_registration=slabs is not None,
                readonly_registration=slabs is not None and readonly,
                # torch's own pinned memory takes powers of two.
                locks_exactly=slabs is not None,
                graph_capture=True,
            ),
            allocator=slabs,
        )
        self._slabs = slabs
        self._streams = Streams(device.index)

    def new_stream(self, priority: int = 0) -> Stream:
        """Return a new stream of the device."""
        return self._streams.new(priority)

    def current_stream(self) -> Stream:
        """Return the device's current stream in this thread."""
        return self._streams.current()

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Make ``stream`` current."""
        context: AbstractContextManager[Any] = self._streams.made_current(stream)
        return context

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue the copy; asynchronous where the host side is pinned.

        The driver takes no copy from two registrations at once, so one that crosses a seam between
        two pieces of a large slab is cut there.
        """
        slabs, host = self._slabs, src if src.is_cpu else dst
        cuts: list[int] = []
        # Rows are small and come from torch's memory; only runs of bytes lie in slabs.
        if slabs is not None and slabs.has_seams and host.dim() == 1:
            cuts = slabs.cuts(host.data_ptr(), host.nbytes)
        if not cuts:
            super().copy(dst, src)
            return
        for start, stop in pairwise((0, *cuts, len(src))):
            super().copy(dst[start:stop], src[start:stop])

    def has_codec(self) -> bool:
        """Return whether there is Triton."""
        return find_spec("triton") is not None

    def codec(self) -> Codec | None:
        """Return the codec in Triton, which comes with torch; None where it does not."""
        try:
            from dlo_cuda.packed import TritonCodec
        except ImportError as error:
            _logger.info("packed weights are decoded by torch's operations: %s", error)
            return None
        return TritonCodec()

    def group_environment(self) -> Mapping[str, str]:
        """Return what leaves failures to the watch: see ``settings.OWN_GROUPS``."""
        return OWN_GROUPS

    def copies_refusal(self) -> str | None:
        """Return what this torch, NCCL or environment lacks."""
        return copies_refusal()

    def copies_options(self, timeout_s: float) -> Any:
        """Return NCCL's options with the zero-CTA policy."""
        return copies_options(timeout_s)

    def copies_collective(self, group: ProcessGroup) -> Collective:
        """Return the gather into symmetric windows."""
        return CopyCollective(group, self.device)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Record a CUDA graph, on a stream of its own."""
        # Host memory that is let go meanwhile would be unlocked, which a capture does not survive.
        gc.collect()
        with torch.cuda.device(self.device):
            graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
            before = torch.cuda.current_stream()
            # Threads that have nothing to do with it may go on.
            recording = torch.cuda.graph(
                graph,
                pool=pool,
                stream=torch.cuda.Stream(),
                capture_error_mode="thread_local",
            )
            try:
                with recording:
                    yield graph
            except BaseException:
                # torch stops half-way where a graph cannot be ended.
                torch.cuda.set_stream(before)
                with suppress(AttributeError, RuntimeError):
                    torch._C._cuda_endAllocateToPool(self.device.index, pool)
                raise

    def recording(self) -> bool:
        """Return whether the current stream is captured."""
        return torch.cuda.is_current_stream_capturing()

    def may_wait(self) -> bool:
        """Return whether torch's debug mode of synchronisations is off."""
        return torch.cuda.get_sync_debug_mode() == 0

    def settings(self) -> Mapping[str, str]:
        """Return versions, and what the environment says of memory, queues and NCCL."""
        return describe(exact=self._slabs is not None)


def make_backend(device: str) -> CudaBackend:
    """Return a backend for ``device``.

    Raises:
        BackendError: This torch is not built for CUDA, or there is no such device.
    """
    check_built(device)
    number = device_index(
        torch.cuda,
        device,
        kind="CUDA devices",
        absent="torch sees no CUDA device (driver missing, or CUDA_VISIBLE_DEVICES hides them)",
    )
    return _probe(torch.device("cuda", number), number)


def _probe(device: torch.device, index: int) -> CudaBackend:
    """Return a backend with our slabs where this machine can register memory."""
    try:
        runtime: Runtime = load_runtime(index)
    except BackendError as error:
        _logger.info("pinned memory comes from torch, which takes powers of two: %s", error)
        return CudaBackend(device, None)
    if not runtime.can_register():
        _logger.info("pinned memory comes from torch: %s registers no memory", device)
        return CudaBackend(device, None)
    slabs = SlabAllocator(runtime)
    return CudaBackend(device, slabs, readonly=runtime.can_register_readonly())
