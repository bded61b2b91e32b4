"""Poison: a CPU backend whose device bytes are NaN before every copy and gather, which are slow.

A read before the wait, or after the slot was given back, shows as NaN in the output.
"""

from __future__ import annotations

import time
import weakref
from functools import partial
from typing import TYPE_CHECKING

from dlo_core.cpu import CpuBackend, GlooCollective, PageableAllocator, PageableBuffer
from dlo_core.cpu_stream import current_stream

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["PoisonBackend"]

_POISON = 0xFF


class WatchedAllocator(PageableAllocator):
    """Knows which of its buffers are still held."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[PageableBuffer]] = []

    def allocate(self, nbytes: int) -> PageableBuffer:
        """Return a buffer and remember it weakly."""
        made = super().allocate(nbytes)
        self._made.append(weakref.ref(made))
        return made

    @property
    def held_nbytes(self) -> int:
        """Bytes of the buffers that were neither released nor collected."""
        alive = [buffer for ref in self._made if (buffer := ref()) is not None]
        return sum(buffer.nbytes for buffer in alive if buffer._tensor is not None)


class PoisonBackend(CpuBackend):
    """The CPU backend, poisoned; ``num_copies`` counts what was queued.

    Args:
        delay_s: Sleep between the poison and the bytes.
    """

    def __init__(self, delay_s: float = 0.001) -> None:
        super().__init__()
        self.delay_s = delay_s
        self.num_copies = 0
        self.watched = self.allocator = WatchedAllocator()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return NaN bytes."""
        return super().empty(nbytes).fill_(_POISON)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue poison, a pause and the copy."""
        self.num_copies += 1
        current_stream().run(partial(self._spoil, dst))
        super().copy(dst, src)

    def collective(self, group: ProcessGroup) -> PoisonCollective:
        """Return a gather that poisons its output first."""
        return PoisonCollective(group, self.delay_s)

    def _spoil(self, dst: torch.Tensor) -> None:
        dst.fill_(_POISON)
        time.sleep(self.delay_s)


class PoisonCollective(GlooCollective):
    """The gather of ``PoisonBackend``."""

    def __init__(self, group: ProcessGroup, delay_s: float) -> None:
        super().__init__(group)
        self._delay_s = delay_s

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue poison, a pause and the gather; in place our own part stays."""
        rows = [row for row in out.view(self.size, -1) if row.data_ptr() != shard.data_ptr()]

        def spoil() -> None:
            for row in rows:
                row.fill_(_POISON)
            time.sleep(self._delay_s)

        current_stream().run(spoil)
        super().all_gather(out, shard)
