"""The mapped tier: right bits whenever the reading thread comes, bounded memory, clear errors."""

from __future__ import annotations

import gc
import os
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from inline_worker import MODES, InlineWorker
from kernels import Program
from leaks import nothing_left
from pinning import PinningBackend
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from toys import AwkwardBlock, Toy, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core import mapped, staging
from dlo_core.checkpoint import Checkpoint
from dlo_core.cpu import CpuBackend
from dlo_core.feed import DirectFeed
from dlo_core.gather_transfer import InPlaceTransfer, StagedTransfer
from dlo_core.registration import HostRegistration
from dlo_core.source import ModuleTensor
from dlo_core.testing import GlooAgreement, Recorder, SimAgreement, SimBackend, World
from dlo_core.trace import spans
from dlo_core.transfer import LocalTransfer, Transfer
from dlo_core.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import nn

SHORT: dict[str, Any] = {"timeout_s": 10.0, "load_timeout_s": 10.0}
WAYS: dict[str, dict[str, Any]] = {
    "local": {"use_allgather": False},
    "staged": {"use_allgather": True, "stages": 2},
    "in place": {"use_allgather": True, "stages": 0},
}


def store(model: nn.Module, folder: Path, name: str = "model.safetensors") -> Path:
    path = folder / name
    tensors = model.state_dict().items()
    save_file({k: t.clone(memory_format=torch.contiguous_format) for k, t in tensors}, path)
    return path


# As a module whose names a test may replace.
patchable: Any = mapped


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return store(make_toy(5), tmp_path)


def start(model: nn.Module, path: Path | None, backend: Any, **settings: Any) -> Any:
    group = dist.group.WORLD if dist.is_initialized() else None
    given = {"host": "mapped", **SHORT, **settings}
    return dlo.offload(model, device=backend, group=group, checkpoint=path, **given)


# --- bits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_right_and_come_back(way: str, size: int, checkpoint: Path) -> None:
    def body(rank: int) -> None:
        backend = PoisonBackend()
        model = make_toy(5)
        resident, before = twin(model), snapshot(model)
        with nothing_left(backend):
            offloaded = start(model, checkpoint, backend, depth=2 + rank % 1, **WAYS[way])
            with torch.inference_mode():
                for number, skip in enumerate([(), (0, 1), (4,), (), (1, 2, 3)]):
                    x = inputs(number + rank)
                    assert torch.equal(model(x, skip), resident(x, skip))
            stats = offloaded.stats()
            shard = offloaded.engine.shards[0].nbytes
            assert stats.host_bytes == stats.staging_bytes == 2 * shard
            assert (stats.pageable_bytes, stats.pinned_bytes, stats.shared_bytes) == (0, 0, 0)
            assert stats.mapped_bytes == 5 * shard
            assert {block.tier for block in stats.blocks} == {"mapped"}
            assert offloaded.footprint.host_nbytes == offloaded.footprint.staging_nbytes
            assert f"staging {2 * shard:,}, mapped {5 * shard:,}" in repr(offloaded)
            offloaded.disable()
            del offloaded
        assert_restored(model, before)

    if size == 1:
        body(0)
    else:
        run_ranks(body, size)


# --- order: late, eager and random ----------------------------------------------------------------


# The streams of one offload, as World(early=...) knows them.
COPY, COMM, COMPUTE = "stream 0", "stream 1", "compute"


@torch.no_grad()
def wrong_on_the_late_device(
    way: str,
    early: tuple[str, ...],
    worker: str,
    path: Path,
    *,
    depth: int,
    seed: int | None = None,
) -> int:
    """Run passes; return how many outputs differ. The worker is inline, the host runs ahead."""
    patchable.Worker = partial(InlineWorker, worker, seed or 0)
    world = World(early=early) if seed is None else World(mode="random", seed=seed)
    backend = SimBackend(world, host_ahead=True)
    model, resident = Program(5), Program(5)
    done = dlo.offload(
        model,
        device=backend,
        group=GlooAgreement(backend) if dist.is_initialized() else None,
        checkpoint=path,
        depth=depth,
        host="mapped",
        **SHORT,
        **WAYS[way],
    )
    programs = [None, None, (0, 2, 4), None, (1,), None]
    if dist.is_initialized() and dist.get_rank():
        programs = [None] * 6
    batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    with backend.compute():
        outs = [model(x, calls) for x, calls in zip(batches, programs, strict=True)]
    wanted = [resident(x, calls) for x, calls in zip(batches, programs, strict=True)]
    backend.synchronize()
    done.shutdown()
    return sum(not torch.equal(a, b) for a, b in zip(outs, wanted, strict=True))


