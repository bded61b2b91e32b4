"""Host writes: which watched buffers the host itself has written, by whatever way.

What the simulated device writes in its own memory goes through aliases with a version of their own,
so a version that moved is a write of the host's through torch. Memory of the host is also written
past torch (``memmove``, a file's bytes), so its bytes are compared, too; one that leaves them as
they are is not seen. What the device writes there is accepted as soon as it is done.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlo_core.testing.device_memory import storage_of

if TYPE_CHECKING:
    import torch

__all__ = ["HostWrites"]


@dataclass(slots=True)
class _Watched:
    tensor: weakref.ref[torch.Tensor]
    # The bytes, of host memory only; not to be looked at once the tensor is gone.
    run: Any
    version: int = -1
    digest: int = 0
    is_known: bool = False


class HostWrites:
    """Looks at buffers now and then, and tells those that were written in between."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watched: dict[int, _Watched] = {}

    def watch(self, buffer: torch.Tensor, *, on_host: bool) -> None:
        """Tell writes to ``buffer`` from now on.

        Args:
            buffer: Of one dimension, ``uint8``; it is not kept alive.
            on_host: Whether it is host memory, whose bytes are compared.
        """
        run = None
        if on_host:
            run = (ctypes.c_uint8 * buffer.nbytes).from_address(buffer.data_ptr())
        self._watched[storage_of(buffer)] = _Watched(weakref.ref(buffer), run)
        self.look()

    def look(self) -> list[int]:
        """Return the storages that were written since the last look."""
        found = []
        for storage, each in list(self._watched.items()):
            tensor = each.tensor()
            if tensor is None:
                del self._watched[storage]
                continue
            now = _state(tensor, each.run)
            if each.is_known and now != (each.version, each.digest):
                found.append(storage)
            each.version, each.digest = now
            each.is_known = True
        return found

    def has_bytes(self, storage: int) -> bool:
        """Return whether it is host memory, whose bytes are compared."""
        return storage in self._watched and self._watched[storage].run is not None

    def accept(self, storage: int) -> None:
        """Take the buffer as it is now: the device has just written it."""
        each = self._watched.get(storage)
        tensor = each.tensor() if each is not None else None
        if each is not None and tensor is not None:
            each.version, each.digest = _state(tensor, each.run)

    def expect(self, storage: int) -> None:
        """Let a write that somebody else has told of, and that is under way, be no news."""
        if storage in self._watched:
            self._watched[storage].is_known = False


def _state(tensor: torch.Tensor, run: Any) -> tuple[int, int]:
    """Return what changes when the buffer is written."""
    return tensor._version, zlib.crc32(run) if run is not None else 0
