"""The lab: a backend under test, with bytes to move, long work, and a way to look at the device.

It uses nothing but the interface, so it runs on any backend.
"""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.interface import Backend, Event, HostBuffer, Stream

__all__ = ["ATTEMPTS", "SIZES", "Lab", "pattern"]

# Nothing, one byte, odd, around a tensor's alignment, around a page, above 1 MiB.
SIZES = (0, 1, 3, 255, 256, 257, 4097, (1 << 20) + 3)
# What a busy machine may spoil once is asked for that often.
ATTEMPTS = 10

_BUSY_NBYTES = 4 << 20
_BUSY_COPIES = 48


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return ``nbytes`` bytes of ordinary host memory that no other seed gives."""
    data = bytearray(random.Random(f"{nbytes} {seed}").randbytes(nbytes))
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(data, dtype=torch.uint8)


class Lab:
    """What every test of a backend needs."""

    def __init__(self, backend: Backend) -> None:
        """Work on ``backend``."""
        self.backend = backend
        # Set by a test that breaks a stream on purpose: the end may hear of it again.
        self.expects_errors = False
        self._buffers: list[HostBuffer] = []
        self._busy: tuple[torch.Tensor, torch.Tensor] | None = None

    def host(self, nbytes: int, seed: int | None = None) -> torch.Tensor:
        """Return bytes from the backend's allocator, with a pattern or zeros in them."""
        buffer = self.backend.allocator.allocate(nbytes)
        self._buffers.append(buffer)
        content = torch.zeros(nbytes, dtype=torch.uint8) if seed is None else pattern(nbytes, seed)
        return buffer.tensor.copy_(content)

    def device(self, nbytes: int, seed: int | None = None) -> torch.Tensor:
        """Return device bytes, with a pattern or zeros in them; the host waits."""
        made = self.backend.empty(nbytes)
        content = torch.zeros(nbytes, dtype=torch.uint8) if seed is None else pattern(nbytes, seed)
        made.copy_(content)
        # Written by compute; the side streams of the tests come after it.
        self.backend.synchronize()
        return made

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy of a tensor, when all work is done."""
        self.backend.synchronize()
        return tensor.detach().cpu().clone()

    def stream(self) -> Any:
        """Return a new side stream."""
        return self.backend.new_stream()

    def copy(self, stream: Stream, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a copy on ``stream``."""
        with self.backend.stream(stream):
            self.backend.copy(dst, src)

    def busy(self, stream: Stream, copies: int = _BUSY_COPIES) -> None:
        """Queue work on ``stream`` that takes milliseconds on any device."""
        if self._busy is None:
            host = self.host(_BUSY_NBYTES)
            # Touched, or a system gives one zero page for all of them, and the copy is short.
            self._busy = self.backend.empty(_BUSY_NBYTES), host.fill_(1)
        with self.backend.stream(stream):
            for _ in range(copies):
                self.backend.copy(*self._busy)

    def once(self, attempt: Callable[[], bool]) -> bool:
        """Return whether ``attempt`` succeeds at least once: for what a slow machine may spoil."""
        return any(attempt() for _ in range(ATTEMPTS))

    def pending_event(self, stream: Stream) -> Event:
        """Make ``stream`` busy and return an event that its work reaches when it is done."""
        self.busy(stream)
        event = self.backend.new_event()
        stream.record_event(event)
        return event

    def settle(self) -> None:
        """Let all work end."""
        self.backend.synchronize()

    def allocated(self) -> int:
        """Return the bytes of live device tensors, once what nobody holds is gone."""
        self.backend.synchronize()
        gc.collect()
        return self.backend.memory().allocated

    def close(self) -> None:
        """Give the host memory back, once nothing reads it."""
        self._busy = None
        try:
            self.settle()
        except Exception:
            if not self.expects_errors:
                raise
        for buffer in self._buffers:
            buffer.release()
        self._buffers.clear()
