"""The order of reads: each file once, from its beginning; threads that end; the cache as found."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from toys import AwkwardBlock, Block, Toy, inputs, make_toy, twin

import dlo_core as dlo
from dlo_core import page_cache, reading
from dlo_core.checkpoint import Checkpoint
from dlo_core.cpu import CpuBackend
from dlo_core.file_reads import check_direct
from dlo_core.host import HostStore, PrivateStore
from dlo_core.loader import load_shards
from dlo_core.page_cache import cached_pages
from dlo_core.plan import Loading, plan_model
from dlo_core.progress import Report, reporting
from dlo_core.rawbytes import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from dlo_core.plan import ModelPlan
    from dlo_core.progress import LoadProgress

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
CALL = 4096
PAGE = 4096


def awkward_toy() -> Toy:
    torch.manual_seed(1)
    blocks = [AwkwardBlock(seed=1, large=9000), Block(), AwkwardBlock(seed=2, large=7000), Block()]
    return Toy(blocks).requires_grad_(False).eval()


def write(model: Toy, folder: Path) -> Path:
    """Write the model in two files, every other tensor in each; ties once."""
    folder.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith("again"):
            tensors[name] = tensor.contiguous()
    rows = list(tensors.items())
    save_file(dict(rows[::2]), folder / "a.safetensors")
    save_file(dict(rows[1::2]), folder / "b.safetensors")
    return folder


@pytest.fixture
def small_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make many small calls of a small checkpoint, in threads."""
    monkeypatch.setattr(reading, "CALL_NBYTES", CALL)
    monkeypatch.setattr(reading, "_ALONE_NBYTES", 0)


class Trace:
    """Records which files are opened and which of their bytes are read, by which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened: list[str] = []
        self.reads: list[tuple[str, int, int, int]] = []
        self._open, self._preadv = os.open, os.preadv
        monkeypatch.setattr(os, "open", self.open)
        monkeypatch.setattr(os, "preadv", self.preadv)

    def open(self, path: Any, *args: Any, **more: Any) -> int:
        self.opened.append(os.path.basename(path))
        return self._open(path, *args, **more)

    def preadv(self, file: int, outs: Sequence[memoryview], offset: int) -> int:
        name = os.path.basename(os.readlink(f"/proc/self/fd/{file}"))
        got = self._preadv(file, outs, offset)
        self.reads.append((name, offset, offset + got, threading.get_ident()))
        return got


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_file_is_opened_once_and_read_once_with_ascending_offsets(
    num_ranks: int, threads: int, tmp_path: Path
) -> None:
    """B32, https://github.com/safetensors/safetensors/issues/562: no page by page, no jumps."""
    resident = awkward_toy()
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> int:
        with pytest.MonkeyPatch.context() as patch:
            trace = Trace(patch)
            model = twin(resident)
            group = dist.group.WORLD if dist.is_initialized() else None
            offloaded = dlo.offload(
                model, device="cpu", group=group, checkpoint=path, load_threads=threads, **SHORT
            )
        for name in ("a.safetensors", "b.safetensors"):
            assert trace.opened.count(name) == 1
            mine = [row for row in trace.reads if row[0] == name]
            assert all(stop - start <= CALL for _, start, stop, _ in mine)
            for thread in {row[3] for row in mine}:
                starts = [row[1] for row in mine if row[3] == thread]
                assert starts == sorted(starts)
            # No byte twice, but what a row-major file must be read again for other strides.
            plain = sorted(mine, key=lambda row: row[1])
            assert sum(stop - start for _, start, stop, _ in plain) < 1.3 * plain[-1][2]
        # One file after the other.
        if threads == 1:
            names = [row[0] for row in trace.reads]
            assert names == sorted(names)
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank)), resident(inputs(rank)))
        offloaded.shutdown()
        return len({row[3] for row in trace.reads})

    used = run_ranks(body, num_ranks)
    assert max(used) == threads or threads > 1


@pytest.mark.usefixtures("small_calls")
def test_tensors_that_lie_together_are_read_in_one_call(tmp_path: Path) -> None:
    model = make_toy(6)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    size = (tmp_path / "a.safetensors").stat().st_size
    with pytest.MonkeyPatch.context() as patch:
        trace = Trace(patch)
        offloaded = dlo.offload(twin(model), device="cpu", checkpoint=tmp_path, load_threads=1)
    offloaded.shutdown()
    assert len(model.state_dict()) > 20
    assert len(trace.reads) <= size // CALL + 1


