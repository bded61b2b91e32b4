"""Pinning: a CPU backend that plays one with page-locked memory, counted, limited or rounded up."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poison import PoisonBackend

from dlo_core.errors import HostMemoryError
from dlo_core.interface import Capabilities, PinnedAllocator
from dlo_core.pages import PageableBuffer

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["CountingAllocator", "PinningBackend", "machine_of"]


class _Counted:
    """Bytes that count as locked until they are released."""

    def __init__(self, allocator: CountingAllocator, nbytes: int, what: str) -> None:
        allocator.take(nbytes, what)
        self.nbytes = nbytes
        self._allocator: CountingAllocator | None = allocator

    def release(self) -> None:
        allocator, self._allocator = self._allocator, None
        if allocator is not None:
            allocator.taken -= self.nbytes


class PinnedBuffer(PageableBuffer):
    """A buffer that says that it is page-locked."""

    pinned = True

    def __init__(self, allocator: CountingAllocator, nbytes: int) -> None:
        self._counted = _Counted(allocator, allocator.rounded(nbytes), f"page-lock {nbytes:,}")
        self.locked_nbytes = self._counted.nbytes
        super().__init__(nbytes)

        # For a model that is forgotten.
        weakref.finalize(self, self._counted.release)

    def release(self) -> None:
        """Let go, and count it."""
        super().release()
        self._counted.release()


class CountingAllocator(PinnedAllocator):
    """Counts what is locked.

    Attributes:
        taken: Bytes locked now.
        most: The most that ever were.
        asked: What ``allocate`` was asked for since the start.
        registered: (bytes, readonly) of each registration.
    """

    def __init__(self, *, limit: int | None = None, rounds: bool = False) -> None:
        """Lock at most ``limit`` bytes; take powers of two if it ``rounds``."""
        self.taken = self.most = 0
        self.asked: list[int] = []
        self.registered: list[tuple[int, bool]] = []
        self._limit = limit
        self._rounds = rounds

    def rounded(self, nbytes: int) -> int:
        """Return what is locked for ``nbytes``."""
        return 1 << max(nbytes - 1, 0).bit_length() if self._rounds and nbytes else nbytes

    def take(self, nbytes: int, what: str) -> None:
        """Count ``nbytes``, or refuse them."""
        if self._limit is not None and self.taken + nbytes > self._limit:
            raise HostMemoryError(
                f"cannot {what} bytes: ulimit -l is {self._limit:,} and {self.taken:,} are used"
            )
        self.taken += nbytes
        self.most = max(self.most, self.taken)

    def allocate(self, nbytes: int) -> PinnedBuffer:
        """Return a counted buffer."""
        self.asked.append(nbytes)
        return PinnedBuffer(self, nbytes)

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> _Counted:
        """Count memory that is there."""
        made = _Counted(self, memory.nbytes, f"register {memory.nbytes:,}")
        self.registered.append((memory.nbytes, readonly))
        return made


class PinningBackend(PoisonBackend):
    """The poisoned CPU backend, with memory that counts as page-locked."""

    def __init__(
        self,
        *,
        limit: int | None = None,
        rounds: bool = False,
        host_registration: bool = True,
        readonly_registration: bool = False,
        lock_limit: bool = False,
        delay_s: float = 0.0,
    ) -> None:
        super().__init__(delay_s)
        self.counted = CountingAllocator(limit=limit, rounds=rounds)
        self.allocator = self.counted
        self.capabilities = Capabilities(
            host_blocks=True,
            pinned_memory=True,
            host_registration=host_registration,
            readonly_registration=readonly_registration,
            lock_limit=lock_limit,
        )


@contextmanager
def machine_of(root: object = "/", node: str | None = None) -> Iterator[None]:
    """Let offloads inside see another machine: its files under ``root``, its name ``node``."""
    from dlo_core import startup

    module: Any = startup
    original = module.Machine
    module.Machine = lambda: original(str(root), node)
    try:
        yield
    finally:
        module.Machine = original
