"""Pinned memory: host slabs of exact size that the device copies from at the link's full rate.

torch's own pinned memory takes powers of two and locks one page after the other. Here a slab is an
anonymous mapping of whole pages, on huge pages where the system gives them, brought in by several
threads and registered piece by piece behind them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import tempfile
import threading
import time
import weakref
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil
import torch

from dlo_core.errors import BackendError, HostMemoryError
from dlo_core.interface import PinnedAllocator
from dlo_core.registration import PIECE_NBYTES, HostRegistration, RefusedError, whole_pages
from dlo_core.touch import POPULATE_READ, POPULATE_WRITE, Touching, touch_threads
from dlo_cuda.cudart import READ_ONLY
from dlo_cuda.maps import Region, regions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlo_cuda.cudart import Runtime

__all__ = ["PinnedSlab", "SlabAllocator", "memory_limits"]

_TURN_S = 60.0


class PinnedSlab:
    """One run of page-locked host memory of exactly the size that was asked for."""

    def __init__(self, tensor: torch.Tensor, registration: HostRegistration | None) -> None:
        """Take the bytes, which hold their mapping, and what locked them; None: no bytes at all."""
        self._registration = registration
        self._tensor: torch.Tensor | None = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes; raises after ``release``."""
        if self._tensor is None:
            raise BackendError("this host buffer was released")
        return self._tensor

    @property
    def pinned(self) -> bool:
        """Whether the pages are locked now."""
        return self.locked_nbytes > 0

    @property
    def locked_nbytes(self) -> int:
        """Bytes of the pages that are locked now."""
        return 0 if self._registration is None else self._registration.nbytes

    def release(self) -> None:
        """Unlock the pages; the memory itself goes with its last view. Idempotent."""
        if self._registration is not None:
            self._registration.release()
        self._tensor = None

    def __repr__(self) -> str:
        """Show how much is locked."""
        return f"PinnedSlab({self.locked_nbytes:,} bytes locked)"


