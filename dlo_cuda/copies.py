"""Gathers by the copy engines: NCCL's zero-CTA policy, with the slots in symmetric windows.

[Note: a gather that waits for ever]
Such a gather waits for its peers with memory operations of the stream, which no abort reaches. So
what is under way is looked at before anything that waits for the device, and where it does not end
nothing is given back: see ``CopyCollective.stuck``.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlo_core.accelerator import DeviceCollective
from dlo_core.collective import abort_group, all_gather_bytes, living

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed import ProcessGroup

__all__ = ["CopyCollective", "copies_options", "copies_refusal"]

_logger = logging.getLogger("dlo")
_LEAST_NCCL = (2, 28)
_TAKE_AWAY = {"NCCL_CUMEM_ENABLE": "0", "NCCL_WIN_ENABLE": "0", "NCCL_P2P_DISABLE": "1"}
_GRACE_S = 5.0
_POLL_S = 0.001
_FIRST_NBYTES = 64
# Pools that a gather may still write to, until the process ends.
_KEPT: list[object] = []


def copies_refusal(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what gathers by copies lack here, or None."""
    kind: Any = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        return "this torch is built without NCCL"
    names = ("NCCL_CTA_POLICY_ZERO", "register_mem_pool", "deregister_mem_pool")
    missing = [name for name in names if not hasattr(kind, name)]
    missing += [name for name in ("MemPool", "use_mem_pool") if not hasattr(torch.cuda, name)]
    if missing:
        return f"torch {torch.__version__} has no {', '.join(missing)}, a newer one does"
    version: tuple[int, ...] = torch.cuda.nccl.version()
    if version[:2] < _LEAST_NCCL:
        return (
            f"NCCL is {'.'.join(map(str, version))}, and gathers by copies need "
            f"{'.'.join(map(str, _LEAST_NCCL))} or later"
        )
    for name, off in _TAKE_AWAY.items():
        if environment.get(name) == off:
            return f"{name}={off} is set, which takes away what they need"
    return None


def copies_options(timeout_s: float) -> Any:
    """Return the options of a group whose gathers take no multiprocessor."""
    kind: Any = dist.ProcessGroupNCCL
    made = kind.Options()
    made.config.cta_policy = kind.NCCL_CTA_POLICY_ZERO
    # torch warns when it differs from what new_group() is told.
    made._timeout = timedelta(seconds=timeout_s)
    return made


class CopyCollective(DeviceCollective):
    """All-gather whose outputs lie in memory that the peers' copy engines reach."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Take a group that was made with ``copies_options``.

        Args:
            group: Becomes the collective's own.
            device: Of this rank, with its index.
        """
        super().__init__(group, lambda: torch.cuda.synchronize(device))
        self._device = device
        self._pool: Any = None
        self._known = False
        self._last: Any = None
        self._stuck = False
        self._failed = False

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Allocate from a pool of NCCL's memory."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.MemPool(self._nccl().mem_allocator)
            with torch.cuda.use_mem_pool(self._pool):
                yield

    def settle_memory(self) -> None:
        """Register the pool as symmetric windows."""
        if self._pool is None:
            return
        with torch.cuda.device(self._device), torch.inference_mode(False):
            # The first gather makes the communicator, which the registration needs.
            shape = (self.size, _FIRST_NBYTES)
            out = torch.zeros(shape, dtype=torch.uint8, device=self._device).view(-1)
            shard = torch.zeros(_FIRST_NBYTES, dtype=torch.uint8, device=self._device)
            all_gather_bytes(out, shard, group=living(self._group))
            torch.cuda.current_stream().synchronize()
            self._known = True
            self._nccl().register_mem_pool(self._pool, symm=True)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor) -> None:
        """Queue the gather, and mark its end."""
        super().all_gather(out, shard)
        if self._last is None:
            self._last = torch.cuda.Event()
        self._last.record(torch.cuda.current_stream(self._device))

    def stuck(self) -> bool:
        """Return whether a gather is still under way after a few seconds."""
        if self._last is None or self._stuck:
            return self._stuck
        deadline = time.monotonic() + _GRACE_S
        while not self._last.query():
            if time.monotonic() > deadline:
                self._stuck = True
                break
            time.sleep(_POLL_S)
        return self._stuck

    def abort(self, error: BaseException) -> None:
        """Give nothing up: see [Note: a gather that waits for ever]."""
        self._failed = True

    def close(self) -> None:
        """Take the windows back, then the group; where a gather is stuck, wait for nothing."""
        if self._group is None:
            return
        if self.stuck():
            _KEPT.append((self._pool, self._group))
        elif self._known:
            # An abort of a group that has windows fails, and gives nothing up.
            self._try("taking the windows back", self._take_back)
        group, self._group, self._pool, self._known = self._group, None, None, False
        self._try("giving the group up", partial(abort_group, failed=self._failed), group)
        if not self._stuck:
            self._synchronize()

    def _take_back(self) -> None:
        self._nccl().deregister_mem_pool(self._pool)

    def _try(self, what: str, do: Any, *args: Any) -> None:
        try:
            do(*args)
        except RuntimeError as error:
            _logger.warning("rank %d: %s failed: %s", self.rank, what, error)

    def _nccl(self) -> Any:
        return living(self._group)._get_backend(self._device)