# --- parts ----------------------------------------------------------------------------------------


def plan_of(model: Toy, path: Path) -> ModelPlan:
    return plan_model(
        model,
        dlo.OffloadConfig(),
        blocks=None,
        loading=Loading(path),
        size=1,
        alignment=256,
        device_type="cpu",
    )


def load(plans: Sequence[ModelPlan], store: HostStore, part: tuple[int, int]) -> list[LoadProgress]:
    told: list[LoadProgress] = []
    load_shards(
        plans, store, rank=0, digest=bytes(32), report=Report(0, told.append), part=part, threads=2
    )
    return told


def private_store(sizes: Sequence[int]) -> HostStore:
    """Return a store of pageable memory."""
    return PrivateStore(CpuBackend().allocator, sizes, [True] * len(sizes))


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("from_file", [True, False])
def test_parts_fill_a_store_together_and_are_nearly_equal(
    count: int, from_file: bool, tmp_path: Path
) -> None:
    model = awkward_toy()
    path = write(model, tmp_path / "stored") if from_file else None
    plan = plan_of(model, path)  # type: ignore[arg-type]
    sizes = [shard.nbytes for shard in plan.shards]
    whole, shared = (private_store(sizes) for _ in range(2))
    load([plan], whole, (0, 1))
    done = []
    for index in range(count):
        told = load([plan], shared, (index, count))
        assert told[-1].done_nbytes == told[-1].total_nbytes
        done.append(told[-1].done_nbytes)
    assert torch.equal(whole.slab, shared.slab)
    assert any(whole.slab)
    total = sum(done)
    if from_file:
        assert all(abs(nbytes - total / count) <= 2 * CALL for nbytes in done)
    assert total == sum(layout_nbytes(plan))


def layout_nbytes(plan: ModelPlan) -> list[int]:
    return [spec.nbytes for layout in plan.layouts for spec in layout.tensors]


# --- the end of a load ----------------------------------------------------------------------------


def reader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dlo-read")]


def files_open() -> int:
    count = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{entry}").endswith(".safetensors")
        except OSError:
            continue
    return count


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Check that no thread and no open file is left."""
    assert not reader_threads()
    yield
    assert not reader_threads()
    # The frames in an error's traceback hold what they worked with.
    gc.collect()
    assert not files_open()


class CancelledError(Exception):
    """Raised by a caller's callback."""


@pytest.mark.usefixtures("small_calls", "nothing_left")
@pytest.mark.parametrize("error", [CancelledError, KeyboardInterrupt])
def test_a_callback_that_raises_ends_the_threads(
    error: type[BaseException], tmp_path: Path
) -> None:
    model = awkward_toy()
    path = write(model, tmp_path / "stored")
    seen: list[int] = []

    def listen(progress: LoadProgress) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(progress.done_nbytes)
        if len(seen) == 3:
            raise error

    with pytest.raises(error):
        dlo.offload(twin(model), device="cpu", checkpoint=path, load_threads=3, progress=listen)
    assert len(seen) == 3