EARLY: tuple[tuple[str, ...], ...] = ((), (COPY,), (COMM,), (COPY, COMM, COMPUTE))


def count_wrong(way: str, runs: list[Callable[[], int]]) -> int:
    def body(rank: int) -> int:
        wrong = 0
        for run in runs:
            try:
                wrong += run()
            except dlo.FillError as error:
                assert "another block's bytes" in str(error)  # noqa: PT017 - one of two ways
                wrong += 1
        return wrong

    return sum(run_ranks(body, 1 if way == "local" else 2))


@pytest.fixture
def late_checkpoint(tmp_path: Path) -> Iterator[Path]:
    yield store(Program(5), tmp_path)
    patchable.Worker = Worker


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_right_however_late_the_reading_and_the_streams_are(
    way: str, late_checkpoint: Path
) -> None:
    runs: list[Callable[[], int]] = [
        partial(wrong_on_the_late_device, way, early, mode, late_checkpoint, depth=depth)
        for early in EARLY
        for mode in MODES
        for depth in (2, 3)
    ]
    runs += [
        partial(wrong_on_the_late_device, way, (), "random", late_checkpoint, depth=3, seed=seed)
        for seed in range(6)
    ]
    assert count_wrong(way, runs) == 0


def without_catching_up(self: staging.StagingFeed, filled: Any) -> None:
    """Wait for nobody."""


class Forgetful(staging.StagingFeed):
    """Does not wait for the copy out of a staging buffer before it fills the buffer anew."""

    def _carry(self, block: int, filled: Any, queue: Any) -> None:
        self._copied = [None] * len(self._copied)
        super()._carry(block, filled, queue)


def plain_acquire(self: Transfer, slot: Any, block: int) -> None:
    """Acquire as it is, without catching up."""
    feed, self._feed = self._feed, DirectFeed()
    original_acquire(self, slot, block)
    self._feed = feed


original_acquire = Transfer.acquire

# What is taken out, and the way, the early streams, the worker and the depth that show the need.
NEEDED: dict[str, tuple[str, tuple[str, ...], str, int]] = {
    "the worker's wait for the copy": ("local", (), "eager", 3),
    "catching up in acquire": ("local", (), "late", 2),
    "catching up before a staged gather": ("staged", (), "late", 2),
    "catching up before a gather in place": ("in place", (), "late", 2),
}


