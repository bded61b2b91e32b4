"""Memory: pinned slabs and registered mappings, and flat reserved memory."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks import Skip

if TYPE_CHECKING:
    from collections.abc import Callable

    from checks import Findings, Options

__all__ = ["context", "flat", "pinned", "stages"]

_GB = 1e9


def pinned(options: Options, found: Findings) -> None:
    """Make slabs, register mappings, be refused, let go, and leave one slab to the exit."""
    options.need_cuda()
    import torch

    from dlo_core.registry import get_backend
    from dlo_cuda.pinned import SlabAllocator

    backend = get_backend(options.device)
    slabs = backend.allocator
    if not isinstance(slabs, SlabAllocator):
        raise Skip(f"the backend has no slabs of its own but {type(slabs).__name__}")
    torch.zeros(1, device=backend.device)
    _slab(found, slabs, backend)
    _pieces(found, backend)
    _shared(found, slabs, backend)
    _files(found, slabs, backend)
    _left_to_the_exit.append(slabs.allocate(1 << 26))


def _slab(found: Findings, slabs: Any, backend: Any) -> None:
    """Check one slab: its size, whether torch calls it pinned, its rates, its release."""
    size = 4_000_000_123
    # The first one may find a machine whose memory grows as it is used.
    _timed(found, "first_slab_gb_s", size, lambda: slabs.allocate(size)).release()
    slab = _timed(found, "slab_gb_s", size, lambda: slabs.allocate(size))
    view = slab.tensor[1_000_000 : 1_000_000 + (1 << 30)]
    found.true("a view of a slab is_pinned()", view.is_pinned())
    found.at_most("locked / asked", slab.locked_nbytes / size, 1.0001)
    found.note(link_gb_s=_link_rate(backend, view))
    found.true("a copy from it does not wait", _copies_without_waiting(backend, view))
    _timed(found, "release_gb_s", size, slab.release)
    found.true("released, a view is no longer pinned", not view.is_pinned())


def _pieces(found: Findings, backend: Any) -> None:
    """Check a copy from a slab of several registrations, and what the driver does uncut."""
    import torch

    from dlo_cuda.backend import CudaBackend
    from dlo_cuda.cudart import load_runtime
    from dlo_cuda.pinned import SlabAllocator

    pieces = SlabAllocator(load_runtime(backend.device.index or 0), piece_nbytes=1 << 20)
    cut = CudaBackend(backend.device, pieces)
    slab = pieces.allocate(5 << 20)
    slab.tensor.copy_(torch.arange(5 << 20) % 251)
    source, dst = slab.tensor[700_000 : 700_000 + (3 << 20)], cut.empty(3 << 20)
    cut.copy(dst, source)
    cut.synchronize()
    found.true("a copy across pieces is right", torch.equal(dst.cpu(), source))
    try:
        dst.copy_(source, non_blocking=True)
        cut.synchronize()
        found.note(uncut_copy_across_pieces="works on this driver")
    except RuntimeError as error:
        found.note(uncut_copy_across_pieces=str(error)[:200])
    slab.release()


def _shared(found: Findings, slabs: Any, backend: Any) -> None:
    """Check shared memory that is registered where it lies, and a registration that is refused."""
    import torch

    from dlo_core.errors import HostMemoryError
    from dlo_core.touch import touch

    nbytes = 2 << 30
    shared = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
    touch(shared.data_ptr(), nbytes)
    made = _timed(found, "register_shared_gb_s", nbytes, lambda: slabs.register(shared))
    found.at_least("registering shared memory, GB/s", found.facts["register_shared_gb_s"], 15.0)
    found.true("registered memory is_pinned()", shared.is_pinned())
    found.note(link_from_registered_gb_s=_link_rate(backend, shared[: 1 << 30]))
    try:
        slabs.register(shared[: 1 << 20])
        found.true("registering twice is refused", False)
    except HostMemoryError as error:
        found.note(refusal=str(error))
        found.true("registering twice is refused", True)
    torch.zeros(8, device=backend.device).add_(1)
    backend.synchronize()
    found.true("no stale error at the next kernel", True)
    made.release()
    found.true("released, it is no longer pinned", not shared.is_pinned())


_left_to_the_exit: list[Any] = []


def context(options: Options, found: Findings) -> None:
    """Let a slab go after the device's context is gone."""
    options.need_cuda()
    import ctypes

    from dlo_core.registry import get_backend

    backend = get_backend(options.device)
    left = backend.allocator.allocate(1 << 26)
    backend.copy(backend.empty(1 << 26), left.tensor)
    backend.synchronize()
    found.note(cudaDeviceReset=ctypes.CDLL(_loaded_library()).cudaDeviceReset())
    left.release()
    found.true("a slab is let go after its context is gone", not left.pinned)
    options.save(found.to_dict() | {"complete": True})
    # torch does not expect its own context to be gone at exit; that is not what is checked here.
    os._exit(0)