@pytest.mark.usefixtures("small_calls", "nothing_left")
def test_an_interrupt_while_the_threads_read_is_heard_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = awkward_toy()
    path = write(model, tmp_path / "stored")
    preadv, calls = os.preadv, []

    def slow(file: int, outs: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return preadv(file, outs, offset)

    monkeypatch.setattr(os, "preadv", slow)
    # A shell that starts its jobs in the background lets them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            dlo.offload(twin(model), device="cpu", checkpoint=path, load_threads=2)
    finally:
        signal.signal(signal.SIGINT, before)
    size = sum(file.stat().st_size for file in path.iterdir())
    assert len(calls) < size // CALL


@pytest.mark.usefixtures("small_calls", "nothing_left")
def test_a_read_that_fails_in_a_thread_is_raised_with_path_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = awkward_toy()
    path = write(model, tmp_path / "stored")
    preadv, calls = os.preadv, []

    def failing(file: int, outs: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) > 4:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(file, outs, offset)

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(dlo.CheckpointError, match=r"cannot read '.+' from '.+safetensors'.*error"):
        dlo.offload(twin(model), device="cpu", checkpoint=path, load_threads=3)


@pytest.mark.usefixtures("nothing_left")
def test_a_file_written_to_after_its_last_byte_was_read_is_refused(tmp_path: Path) -> None:
    model = make_toy(3)
    path = tmp_path / "a.safetensors"
    save_file(model.state_dict(), path)

    def touch(progress: LoadProgress) -> None:
        if progress.done_nbytes == progress.total_nbytes:
            later = path.stat().st_mtime_ns + 1_000_000
            os.utime(path, ns=(later, later))

    with pytest.raises(dlo.CheckpointError, match="was written to"):
        dlo.offload(twin(model), device="cpu", checkpoint=path, progress=touch)


# --- the page cache -------------------------------------------------------------------------------


def pages_of(path: Path) -> Any:
    with path.open("rb") as file:
        return cached_pages(file.fileno(), path.stat().st_size)


def push_out(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.usefixtures("small_calls")
@pytest.mark.parametrize("fails", [False, True])
def test_the_page_cache_is_left_as_it_was_found(fails: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Toy([Block(200) for _ in range(3)]).requires_grad_(False)
    path = tmp_path / "a.safetensors"
    save_file(model.state_dict(), path)
    push_out(path)
    if pages_of(path).any():
        pytest.skip("the file system of the temporary folder keeps its pages in memory")
    warm = 20
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 5 * PAGE, warm * PAGE)
    before = pages_of(path)
    assert before[warm : warm + 5].all()
    assert before.sum() < len(before) / 2
    meanwhile: list[int] = []

    def listen(progress: LoadProgress) -> None:
        meanwhile.append(int(pages_of(path).sum()))
        if fails and progress.done_nbytes == progress.total_nbytes:
            raise CancelledError

    offloaded = None
    try:
        offloaded = dlo.offload(twin(model), device="cpu", checkpoint=path, progress=listen)
    except CancelledError:
        assert fails
    assert max(meanwhile) > 0.9 * len(before)
    # The header was read to make the plan.
    assert np.array_equal(pages_of(path)[2:], before[2:])
    if offloaded is not None:
        offloaded.shutdown()


def test_a_restore_leaves_the_page_cache_as_it_was_found_too(tmp_path: Path) -> None:
    model = make_toy(4)
    path = tmp_path / "a.safetensors"
    save_file(model.state_dict(), path)
    push_out(path)
    if pages_of(path).any():
        pytest.skip("the file system of the temporary folder keeps its pages in memory")

    def body(rank: int) -> None:
        offloaded = dlo.offload(
            twin(model), device="cpu", group=dist.group.WORLD, checkpoint=path, **SHORT
        )
        offloaded.disable()

    run_ranks(body, 2)
    assert not pages_of(path)[2:].any()


# --- past the page cache --------------------------------------------------------------------------


def skip_without_direct_reads(path: Path) -> None:
    try:
        check_direct(path)
    except dlo.ConfigError:
        pytest.skip("the file system of the temporary folder takes no direct reads")


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 50_001])
def test_direct_reads_have_the_same_bits_to_the_last_byte(nbytes: int, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensor = torch.arange(nbytes).to(torch.uint8)
    save_file({"w": tensor}, path)
    skip_without_direct_reads(path)
    with Checkpoint.open(path, direct_io=True) as checkpoint:
        for start, stop in ((0, nbytes), (nbytes // 3, nbytes), (0, nbytes // 2)):
            out = bytearray(stop - start)
            checkpoint.read("w", start, stop, memoryview(out))
            assert bytes(out) == bytes(tensor.numpy()[start:stop].tobytes())


@pytest.mark.usefixtures("small_calls")
def test_a_load_past_the_page_cache_puts_nothing_into_it(tmp_path: Path) -> None:
    resident = awkward_toy()
    path = write(resident, tmp_path / "stored")
    skip_without_direct_reads(path / "a.safetensors")
    for file in path.iterdir():
        push_out(file)
    model = twin(resident)
    offloaded = dlo.offload(model, device="cpu", checkpoint=path, direct_io=True, load_threads=2)
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    for file in path.iterdir():
        assert pages_of(file)[4:].mean() < 0.2
    offloaded.shutdown()


def test_a_file_that_ends_early_is_refused_by_direct_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"v": torch.ones(10_000), "w": torch.ones(10_000)}, path)
    skip_without_direct_reads(path)
    with Checkpoint.open(path, direct_io=True) as checkpoint:
        os.truncate(path, path.stat().st_size - 100)
        with pytest.raises(dlo.CheckpointError, match="'w' ended 100 bytes early"):
            checkpoint.read("w", 0, 40_000, memoryview(bytearray(40_000)))


def test_a_file_system_without_direct_reads_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_toy(2)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **rest: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more, **rest)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(dlo.ConfigError, match=r"direct_io=True.*a\.safetensors.*direct_io=False"):
        dlo.offload(model, device="cpu", checkpoint=tmp_path, direct_io=True)


