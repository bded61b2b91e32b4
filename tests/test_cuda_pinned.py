"""CUDA's pinned slabs and registrations, on a fake runtime: no GPU is needed."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import textwrap
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dlo_core import touch as touch_module
from dlo_core.errors import BackendError, HostMemoryError

pinned = pytest.importorskip("dlo_cuda.pinned")
from dlo_core import registration  # noqa: E402
from dlo_cuda import backend  # noqa: E402
from dlo_cuda.backend import CudaBackend  # noqa: E402
from dlo_cuda.cudart import READ_ONLY, CudaRuntime, load_runtime  # noqa: E402
from dlo_cuda.maps import regions_of  # noqa: E402
from dlo_cuda.pinned import SlabAllocator, memory_limits  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PAGE = mmap.PAGESIZE


class FakeRuntime:
    """Keeps ranges as the driver does, refuses what it is told to, and remembers every call."""

    def __init__(self, *, fail_at: int | None = None, readonly: bool = True) -> None:
        self.fail_at = fail_at
        self.readonly = readonly
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self.flags: list[int] = []
        self.error = 0
        self.idle = threading.Event()
        self.idle.set()

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("register")
        self.flags.append(flags)
        assert address % PAGE == 0
        assert not any(
            start < address + nbytes and address < start + size
            for start, size in self.locked.items()
        )
        if self.fail_at == len(self.flags) - 1:
            self.error = 2
            return 2
        self.locked[address] = nbytes
        return 0

    def host_unregister(self, address: int) -> int:
        self.calls.append(f"unregister {address}")
        if self.locked.pop(address, None) is None:
            self.error = 713
            return 713
        return 0

    def take_error(self) -> int:
        error, self.error = self.error, 0
        return error

    def describe(self, code: int) -> str:
        return {2: "out of memory"}.get(code, "unknown")

    def synchronize(self) -> int:
        self.calls.append("synchronize")
        self.idle.wait(20)
        return 0

    def can_register(self) -> bool:
        return True

    def can_register_readonly(self) -> bool:
        return self.readonly


@pytest.fixture
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture
def slabs(runtime: FakeRuntime, tmp_path: Path) -> SlabAllocator:
    return SlabAllocator(runtime, num_threads=2, lock_path=tmp_path / "turn")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * (4 * PAGE // 256))
    return path


def mapped(path: Path, flags: int, prot: int) -> torch.Tensor:
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0, flags=flags, prot=prot)
    return torch.frombuffer(pages, dtype=torch.uint8)


# --- slabs ----------------------------------------------------------------------------------------


def test_a_slab_is_exact_begins_a_page_and_locks_whole_pages(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    slab = slabs.allocate(5 * PAGE + 1)
    assert slab.tensor.nbytes == 5 * PAGE + 1
    assert slab.tensor.data_ptr() % PAGE == 0
    assert slab.pinned
    assert slab.locked_nbytes == 6 * PAGE
    assert runtime.locked == {slab.tensor.data_ptr(): 6 * PAGE}
    assert not slab.tensor.any()
    slab.tensor.fill_(7)
    slab.release()
    slab.release()
    assert runtime.locked == {}
    assert (slab.pinned, slab.locked_nbytes) == (False, 0)
    with pytest.raises(BackendError, match="released"):
        slab.tensor.sum()


def test_a_slab_made_in_inference_mode_can_be_written_outside(slabs: SlabAllocator) -> None:
    with torch.inference_mode():
        slab = slabs.allocate(PAGE)
    assert not slab.tensor.is_inference()
    slab.tensor.fill_(1)


def test_no_bytes_lock_nothing(slabs: SlabAllocator, runtime: FakeRuntime) -> None:
    slab = slabs.allocate(0)
    assert (slab.tensor.nbytes, slab.pinned, slab.locked_nbytes) == (0, False, 0)
    slab.release()
    assert runtime.calls == []


def test_views_outlive_the_release_as_pageable_memory(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    slab = slabs.allocate(PAGE)
    view = slab.tensor.fill_(3)[10:20]
    slab.release()
    assert runtime.locked == {}
    assert view.tolist() == [3] * 10


def test_large_slabs_are_registered_in_pieces_and_unregistered_in_reverse(
    runtime: FakeRuntime,
) -> None:
    slabs = SlabAllocator(runtime, piece_nbytes=2 * PAGE)
    slab = slabs.allocate(5 * PAGE)
    start = slab.tensor.data_ptr()
    assert runtime.locked == {start: 2 * PAGE, start + 2 * PAGE: 2 * PAGE, start + 4 * PAGE: PAGE}
    runtime.calls.clear()
    slab.release()
    assert runtime.calls == [f"unregister {start + piece * PAGE}" for piece in (4, 2, 0)]


def test_a_copy_never_crosses_a_seam(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    slabs = SlabAllocator(runtime, piece_nbytes=2 * PAGE)
    device = CudaBackend(torch.device("cuda", 0), slabs)
    slab = slabs.allocate(5 * PAGE)
    slab.tensor.copy_(torch.arange(5 * PAGE) % 251)
    # Without a GPU the device side is ordinary memory, which looks like no host side here.
    seen = []
    above = CudaBackend.__mro__[1]
    original = above.copy  # type: ignore[attr-defined]

    def copy(self: Any, dst: torch.Tensor, src: torch.Tensor) -> None:
        seen.append((src.data_ptr() - slab.tensor.data_ptr(), src.nbytes))
        original(self, dst, src)

    monkeypatch.setattr(above, "copy", copy)
    source = slab.tensor[PAGE : 5 * PAGE - 3]
    dst = torch.zeros_like(source)
    device.copy(dst, source)
    assert torch.equal(dst, source)
    assert seen == [(PAGE, PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE - 3)]
    seen.clear()
    device.copy(dst[:PAGE], slab.tensor[:PAGE])
    assert seen == [(0, PAGE)]
    slab.release()
    assert slabs.cuts(source.data_ptr(), source.nbytes) == []


def test_a_slab_may_be_made_while_another_thread_copies(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    slabs = SlabAllocator(runtime, piece_nbytes=PAGE)
    held = [slabs.allocate(2 * PAGE) for _ in range(2)]
    original = registration.HostRegistration.seams_in

    def seams_in(self: Any, address: int, nbytes: int) -> tuple[int, ...]:
        # What the other thread does in the middle of this one's look.
        held.append(slabs.allocate(2 * PAGE))
        return original(self, address, nbytes)

    monkeypatch.setattr(registration.HostRegistration, "seams_in", seams_in)
    assert slabs.cuts(held[0].tensor.data_ptr(), 2 * PAGE) == [PAGE]
    assert len(held) == 4


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_a_refusal_half_way_unlocks_what_was_locked_and_drains_the_error(
    fail_at: int, tmp_path: Path
) -> None:
    runtime = FakeRuntime(fail_at=fail_at)
    slabs = SlabAllocator(runtime, piece_nbytes=PAGE, lock_path=tmp_path / "turn")
    with pytest.raises(HostMemoryError) as raised:
        slabs.allocate(3 * PAGE)
    assert runtime.locked == {}
    assert runtime.error == 0
    text = str(raised.value)
    assert f"{3 * PAGE:,} bytes" in text
    assert "error 2, out of memory" in text
    assert f"at byte {fail_at * PAGE:,}" in text
    assert "ulimit -l" in text
    assert "available" in text
    runtime.fail_at = None
    slabs.allocate(3 * PAGE).release()


def test_a_mapping_that_cannot_be_had_names_the_bytes(slabs: SlabAllocator) -> None:
    with pytest.raises(HostMemoryError, match=f"cannot map {1 << 60:,} bytes"):
        slabs.allocate(1 << 60)


def test_the_limits_are_those_of_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("999\n")
    assert "cgroup memory: 1,000,000 bytes, 999 used" in memory_limits(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert "cgroup memory: unlimited" in memory_limits(tmp_path)
    assert "cgroup" not in memory_limits(tmp_path / "none")


def test_pages_come_in_while_the_pieces_before_them_are_registered(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touch_module, "_UNIT_NBYTES", PAGE)
    first, registered = threading.Event(), threading.Event()

    def advise(address: int, nbytes: int, advice: int) -> int:
        if first.is_set():
            # All but the first unit wait until the first piece is registered.
            assert registered.wait(20)
        first.set()
        return 0

    def register(address: int, nbytes: int, flags: int) -> int:
        registered.set()
        return FakeRuntime.host_register(runtime, address, nbytes, flags)

    monkeypatch.setattr(touch_module, "_system_madvise", lambda: advise)
    monkeypatch.setattr(runtime, "host_register", register)
    slab = SlabAllocator(runtime, num_threads=1, piece_nbytes=PAGE).allocate(3 * PAGE)
    assert len(runtime.locked) == 3
    slab.release()


@pytest.mark.parametrize("bad", [0, 2])
def test_memory_that_cannot_be_brought_in_is_an_error_and_leaves_nothing_locked(
    bad: int, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(touch_module, "_UNIT_NBYTES", PAGE)
    codes = iter([0] * bad + [errno.ENOMEM] * 3)
    monkeypatch.setattr(touch_module, "_system_madvise", lambda: lambda *_: next(codes))
    slabs = SlabAllocator(runtime, num_threads=1, piece_nbytes=PAGE)
    with pytest.raises(HostMemoryError, match=r"cannot make .* bytes present \(Cannot allocate"):
        slabs.allocate(3 * PAGE)
    assert runtime.locked == {}
    assert bad or runtime.calls == []


# --- registering what is there --------------------------------------------------------------------


def test_memory_of_a_tensor_is_locked_where_it_lies(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    memory = torch.arange(10 * PAGE, dtype=torch.uint8)
    part = memory[100 : 5 * PAGE]
    made = slabs.register(part)
    ((start, nbytes),) = runtime.locked.items()
    assert made.nbytes == nbytes
    assert start <= part.data_ptr()
    assert start + nbytes >= part.data_ptr() + part.nbytes
    assert runtime.flags == [0]
    made.release()
    made.release()
    assert runtime.locked == {}


def test_a_shared_anonymous_mapping_is_locked_with_no_flag(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    memory = torch.frombuffer(mmap.mmap(-1, 4 * PAGE), dtype=torch.uint8)
    slabs.register(memory, readonly=True).release()
    assert runtime.flags == [0]


@pytest.mark.parametrize("prot", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_shared_mapping_of_a_file_is_locked_for_reading(
    slabs: SlabAllocator, runtime: FakeRuntime, file: Path, prot: int
) -> None:
    memory = mapped(file, mmap.MAP_SHARED, prot)
    with pytest.raises(HostMemoryError, match="pass readonly=True"):
        slabs.register(memory)
    made = slabs.register(memory[PAGE + 5 :], readonly=True)
    assert runtime.flags == [READ_ONLY]
    assert runtime.locked == {memory.data_ptr() + PAGE: 3 * PAGE}
    made.release()


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_device_that_cannot_lock_for_reading_is_not_asked_to(tmp_path: Path, file: Path) -> None:
    runtime = FakeRuntime(readonly=False)
    slabs = SlabAllocator(runtime, lock_path=tmp_path / "turn")
    with pytest.raises(HostMemoryError, match="for reading only"):
        slabs.register(mapped(file, mmap.MAP_SHARED, mmap.PROT_READ), readonly=True)
    assert runtime.calls == []


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("prot", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE])
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
def test_a_private_mapping_of_a_file_never_reaches_the_driver(
    slabs: SlabAllocator, runtime: FakeRuntime, file: Path, prot: int, readonly: bool
) -> None:
    """On a GPU that call never returns."""
    memory = mapped(file, mmap.MAP_PRIVATE, prot)
    with pytest.raises(HostMemoryError, match=r"MAP_PRIVATE\) of .*weights.*MAP_SHARED"):
        slabs.register(memory[10:20], readonly=readonly)
    assert runtime.calls == []


def test_private_file_pages_are_found_behind_others(file: Path) -> None:
    """A tensor of torch's own, which is mapped privately, too."""
    memory = torch.from_file(str(file), shared=False, size=4 * PAGE, dtype=torch.uint8)
    (region,) = regions_of(memory.data_ptr(), memory.data_ptr() + PAGE)
    assert (region.file, region.shared) == (True, False)
    assert region.path == str(file)