def _files(found: Findings, slabs: Any, backend: Any) -> None:
    """Check a file's shared mapping, and that a private one is refused at once."""
    import torch

    from dlo_core.errors import HostMemoryError

    with tempfile.TemporaryDirectory() as folder:
        path, nbytes = Path(folder, "weights"), 1 << 30
        with path.open("wb") as file:
            file.write(bytes(1 << 20) * (nbytes >> 20))
        shared = torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)
        try:
            made = _timed(
                found, "register_file_gb_s", nbytes, lambda: slabs.register(shared, readonly=True)
            )
            found.true("a file's shared mapping is_pinned()", shared.is_pinned())
            found.note(link_from_file_gb_s=_link_rate(backend, shared))
            made.release()
        except HostMemoryError as error:
            found.note(file_refused=str(error))
            found.true("a file's shared mapping can be registered", False)
        private = torch.from_file(str(path), shared=False, size=nbytes, dtype=torch.uint8)
        start = time.perf_counter()
        try:
            slabs.register(private, readonly=True)
            found.true("a private mapping is refused", False)
        except HostMemoryError:
            found.at_most("seconds to refuse a private mapping", time.perf_counter() - start, 1.0)


def _loaded_library() -> str:
    import re

    maps = Path("/proc/self/maps").read_text()
    found = re.findall(r"\s(/\S*libcudart[^/\s]*\.so\S*)$", maps, re.MULTILINE)
    return str(found[0])


def _link_rate(backend: Any, host: Any) -> float:
    from dlo_core.bench.probe import link_rate

    return round(link_rate(backend, host), 2)


def _copies_without_waiting(backend: Any, host: Any) -> bool:
    dst = backend.empty(host.nbytes)
    backend.synchronize()
    start = time.perf_counter()
    backend.copy(dst, host)
    queued_s = time.perf_counter() - start
    backend.synchronize()
    return queued_s < 0.3 * (time.perf_counter() - start)


def _timed(found: Findings, name: str, nbytes: int, work: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    made = work()
    found.note(**{name: round(nbytes / (time.perf_counter() - start) / _GB, 2)})
    return made


def stages(options: Options, found: Findings) -> None:
    """Lend the memory of resident blocks to another stage, again and again; no bit may change."""
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import Shape, build, inputs

    shape = Shape(64, 4, 5, 0, "float32") if options.small else Shape(1024, 8, 12)
    device = torch.device(options.device)
    args = inputs(shape, 8 if options.small else 1024, device)
    with torch.inference_mode():
        reference = build(shape, device)(*args)
    model = build(shape)
    offloaded = dlo.offload(
        model, device=options.device, resident_layers=3, resident_scope="stage", packed=False
    )
    backend, lent = offloaded.backend, offloaded.footprint.residents_nbytes
    seen, freed, wrong = [], [], 0
    with torch.inference_mode():
        for cycle in range(12):
            for _ in range(2):
                wrong += not torch.equal(model(*args), reference)
            before = backend.memory().allocated
            offloaded.offload_resident_layers()
            freed.append(before - backend.memory().allocated)
            other = backend.empty(lent // 3).fill_(cycle)
            if cycle % 2:
                offloaded.load_resident_layers()
            wrong += not torch.equal(model(*args), reference)
            wrong += not bool((other == cycle).all())
            del other
            seen.append(backend.memory().reserved)
    found.note(lent_bytes=lent, reserved_bytes=seen)
    found.at_most("passes with a wrong bit", wrong, 0)
    # The allocator counts whole units of 512 bytes.
    least = min(freed[1:])
    found.true("each drop gives all bytes back", lent <= least <= lent + 3 * 512)
    found.at_most("values of reserved memory after two cycles", len(set(seen[2:])), 1)
    offloaded.shutdown()


def flat(options: Options, found: Findings) -> None:
    """Run 200 passes of a small transformer; reserved memory must not move, nor a bit."""
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import Shape, build, inputs

    shape = Shape(64, 4, 5, 0, "float32") if options.small else Shape(480, 4, 12)
    device = torch.device(options.device)
    args = inputs(shape, 8 if options.small else 1024, device)
    with torch.inference_mode():
        reference = build(shape, device)(*args)
    model = build(shape)
    passes = 20 if options.small else 200
    with torch.inference_mode():
        offloaded = dlo.offload(model, device=options.device, packed=False)
        seen, wrong = [], 0
        for number in range(passes):
            out = model(*args)
            wrong += not torch.equal(out, reference)
            if number >= 3:
                memory = offloaded.backend.memory()
                seen.append((memory.allocated, memory.reserved))
        found.note(passes=passes, memory_bytes=sorted(set(seen))[:5], stats=str(offloaded))
        found.at_most("passes with a wrong bit", wrong, 0)
        found.at_most("values of reserved memory", len({reserved for _, reserved in seen}), 1)
        found.at_most("values of allocated memory", len({allocated for allocated, _ in seen}), 1)
        offloaded.shutdown()