class SlabAllocator(PinnedAllocator):
    """Makes pinned slabs, and page-locks memory that is there already."""

    def __init__(
        self,
        runtime: Runtime,
        *,
        num_threads: int | None = None,
        piece_nbytes: int = PIECE_NBYTES,
        lock_path: Path | None = None,
    ) -> None:
        """Keep what it needs; nothing is called yet.

        Args:
            runtime: Registers the pages.
            num_threads: Threads that bring pages in; None: as many as there are cores, at most 16.
            piece_nbytes: The most that one call registers; whole pages.
            lock_path: File over which the processes of one user take turns at registering memory
                that they share; None: one in the system's folder for temporary files.
        """
        self._runtime = runtime
        self._num_threads = num_threads or touch_threads()
        self._piece_nbytes = piece_nbytes
        default = Path(tempfile.gettempdir()) / f"dlo-register-{os.getuid()}.lock"
        self._lock_path = lock_path or default
        self._split: weakref.WeakSet[HostRegistration] = weakref.WeakSet()
        self._splitting = threading.Lock()
        # Once there are some; few memories are so large, and each copy asks.
        self.has_seams = False

    def allocate(self, nbytes: int) -> PinnedSlab:
        """Return exactly ``nbytes`` page-locked zero bytes at the start of a page.

        Raises:
            HostMemoryError: The memory cannot be had or cannot be locked; names bytes and limits.
        """
        with torch.inference_mode(False):
            if not nbytes:
                return PinnedSlab(torch.empty(0, dtype=torch.uint8, device="cpu"), None)
            pages = _map(nbytes)
            # The tensor holds the mapping; it goes when the last view goes.
            tensor = torch.frombuffer(pages, dtype=torch.uint8, count=nbytes)
        with self._touching(tensor.data_ptr(), nbytes, POPULATE_WRITE) as touching:

            def reach(stop: int) -> None:
                if code := touching.reach(stop):
                    raise HostMemoryError(
                        f"cannot make {nbytes:,} bytes present ({os.strerror(code)}); "
                        f"{memory_limits()}; use more ranks, or a machine with more memory"
                    )

            return PinnedSlab(tensor, self._lock(tensor.data_ptr(), nbytes, pages, 0, reach))

    def register(self, memory: torch.Tensor, *, readonly: bool = False) -> HostRegistration:
        """Page-lock the memory of a host tensor where it lies, without a copy.

        Args:
            memory: A contiguous tensor on the CPU; its mapping stays until it is released.
            readonly: The memory will only be read by the device. Needed where this process may not
                write it, and for shared mappings of files.

        Raises:
            HostMemoryError: It cannot be locked; names the bytes and why. Nothing stays locked.
        """
        if memory.device.type != "cpu" or not memory.is_contiguous():
            raise HostMemoryError(
                f"register() wants a contiguous tensor on the host; got {tuple(memory.shape)} on "
                f"{memory.device}"
            )
        address, nbytes = memory.data_ptr(), memory.nbytes
        if not nbytes:
            raise HostMemoryError("register() wants memory; the tensor has no bytes")
        start, stop = whole_pages(address, nbytes)
        flags, shared = self._how(start, stop, nbytes, readonly)
        advice = POPULATE_READ if flags & READ_ONLY else POPULATE_WRITE
        turn = _turn(self._lock_path) if shared else nullcontext()
        # Pages that cannot be brought in are the driver's to refuse.
        with self._touching(start, stop - start, advice) as touching, turn:
            return self._lock(address, nbytes, memory, flags, touching.reach)

    def cuts(self, address: int, nbytes: int) -> list[int]:
        """Return where a copy from this range must be cut: one copy stays within one piece."""
        return sorted(
            seam - address for made in self._split for seam in made.seams_in(address, nbytes)
        )

    def _lock(
        self,
        address: int,
        nbytes: int,
        keep: object,
        flags: int,
        reach: Callable[[int], object],
    ) -> HostRegistration:
        try:
            made = HostRegistration(
                self._runtime,
                address,
                nbytes,
                keep=keep,
                flags=flags,
                piece_nbytes=self._piece_nbytes,
                reach=reach,
            )
        except RefusedError as error:
            raise HostMemoryError(
                f"cannot page-lock {nbytes:,} bytes of host memory (cudaHostRegister: {error}); "
                f"{memory_limits()}; use host='pageable', more ranks, or raise the limit"
            ) from None
        if made.seams:
            with self._splitting:
                # A new set: a copy of another thread may be going through the old one.
                self._split = weakref.WeakSet((*self._split, made))
                self.has_seams = True
        return made

    def _how(self, start: int, stop: int, nbytes: int, readonly: bool) -> tuple[int, bool]:
        """Return the flags for a range, and whether other processes may see the same pages.

        Raises:
            HostMemoryError: It must not be registered.
        """
        try:
            regions = regions_of(start, stop)
        except OSError as error:
            _refuse(nbytes, f"how it is mapped cannot be seen ({error})", "use a slab")
        if sum(min(r.stop, stop) - max(r.start, start) for r in regions) != stop - start:
            _refuse(nbytes, "part of it is not mapped", "keep its mapping open")
        for region in regions:
            if region.file and not region.shared:
                # cudaHostRegister with the flag for reading never returns on such pages.
                _refuse(
                    nbytes,
                    f"it is a private mapping (MAP_PRIVATE) of {region.path}",
                    "map the file with MAP_SHARED, or copy it into a slab",
                )
            if not region.shared and not region.writable:
                _refuse(nbytes, "it is private and may not be written", "make it writable")
        needed = [region for region in regions if _needs_readonly(region)]
        if needed and not readonly:
            _refuse(
                nbytes,
                f"it is a mapping of {needed[0].path or 'memory'} that the device may only read",
                "pass readonly=True",
            )
        if needed and not self._runtime.can_register_readonly():
            _refuse(nbytes, "this device cannot register memory for reading only", "use a slab")
        return (READ_ONLY if needed else 0), any(region.shared for region in regions)

    def _touching(self, address: int, nbytes: int, advice: int) -> Touching:
        return Touching(address, nbytes, advice=advice, num_threads=self._num_threads)


def _needs_readonly(region: Region) -> bool:
    """Return whether only a read-only registration of these pages can succeed."""
    return region.file or not region.writable


def _refuse(nbytes: int, why: str, remedy: str) -> NoReturn:
    raise HostMemoryError(f"cannot page-lock {nbytes:,} bytes of host memory: {why}; {remedy}")


def _map(nbytes: int) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"cannot map {nbytes:,} bytes of host memory ({error}); {memory_limits()}; use more "
            "ranks, or a machine with more memory"
        ) from error
    # Huge pages lock several times as fast; weights do not belong into core dumps.
    for name in ("MADV_HUGEPAGE", "MADV_DONTDUMP"):
        try:
            pages.madvise(getattr(mmap, name))
        except (AttributeError, OSError):
            continue
    return pages


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Let one process at a time register pages that others map, too; some drivers hang otherwise.

    A process that does not give its turn back is not waited for longer than a minute.
    """
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        deadline = time.monotonic() + _TURN_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)


def memory_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> str:
    """Return in words what may have been in the way: locked memory, the cgroup, free memory."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked:,} bytes"
    parts = [f"locked memory (ulimit -l): {allowed}"]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (cgroup / limit).read_text().strip(), (cgroup / used).read_text().strip()
        except OSError:
            continue
        most = f"{int(most):,} bytes" if most.isdecimal() and int(most) < 1 << 60 else "unlimited"
        parts.append(f"cgroup memory: {most}, {int(now):,} used")
    parts.append(f"available: {psutil.virtual_memory().available:,} bytes")
    return ", ".join(parts)