def test_what_is_not_mapped_or_not_on_the_host_is_refused(
    slabs: SlabAllocator, runtime: FakeRuntime, tmp_path: Path
) -> None:
    with pytest.raises(HostMemoryError, match="contiguous tensor on the host"):
        slabs.register(torch.zeros(4, 4).t())
    with pytest.raises(HostMemoryError, match="on meta"):
        slabs.register(torch.zeros(4, device="meta"))
    with pytest.raises(HostMemoryError, match="no bytes"):
        slabs.register(torch.zeros(0))
    hole = mmap.mmap(-1, PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = torch.frombuffer(hole, dtype=torch.uint8).data_ptr()
    assert regions_of(start, start + PAGE)
    empty = tmp_path / "maps"
    empty.write_text("")
    assert regions_of(start, start + PAGE, empty) == []
    assert runtime.calls == []


def test_processes_take_turns_at_memory_that_they_share(
    slabs: SlabAllocator, runtime: FakeRuntime, tmp_path: Path
) -> None:
    import fcntl

    with (tmp_path / "turn").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        memory = torch.frombuffer(mmap.mmap(-1, PAGE), dtype=torch.uint8)
        thread = threading.Thread(target=slabs.register, args=(memory,))
        thread.start()
        # Private memory needs no turn, so it overtakes.
        private = slabs.register(torch.zeros(4 * PAGE, dtype=torch.uint8))
        thread.join(0.2)
        assert thread.is_alive()
        assert runtime.calls.count("register") == 1
        fcntl.flock(other, fcntl.LOCK_UN)
        thread.join(20)
    assert runtime.calls.count("register") == 2
    private.release()


# --- letting go -----------------------------------------------------------------------------------


def test_what_is_forgotten_is_unlocked_once_the_device_rests(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    slab = slabs.allocate(PAGE)
    start = slab.tensor.data_ptr()
    runtime.calls.clear()
    del slab
    gc.collect()
    assert runtime.calls == ["synchronize", f"unregister {start}"]


def test_what_the_device_may_still_read_stays_locked_and_mapped(
    slabs: SlabAllocator, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "SETTLE_S", 0.05)
    left = list[Any]()
    monkeypatch.setattr(registration, "_left", left)
    slab = slabs.allocate(PAGE)
    start = slab.tensor.fill_(5).data_ptr()
    runtime.idle.clear()
    del slab
    gc.collect()
    try:
        assert runtime.locked == {start: PAGE}
        assert len(left) == 1
        assert regions_of(start, start + PAGE)
        assert ctypes.string_at(start, 3) == b"\5\5\5"
    finally:
        runtime.idle.set()


def test_after_the_context_is_gone_the_drivers_answer_is_dropped(
    slabs: SlabAllocator, runtime: FakeRuntime
) -> None:
    slab = slabs.allocate(PAGE)
    runtime.locked.clear()
    slab.release()
    assert runtime.error == 0


def forked(body: Callable[[], bytes]) -> bytes:
    """Return what ``body`` answers in a forked child."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, body())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return os.read(read, 100)


def test_a_forked_child_unlocks_nothing(slabs: SlabAllocator, runtime: FakeRuntime) -> None:
    slab, kept = slabs.allocate(PAGE), [slabs.allocate(PAGE)]

    def body() -> bytes:
        runtime.calls.clear()
        slab.release()
        kept.clear()
        gc.collect()
        return repr(runtime.calls).encode()

    assert forked(body) == b"[]"
    assert len(runtime.locked) == 2
    slab.release()


def test_at_exit_slabs_are_unlocked_in_reverse_order_before_they_are_unmapped() -> None:
    script = """
        import mmap
        from dlo_cuda.maps import regions_of
        from dlo_cuda.pinned import SlabAllocator

        names, sizes = {}, {}
        class Runtime:
            def host_register(self, address, nbytes, flags):
                names[address], sizes[address] = len(names), nbytes
                return 0
            def host_unregister(self, address):
                there = bool(regions_of(address, address + sizes[address]))
                print("unlock", names[address], there, flush=True)
                return 0
            def synchronize(self):
                print("rest", flush=True)
                return 0
            def take_error(self): return 0

        slabs = SlabAllocator(Runtime(), num_threads=1)
        made = [slabs.allocate(mmap.PAGESIZE) for _ in range(3)]
        views = [slab.tensor for slab in made]
        made[1].release()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=40,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.split("\n")[:-1]
    assert lines == ["unlock 1 True", "rest", "unlock 2 True", "rest", "unlock 0 True"]


# --- the runtime ----------------------------------------------------------------------------------


def fake_library(**answers: Any) -> Any:
    """Return functions as ctypes has them, each with an answer."""
    names = (
        "cudaHostRegister", "cudaHostUnregister", "cudaGetLastError", "cudaDeviceSynchronize",
        "cudaDeviceGetAttribute", "cudaGetErrorString",
    )  # fmt: skip

    def function(answer: Any) -> Any:
        return lambda *arguments: answer(*arguments) if callable(answer) else answer

    return SimpleNamespace(**{name: function(answers.get(name, 0)) for name in names})


def test_the_runtime_asks_the_device_what_it_can() -> None:
    def attribute(value: Any, number: int, device: int) -> int:
        assert device == 3
        value._obj.value = int(number == 113)
        return 0

    runtime = CudaRuntime(fake_library(cudaDeviceGetAttribute=attribute), 3)
    assert runtime.can_register_readonly()
    assert not runtime.can_register()


def test_a_question_that_fails_counts_as_no_and_leaves_no_error() -> None:
    left = [5]
    library = fake_library(
        cudaDeviceGetAttribute=1, cudaGetLastError=left.pop, cudaGetErrorString=b"text"
    )
    runtime = CudaRuntime(library, 0)
    assert not runtime.can_register()
    assert left == []
    assert runtime.describe(1) == "text"


def test_the_runtime_is_the_one_that_torch_loaded(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f01 r-xp 00000000 08:01 5    /lib/libc.so.6\n")
    with pytest.raises(BackendError, match="not loaded libcudart"):
        load_runtime(0, maps)
    library = tmp_path / "libcudart-abc.so.12"
    maps.write_text(f"7f00-7f01 r-xp 00000000 08:01 5    {library}\n")
    with pytest.raises(BackendError, match=r"libcudart-abc\.so\.12 cannot be used"):
        load_runtime(0, maps)


def test_the_hook_imports_nothing_but_itself() -> None:
    script = """
        import sys
        import dlo_core.registry
        before = set(sys.modules)
        import dlo_cuda
        print(sorted(set(sys.modules) - before))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        timeout=40, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == "['dlo_cuda']"


@pytest.mark.parametrize(
    ("can", "can_readonly", "expected"),
    [(True, True, (True, True)), (True, False, (True, False)), (False, True, (False, False))],
)
def test_what_the_device_cannot_the_backend_does_not_claim(
    monkeypatch: pytest.MonkeyPatch, can: bool, can_readonly: bool, expected: tuple[bool, bool]
) -> None:
    runtime = FakeRuntime(readonly=can_readonly)
    monkeypatch.setattr(runtime, "can_register", lambda: can)
    monkeypatch.setattr(backend, "load_runtime", lambda index: runtime)
    made = backend._probe(torch.device("cuda", 0), 0)
    found = made.capabilities
    assert (found.host_registration, found.readonly_registration) == expected
    assert isinstance(made.allocator, SlabAllocator) == can


def test_without_a_runtime_to_call_memory_comes_from_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(index: int) -> CudaRuntime:
        raise BackendError("no libcudart")

    monkeypatch.setattr(backend, "load_runtime", absent)
    made = backend._probe(torch.device("cuda", 0), 0)
    assert not made.capabilities.host_registration
    assert not isinstance(made.allocator, SlabAllocator)