# --- progress -------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """Looks like one."""

    def isatty(self) -> bool:
        return True


def test_the_bar_shows_the_rate_and_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with reporting(True) as report:
            report.expect(3_000_000)
            report.add(1_000_000)
            report.add(2_000_000)
        text = stream.getvalue()
        assert ("GB/s" in text) == shown
        assert ("loading weights" in text) == shown
        assert ("3.0/3.0 MB" in text) == shown


def test_the_remaining_time_follows_from_the_rate() -> None:
    assert dlo.LoadProgress(0, 10, 1.0).remaining_s is None
    assert dlo.LoadProgress(4, 10, 2.0).remaining_s == 3.0
    assert dlo.LoadProgress(10, 10, 2.0).remaining_s == 0.0


def test_strided_memory_is_filled_whole(tmp_path: Path) -> None:
    """What is read for a column-major parameter lies as the parameter does."""
    torch.manual_seed(0)
    model = Toy([Block(), Block()]).requires_grad_(False)
    linear = model.blocks[0].get_submodule("linear")
    value = linear.get_parameter("weight").t().contiguous().t()
    linear.register_parameter("weight", torch.nn.Parameter(value, requires_grad=False))
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items()}, tmp_path / "a.safetensors"
    )
    plan = plan_of(model, tmp_path)
    store = private_store([shard.nbytes for shard in plan.shards])
    load([plan], store, (0, 1))
    for number, layout in enumerate(plan.layouts):
        for spec in layout.tensors:
            wanted = model.get_parameter(spec.name)
            got = store.shard(number)[spec.offset : spec.offset + spec.nbytes]
            assert torch.equal(got, bytes_of(wanted, spec.nbytes)), spec.name


def test_advice_that_the_system_refuses_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that takes none, and a system that has none."""
    model = make_toy(3)
    path = tmp_path / "toy.safetensors"
    save_file(model.state_dict(), path)

    def refuse(*args: Any) -> None:
        raise OSError(22, "Invalid argument")

    def load() -> None:
        loaded = twin(model)
        # As if nothing were in memory, so that all kinds of advice are given.
        monkeypatch.setattr(page_cache, "cached_pages", lambda _, n: np.zeros(-(-n // 4096), bool))
        offloaded = dlo.offload(loaded, device="cpu", checkpoint=path)
        assert torch.equal(loaded(inputs()), model(inputs()))
        offloaded.disable()

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    load()
    monkeypatch.delattr(os, "posix_fadvise")
    load()


@pytest.mark.parametrize("use_allgather", [True, False])
def test_how_a_rank_reads_is_its_own_affair(use_allgather: bool, tmp_path: Path) -> None:
    model = make_toy(3)
    path = tmp_path / "toy.safetensors"
    save_file(model.state_dict(), path)
    skip_without_direct_reads(path)

    def job(rank: int) -> None:
        loaded = twin(model)
        settings: dict[str, Any] = {"load_threads": 1 + rank, "direct_io": rank == 0}
        dlo.offload(
            loaded,
            device="cpu",
            group=dist.group.WORLD,
            checkpoint=path,
            use_allgather=use_allgather,
            load_timeout_s=10,
            **settings,
        )
        assert torch.equal(loaded(inputs(rank)), model(inputs(rank)))
        dist.barrier()

    run_ranks(job, 2)
