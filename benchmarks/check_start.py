"""Start: where the time of ``enable()`` goes, and its rates.

The memory of a virtual machine may grow as it is touched, at a few GB/s at best. So the first
section uses a good part of it and lets it go again: what is measured behind it is dlo, and what it
says itself is the machine.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import grown
from checks import Skip
from grown import address_of
from scratch import SHARED_MEMORY, room_nbytes, scratch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from checks import Findings, Options

__all__ = ["grow", "parts", "rates"]

_GB = 1e9
_CHUNK_NBYTES = 8 << 20
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def grow(options: Options, found: Findings) -> None:
    """Touch 48 GiB and let them go, twice: the second time they are there."""
    import psutil

    from dlo_core.touch import touch_threads

    nbytes = (64 << 20) if options.small else (48 << 30)
    total = psutil.virtual_memory().total
    found.note(total_gb_before=round(total / _GB, 1), cores=touch_threads(), huge=_huge_pages())
    for name in ("first", "again"):
        found.note(**{name: grown.grow(nbytes, limit_s=options.limit_s / 3)})
    found.note(total_gb_after=round(psutil.virtual_memory().total / _GB, 1))
    found.true("memory was touched", found.facts["first"]["gb"] > 0)


def parts(options: Options, found: Findings) -> None:
    """Take the steps of a start one by one: touch, register and copy, for each kind of page."""
    from dlo_core.touch import touch_threads

    nbytes = (64 << 20) if options.small else (4 << 30)
    threads = touch_threads()
    slabs = None
    if options.cuda:
        import torch

        from dlo_core.registry import get_backend

        backend = get_backend(options.device)
        torch.zeros(1, device=backend.device)
        slabs = backend.allocator if backend.capabilities.host_registration else None
    source = _mapped(nbytes, mmap.MAP_PRIVATE, huge=False)
    _touch(source, nbytes)
    steps = _Steps(found, nbytes)
    for name, flags, huge in (
        ("private_huge", mmap.MAP_PRIVATE, True),
        ("private_4k", mmap.MAP_PRIVATE, False),
        ("shared_huge_advised", mmap.MAP_SHARED, True),
        ("shared_4k", mmap.MAP_SHARED, False),
    ):
        pages = _mapped(nbytes, flags, huge=huge)
        steps.rate(f"{name}_touch", partial(_touch, pages, nbytes))
        if slabs is not None:
            register = partial(slabs.register, _tensor(pages))
            made = steps.rate(f"{name}_register_touched", register)
            if made is not None:
                steps.rate(f"{name}_unregister", made.release)
        steps.rate(f"{name}_copy_{threads}_threads", partial(_copy, pages, source, threads))
    pages = _mapped(nbytes, mmap.MAP_PRIVATE, huge=True)
    # Not touched before: the copy brings the pages in.
    steps.rate("copy_into_fresh_huge", partial(_copy, pages, source, threads))
    for count in (1, 4, 8):
        steps.rate(f"copy_{count}_threads", partial(_copy, pages, source, count))
    if slabs is not None:
        slab = steps.rate("slab_pipelined", partial(slabs.allocate, nbytes))
        if slab is not None:
            steps.rate("slab_release", slab.release)
    found.at_most("steps that failed", steps.num_failed, 0)


def rates(options: Options, found: Findings) -> None:
    """Enable from host tensors and checkpoints, twice each; compare the bits."""
    import torch
    from safetensors.torch import save_file

    import dlo_core as dlo
    from dlo_core.bench.model import Shape, SyntheticTransformer, build, inputs

    shape = Shape(64, 4, 4, 0, "float32") if options.small else Shape(3072, 24, 20)
    device = torch.device(options.device)
    args = inputs(shape, 16, device)
    with torch.inference_mode():
        reference = build(shape, device)(*args).cpu()
    if options.cuda:
        torch.cuda.empty_cache()
    model = build(shape)

    def bare() -> Any:
        with torch.device("meta"):
            return SyntheticTransformer(shape).to(getattr(torch, shape.dtype)).eval()

    def from_tensors(**settings: Any) -> Any:
        # A model of its own for each turn, over the same memory.
        own = bare()
        own.load_state_dict(model.state_dict(), assign=True)
        own.requires_grad_(False)
        return dlo.offload(own, device=options.device, **settings), own

    def from_file(path: Path, **settings: Any) -> Any:
        own = bare()
        return dlo.offload(own, device=options.device, checkpoint=path, **settings), own

    enabling = _Enabling(options, found, args, reference)
    enabling.check("from_host_tensors", 10.0, from_tensors)
    for where, ways in (
        (
            Path(tempfile.gettempdir()),
            (
                ("from_page_cache", 8.0, {}),
                ("from_page_cache_into_shared", 0.0, {"host": "shared"}),
                ("page_cache_registered", 0.0, {"host": "mapped"}),
            ),
        ),
        (SHARED_MEMORY, (("shared_memory_registered", 15.0, {"host": "mapped"}),)),
    ):
        names = [name for name, _, _ in ways]
        try:
            with _checkpoint(model, save_file, where) as path:
                for name, limit, settings in ways:
                    enabling.check(name, limit, partial(from_file, path, **settings))
        except Skip as skip:
            found.note(**dict.fromkeys(names, str(skip)))
        # What cannot be written here costs these ways alone.
        except Exception as error:
            traceback.print_exc()
            found.note(**dict.fromkeys(names, _said(error)))
            found.true(f"a checkpoint was written under {where}", False)


@dataclass(frozen=True, slots=True)
class _Enabling:
    """Enables twice in one way, compares the bits and says where the time went.

    Attributes:
        options: How the section runs.
        found: Where it goes.
        args: Arguments of a forward.
        reference: Its output.
    """

    options: Options
    found: Findings
    args: tuple[Any, ...]
    reference: torch.Tensor

    def check(self, name: str, limit: float, make: Callable[..., Any]) -> None:
        """Note both turns; the better one is held against ``limit`` GB/s, where it has one."""
        from dlo_core.errors import DloError

        text = f"enable {name.replace('_', ' ')}, GB/s"
        rates = []
        for turn in ("first", "again"):
            try:
                rates.append(self._turn(f"{name}_{turn}", make))
            # The other ways are measured all the same.
            except Exception as error:
                refused = isinstance(error, DloError) and not limit
                if not refused:
                    traceback.print_exc()
                self.found.note(**{name: _said(error)})
                self.found.true(f"enabled {name}, {turn}, or refused", refused)
                return
        if self.options.cuda and limit:
            self.found.at_least(text, max(rates), limit)

    def _turn(self, name: str, make: Callable[..., Any]) -> float:
        seen: list[float] = []
        start = time.perf_counter()
        offloaded, model = make(progress=lambda _: seen.append(time.perf_counter()))
        try:
            return self._measured(name, offloaded, model, start, seen)
        finally:
            offloaded.shutdown()

    def _measured(
        self, name: str, offloaded: Any, model: Any, start: float, seen: list[float]
    ) -> float:
        """Note what the start took, and whether the model is right."""
        import torch

        if self.options.cuda:
            torch.cuda.synchronize()
        end = time.perf_counter()
        stats = offloaded.stats()
        rate = (stats.host_bytes + stats.mapped_bytes) / (end - start) / _GB
        facts = {"s": round(end - start, 3), "gb_s": round(rate, 2)}
        if len(seen) > 1:
            # Until the first bytes are there: planning, and page-locking of private memory.
            facts |= {
                "until_first_bytes_s": round(seen[0] - start, 3),
                "copying_s": round(seen[-1] - seen[0], 3),
                "afterwards_s": round(end - seen[-1], 3),
            }
        self.found.note(**{name: facts})
        with torch.inference_mode():
            same = torch.equal(model(*self.args).cpu(), self.reference)
        self.found.true(f"same bits, {name}", same)
        return float(rate)


@contextmanager
def _checkpoint(model: Any, save: Callable[..., None], where: Path) -> Iterator[Path]:
    """Save the model in a folder of its own under ``where``, while the context lasts."""
    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    room = room_nbytes(where)
    if room < 1.05 * nbytes:
        raise Skip(f"{where} has room for {room:,} bytes and not for {nbytes:,}")
    with scratch(where) as folder:
        path = folder / "model.safetensors"
        save(model.state_dict(), path)
        # Pages that still have to be written are no warm cache.
        with path.open("rb") as file:
            os.fsync(file.fileno())
        yield path


@dataclass(slots=True)
class _Steps:
    """Steps over so many bytes, each timed; one that fails costs its own figure only."""

    found: Findings
    nbytes: int
    num_failed: int = 0

    def rate(self, name: str, work: Callable[[], Any]) -> Any:
        """Note the seconds and GB/s of ``work``; return what it returns, None where it fails."""
        start = time.perf_counter()
        try:
            made = work()
        except Exception as error:
            traceback.print_exc()
            self.num_failed += 1
            self.found.note(**{name: _said(error)})
            return None
        seconds = time.perf_counter() - start
        rate = round(self.nbytes / seconds / _GB, 2)
        self.found.note(**{name: {"s": round(seconds, 4), "gb_s": rate}})
        return made


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _mapped(nbytes: int, flags: int, *, huge: bool) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=flags | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    return pages


def _tensor(pages: mmap.mmap) -> torch.Tensor:
    import torch

    return torch.frombuffer(pages, dtype=torch.uint8)


def _touch(pages: mmap.mmap, nbytes: int) -> int:
    from dlo_core.touch import touch

    return touch(address_of(pages), nbytes)


def _copy(dst: mmap.mmap, src: mmap.mmap, num_threads: int) -> None:
    """Copy as the loader does: in calls of 8 MiB, by threads."""
    to, since, nbytes = address_of(dst), address_of(src), len(dst)
    starts = iter(range(0, nbytes, _CHUNK_NBYTES))

    def work() -> None:
        while (start := next(starts, None)) is not None:
            ctypes.memmove(to + start, since + start, min(_CHUNK_NBYTES, nbytes - start))

    threads = [Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _huge_pages() -> dict[str, str]:
    """Return the system's settings for huge pages, of private and of shared memory."""
    found = {}
    for name in ("enabled", "shmem_enabled"):
        try:
            found[name] = (_HUGE / name).read_text().strip()
        except OSError as error:
            found[name] = str(error)
    return found