@pytest.mark.parametrize("what", NEEDED)
def test_bits_are_wrong_without(
    what: str, late_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    way, early, mode, depth = NEEDED[what]
    if what == "the worker's wait for the copy":
        monkeypatch.setattr(mapped, "StagingFeed", Forgetful)
    elif what == "catching up in acquire":
        monkeypatch.setattr(Transfer, "acquire", plain_acquire)
    else:
        monkeypatch.setattr(staging.StagingFeed, "catch_up", without_catching_up)
    run = partial(wrong_on_the_late_device, way, early, mode, late_checkpoint, depth=depth)
    assert count_wrong(way, [run]) > 0


def test_settling_waits_for_what_is_not_even_read(late_checkpoint: Path) -> None:
    patchable.Worker = partial(InlineWorker, "late")
    backend = SimBackend(host_ahead=True)
    model = Program(5)
    offloaded = start(model, late_checkpoint, backend)
    engine = offloaded.engine
    engine.transfer.settle()
    slot, weight = engine.pool.slots[0], Program(5).blocks[0].weight
    assert isinstance(weight, torch.Tensor)
    nbytes = weight.nbytes
    assert torch.equal(slot.buffer[:nbytes], weight.detach().view(torch.uint8).flatten())
    offloaded.shutdown()


def test_a_copy_that_is_not_queued_yet_leaves_the_time_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "Worker", partial(InlineWorker, "late"))
    # Odd, so that a block lies in another slot in each pass.
    model = make_toy(3)
    offloaded = start(model, store(model, tmp_path), CpuBackend())
    for _ in range(4):
        run_passes(model, 1)
        assert min(block.transfer_ms for block in offloaded.stats().blocks) > 0.0
        assert all(span.end_ms >= span.start_ms for span in spans(offloaded))
    offloaded.shutdown()


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 2), (2, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_the_simulation_finds_no_race(
    mode: str, ranks: int, stages: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for worker in MODES:
        monkeypatch.setattr(mapped, "Worker", partial(InlineWorker, worker, 1))
        world = World(ranks, mode, 3)
        recorders = [Recorder() for _ in range(ranks)]

        def body(rank: int, world: World = world, recorders: list[Recorder] = recorders) -> None:
            backend = SimBackend(world, rank, recorder=recorders[rank])
            model = make_toy(5)
            resident = twin(model)
            group = SimAgreement(world, rank) if world.size > 1 else None
            offloaded = dlo.offload(
                model,
                device=backend,
                group=group,
                checkpoint=checkpoint,
                host="mapped",
                stages=stages,
            )
            recorders[rank].watch(offloaded)
            with torch.inference_mode(), backend.compute():
                for number, skip in enumerate([(), (1, 3), (rank,), ()]):
                    x = inputs(number)
                    assert torch.equal(model(x, skip=skip), resident(x, skip=skip))
            offloaded.shutdown()

        world.run_ranks(body)
        assert [race for recorder in recorders for race in recorder.races] == []


# --- pages that are locked where they lie ---------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_pages_that_the_device_can_lock_are_copied_from_where_they_lie(
    way: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    blocks = [AwkwardBlock(seed=n) for n in range(3)]
    model = Toy(blocks).requires_grad_(False)
    # Row-major throughout, as files are.
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None and not tensor.is_contiguous():
                    tensor.data = tensor.data.contiguous()
    path = store(model, tmp_path)

    def body(rank: int) -> None:
        mine = twin(model)
        backend = PinningBackend(readonly_registration=True)
        with nothing_left(backend):
            offloaded = start(mine, path, backend, **WAYS[way])
            stats = offloaded.stats()
            assert all(readonly for _, readonly in backend.counted.registered)
            assert stats.pinned_bytes == backend.counted.taken > 0
            assert (stats.host_bytes, stats.staging_bytes) == (0, 0)
            # No page is locked twice.
            assert stats.pinned_bytes <= path.stat().st_size + 4096
            with torch.inference_mode():
                for number in range(3):
                    assert torch.equal(mine(inputs(number)), model(inputs(number)))
            offloaded.shutdown()
            assert backend.counted.taken == 0
            del offloaded, mine

    run_ranks(body, 1 if way == "local" else 2)


class Driver:
    """Locks nothing, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append("lock")
        return 0

    def host_unregister(self, address: int) -> int:
        self.calls.append("unlock")
        return 0

    def take_error(self) -> int:
        return 0

    def describe(self, code: int) -> str:
        return ""

    def synchronize(self) -> int:
        self.calls.append("rest")
        return 0


@pytest.mark.parametrize("end", ["forget", "shutdown"])
def test_pages_of_a_forgotten_model_stay_locked_until_the_device_rests(
    end: str, checkpoint: Path
) -> None:
    """The copies of the next pass are under way; who closes an offload has waited for them."""
    backend, driver = PinningBackend(readonly_registration=True), Driver()

    def register(memory: torch.Tensor, *, readonly: bool = False) -> HostRegistration:
        return HostRegistration(driver, memory.data_ptr(), memory.nbytes, keep=memory)

    backend.counted.register = register  # type: ignore[assignment]
    model = make_toy(5)
    offloaded = start(model, checkpoint, backend)
    with torch.inference_mode():
        model(inputs())
    if end == "shutdown":
        offloaded.shutdown()
    del offloaded, model
    gc.collect()
    locks = driver.calls.count("lock")
    ends = ["unlock"] if end == "shutdown" else ["rest", "unlock"]
    assert driver.calls == ["lock"] * locks + ends * locks


def test_pages_that_cannot_be_locked_go_through_staging(checkpoint: Path) -> None:
    model = make_toy(5)
    resident = twin(model)
    # Room for the staging buffers and not for the file.
    backend = PinningBackend(readonly_registration=True, limit=2 * 1024)
    with pytest.warns(dlo.DloWarning, match=r"go through staging buffers instead"):
        offloaded = start(model, checkpoint, backend)
    assert offloaded.stats().staging_bytes == offloaded.stats().pinned_bytes == 2048
    with torch.inference_mode():
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.shutdown()
    assert backend.counted.taken == 0


@pytest.mark.parametrize(("budget", "pinned"), [(None, 2048), (2048, 2048), (2047, 0), (0, 0)])
def test_staging_keeps_to_the_pin_budget(budget: int | None, pinned: int, checkpoint: Path) -> None:
    backend = PinningBackend()
    with start(make_toy(5), checkpoint, backend, pin_budget_bytes=budget) as offloaded:
        assert offloaded.stats().pinned_bytes == backend.counted.taken == pinned
        assert offloaded.stats().staging_bytes == 2048


# --- what cannot be mapped ------------------------------------------------------------------------


def test_what_is_not_in_a_file_as_it_computes_is_refused_by_name(tmp_path: Path) -> None:
    model = make_toy(3)
    before = snapshot(model)
    with pytest.raises(dlo.ConfigError, match="has no checkpoint; pass checkpoint="):
        start(model, None, PoisonBackend())
    assert_restored(model, before)

    model.blocks[1].linear.weight.data = model.blocks[1].linear.weight.data.t()  # type: ignore[union-attr, operator]
    path = store(model, tmp_path)
    with pytest.raises(dlo.ConfigError, match=r"'blocks\.1\.linear\.weight' has strides \(1, 8\)"):
        start(model, path, PoisonBackend())
    # With the choice left free there is nothing to refuse.
    start(model, path, PoisonBackend(), host=None).disable()


def test_a_tensor_from_elsewhere_than_the_file_is_named(checkpoint: Path) -> None:
    offloaded = start(make_toy(5), checkpoint, PoisonBackend())
    (plan,) = offloaded.engine.plans
    assert mapped.why_not_mapped([plan]) is None
    name = "blocks.2.norm.bias"
    sources = {**plan.sources, name: ModuleTensor(torch.zeros(8))}
    reason = mapped.why_not_mapped([replace(plan, sources=sources)])
    assert reason == f"{name!r} does not come from the checkpoint as it is stored"
    offloaded.shutdown()


def test_the_checkpoints_pages_are_not_for_writing(checkpoint: Path) -> None:
    for backend in (PoisonBackend(), PinningBackend(readonly_registration=True)):
        offloaded = start(make_toy(5), checkpoint, backend)
        with pytest.raises(dlo.UseError, match="mapped tier keeps no copy"):
            offloaded.engine.store.shard(0)
        offloaded.disable()


def run_passes(model: nn.Module, count: int) -> None:
    with torch.inference_mode():
        for number in range(count):
            model(inputs(number))


@pytest.mark.parametrize("locked", [False, True])
def test_weights_in_pages_of_a_file_are_read_but_not_updated(
    locked: bool, checkpoint: Path
) -> None:
    model = make_toy(5)
    backend = PinningBackend(readonly_registration=True) if locked else PoisonBackend(0)
    offloaded = start(model, checkpoint, backend)
    stored = make_toy(5).state_dict()
    with pytest.raises(dlo.UseError, match=r"mapped tier keeps no copy.*use host='pinned'"):
        offloaded.update_weights({"blocks.1.linear.bias": stored["blocks.1.linear.bias"] + 1})
    run_passes(model, 2)
    got = model.state_dict()
    assert got.keys() == stored.keys()
    for name, value in stored.items():
        assert torch.equal(got[name], value), name
    offloaded.disable()


# --- failures -------------------------------------------------------------------------------------


def test_an_error_while_reading_names_the_block_and_closes_the_offload(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Checkpoint.fill

    def fill(self: Checkpoint, outs: Sequence[tuple[str, memoryview]], *rest: Any) -> None:
        if outs[0][0].startswith("blocks.3."):
            raise dlo.CheckpointError("the disk is gone")
        original(self, outs, *rest)

    model = make_toy(5)
    before = snapshot(model)
    backend = PoisonBackend(0)
    with nothing_left(backend):
        offloaded = start(model, checkpoint, backend)
        monkeypatch.setattr(Checkpoint, "fill", fill)
        with pytest.raises(dlo.FillError, match="the disk is gone") as caught, torch.no_grad():
            model(inputs())
        assert caught.value.block == "blocks.3"
        assert "could not be read into the staging buffer" in str(caught.value)
        del caught
        with pytest.raises(dlo.UseError, match="closed"), torch.no_grad():
            model(inputs())
        monkeypatch.undo()
        offloaded.disable()
        del offloaded
    assert_restored(model, before)


def test_an_error_on_one_rank_is_an_error_in_time_on_the_other(checkpoint: Path) -> None:
    def body(rank: int) -> str:
        model = make_toy(5)
        backend = PoisonBackend(0)
        offloaded = start(model, checkpoint, backend, timeout_s=3.0)
        if rank == 1:

            def fill(*args: Any) -> None:
                raise dlo.CheckpointError("the disk is gone")

            setattr(Checkpoint, "fill", fill)  # noqa: B010 - this process ends with the test
        with pytest.raises(dlo.DloError) as caught:
            run_passes(model, 3)
        text = str(caught.value)
        del caught
        offloaded.shutdown()
        return text

    texts = run_ranks(body, 2)
    assert "the disk is gone" in texts[1]
    assert texts[0]


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def written_to(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(bytes(100))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def replaced(path: Path) -> None:
    """As a copy that keeps size and time."""
    status = path.stat()
    other = path.with_suffix(".new")
    other.write_bytes(bytes(status.st_size))
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("locked", [False, True])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (cut_short, "truncated|was written to"),
        (written_to, "was written to"),
        (replaced, "was replaced by another file"),
        (os.unlink, "is not to be had any more"),
    ],
)
def test_a_file_that_is_changed_is_an_error_and_neither_the_end_nor_a_picture(
    change: Callable[[Path], None], told: str, locked: bool, checkpoint: Path
) -> None:
    model = make_toy(5)
    backend = PinningBackend(readonly_registration=True) if locked else PoisonBackend(0)
    offloaded = start(model, checkpoint, backend)
    assert type(offloaded.engine.store) is (mapped.PagesStore if locked else mapped.StagedStore)
    run_passes(model, 2)
    change(checkpoint)
    with pytest.raises(dlo.FillError, match=told):
        run_passes(model, 3)
    offloaded.shutdown()


@pytest.mark.parametrize("change", [cut_short, replaced])
def test_pages_of_a_changed_file_are_not_given_back_as_weights(
    change: Callable[[Path], None], checkpoint: Path
) -> None:
    """To read what was cut off would be the end of the process."""
    model = make_toy(5)
    offloaded = start(model, checkpoint, PinningBackend(readonly_registration=True))
    change(checkpoint)
    with pytest.raises(dlo.CheckpointError):
        model.state_dict()
    offloaded.shutdown()


def test_a_file_that_is_replaced_before_it_is_opened_to_be_read_is_noticed(
    checkpoint: Path,
) -> None:
    """With the size and time of the one whose header was read."""
    with Checkpoint.open(checkpoint) as opened:
        replaced(checkpoint)
        name = next(iter(opened.tensors))
        with pytest.raises(dlo.CheckpointError, match="was replaced by another file"):
            opened.read(name, 0, 4, memoryview(bytearray(4)))


def test_a_read_that_hangs_is_a_timeout_and_holds_no_shutdown(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Checkpoint.fill
    hang = [False]

    def fill(self: Checkpoint, outs: Sequence[tuple[str, memoryview]], *rest: Any) -> None:
        while hang[0] and outs[0][0].startswith("blocks.2."):
            time.sleep(0.01)
        original(self, outs, *rest)

    monkeypatch.setattr(Checkpoint, "fill", fill)
    close = Worker.close
    monkeypatch.setattr(Worker, "close", lambda self: close(self, 0.2))
    model = make_toy(5)
    backend = PinningBackend()
    offloaded = start(model, checkpoint, backend, timeout_s=1.0)
    hang[0] = True
    with pytest.raises(dlo.FillTimeout, match=r"blocks\.2.*timed out after 1 s"):
        run_passes(model, 2)
    began = time.monotonic()
    offloaded.shutdown()
    assert time.monotonic() - began < 5.0
    # What the thread may still write into is not given back before it ends.
    assert len(mapped._unended) == 1
    assert backend.counted.taken == 2 * 1024
    hang[0] = False
    mapped._unended.clear()


@pytest.mark.parametrize("end", ["disable", "shutdown", "forget"])
def test_however_it_ends_the_thread_goes_too(end: str, checkpoint: Path) -> None:
    backend = PoisonBackend(0)
    with nothing_left(backend):
        model = make_toy(5)
        offloaded = start(model, checkpoint, backend)
        with torch.inference_mode():
            model(inputs())
        if end != "forget":
            getattr(offloaded, end)()
        del offloaded, model


def test_a_forked_child_is_told(checkpoint: Path) -> None:
    """Its thread is not there; the parent's offload goes on."""
    model = make_toy(5)
    resident = twin(model)
    offloaded = start(model, checkpoint, PoisonBackend(0))
    with torch.inference_mode():
        model(inputs())
        child = os.fork()
        if child == 0:
            try:
                model(inputs())
                os._exit(1)
            except dlo.DloError as error:
                os._exit(0 if "offload again in this process" in str(error) else 2)
            except BaseException:
                os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(model(inputs()), resident(inputs()))
    offloaded.shutdown()


def test_each_transfer_class_is_one_of_the_ways() -> None:
    assert {LocalTransfer, StagedTransfer, InPlaceTransfer} == {
        kind
        for base in Transfer.__subclasses__()
        for kind in (base, *base.__subclasses__())
        if not getattr(kind, "__abstractmethods__", None)
    }
