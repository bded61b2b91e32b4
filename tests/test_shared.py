"""The shared tier: one copy a node, read once, gone with the last process however that ends."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import torch
import torch.distributed as dist
from kernels import Program
from leaks import nothing_left, segments
from parallel_dit import made_topology, make_dit
from pinning import PinningBackend, machine_of
from poison import PoisonBackend
from ranks import RanksError, run_ranks
from safetensors.torch import save_file
from toys import assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core import segment as segment_module
from dlo_core import touch as touch_module
from dlo_core.host import HostStore
from dlo_core.segment import Segment, SegmentMaker, receive
from dlo_core.testing import SimBackend
from dlo_core.testing.compute import Compute

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from dlo_core.progress import LoadProgress

SHORT: dict[str, Any] = {"timeout_s": 10.0, "load_timeout_s": 10.0}
N = 10
BLOCK = 1024


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)
    return path


def start(model: nn.Module, backend: Any, path: Path | None = None, **settings: Any) -> Any:
    group = dist.group.WORLD if dist.is_initialized() else None
    given = {"host": "shared", "use_allgather": False, **SHORT, **settings}
    return dlo.offload(model, device=backend, group=group, checkpoint=path, **given)


def check(model: nn.Module, resident: nn.Module) -> None:
    with torch.inference_mode():
        for number in range(3):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))


# --- one copy, read once --------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("size", [1, 4])
def test_all_ranks_map_one_memory_and_divide_the_reading(
    size: int, stored: bool, checkpoint: Path
) -> None:
    def body(rank: int) -> tuple[int, int, int]:
        backend = PoisonBackend(0)
        model = make_toy(N)
        resident, before = twin(model), snapshot(model)
        told: list[LoadProgress] = []
        with nothing_left(backend):
            offloaded = start(model, backend, checkpoint if stored else None, progress=told.append)
            check(model, resident)
            stats = offloaded.stats()
            assert stats.host_bytes == stats.shared_bytes == N * BLOCK
            assert stats.pageable_bytes == stats.pinned_bytes == 0
            assert {block.tier for block in stats.blocks} == {"shared"}
            (inode,) = segments()
            # What one rank writes the others see: it is one memory.
            store = offloaded.engine.store
            if rank == 0:
                store.slab[-1] = 0x5A
            if dist.is_initialized():
                dist.barrier()
            seen = int(store.slab[-1])
            del store
            if dist.is_initialized():
                dist.barrier()
            offloaded.disable()
            del offloaded
        assert segments() == set()
        assert_restored(model, before)
        return inode, seen, told[-1].done_nbytes

    rows = run_ranks(body, size)
    assert len({inode for inode, _, _ in rows}) == 1
    assert {seen for _, seen, _ in rows} == {0x5A}
    blocks = sum(t.nbytes for t in make_toy(N).blocks.state_dict().values())
    # What stays on the device every rank reads for itself.
    rest = sum(t.nbytes for t in make_toy(N).state_dict().values()) - blocks
    assert sum(done for _, _, done in rows) == blocks + size * rest


def test_ranks_that_share_a_copy_update_it_together(checkpoint: Path) -> None:
    """One of them writes; a rank with other values is noticed before anything is changed."""
    fresh = make_toy(N, seed=1).state_dict()

    def body(rank: int) -> str:
        model, wanted = make_toy(N), make_toy(N, seed=1)
        offloaded = start(model, PoisonBackend(0), checkpoint)
        check(model, make_toy(N))
        other = {**fresh, "blocks.0.linear.bias": fresh["blocks.0.linear.bias"] + rank}
        with pytest.raises(dlo.AgreementError) as differ:
            offloaded.update_weights(other)
        with pytest.raises(dlo.UseError, match="give a mapping or a list"):
            offloaded.update_weights(iter(fresh.items()))
        check(model, make_toy(N))
        offloaded.update_weights(fresh)
        check(model, wanted)
        assert torch.equal(
            model.state_dict()["blocks.3.linear.weight"], fresh["blocks.3.linear.weight"]
        )
        assert len(segments()) == 1
        offloaded.disable()
        check(model, wanted)
        return str(differ.value)

    for text in run_ranks(body, 2):
        assert "blocks.0.linear.bias" in text


@pytest.mark.parametrize("late", [0, 1])
def test_nobody_writes_before_all_have_read(late: int) -> None:
    """Copies that the device has not come to are waited for on every rank before one writes."""

    def body(rank: int) -> None:
        backend = SimBackend(host_ahead=True)
        model = Program(5)
        old, new = twin(model), Program(5, seed=1)
        offloaded = start(model, backend)
        x = inputs(rank)
        with Compute(backend):
            out = model(x)
        if rank == late:
            engine = offloaded.engine
            stand_still = engine.streamers[0].stand_still

            def slow() -> None:
                time.sleep(0.5)
                stand_still()

            engine.streamers[0].stand_still = slow
        offloaded.update_weights(new.state_dict())
        backend.synchronize()
        assert torch.equal(out, old(x))
        with backend.compute():
            out = model(x)
        assert torch.equal(out, new(x))
        dist.barrier()

    run_ranks(body, 2)


@pytest.mark.parametrize("hosts", [("shared", "shared"), ("shared", "pageable")])
def test_weights_on_two_nodes_are_updated_together(hosts: tuple[str, str]) -> None:
    """One rank a node writes what is shared there, whatever the other node has."""

    def body(rank: int) -> int:
        model, wanted = make_toy(N), make_toy(N, seed=1)
        written = 0
        write = HostStore.write

        def count(self: HostStore, index: int, at: int, data: torch.Tensor) -> None:
            nonlocal written
            written += data.numel()
            write(self, index, at, data)

        with machine_of(node="aab"[rank]), pytest.MonkeyPatch.context() as patch:
            patch.setattr(HostStore, "write", count)
            offloaded = start(model, PoisonBackend(0), host=hosts["aab"[rank] == "b"])
            offloaded.update_weights(wanted.state_dict())
        check(model, wanted)
        dist.barrier()
        offloaded.shutdown()
        return written

    blocks = sum(p.nbytes for p in make_toy(N).blocks.parameters())
    assert run_ranks(body, 3) == [blocks, 0, blocks]


def test_two_nodes_keep_a_copy_each(checkpoint: Path) -> None:
    def body(rank: int) -> tuple[int, tuple[int, int]]:
        model = make_toy(N)
        with machine_of(node="ab"[rank % 2]):
            offloaded = start(model, PoisonBackend(0), checkpoint)
        check(model, make_toy(N))
        (inode,) = segments()
        part = offloaded.engine.store.part
        dist.barrier()
        offloaded.shutdown()
        return inode, part

    rows = run_ranks(body, 4)
    assert rows[0][0] == rows[2][0] != rows[1][0] == rows[3][0]
    assert [part for _, part in rows] == [(0, 2), (0, 2), (1, 2), (1, 2)]


def test_what_is_locked_is_locked_in_turn(checkpoint: Path) -> None:
    def body(rank: int) -> tuple[float, float, int]:
        backend = PinningBackend()
        original = backend.counted.register
        times: list[float] = []

        def register(memory: torch.Tensor, *, readonly: bool = False) -> Any:
            assert not readonly
            assert memory.data_ptr() % 4096 == 0
            times.append(time.monotonic())
            time.sleep(0.05)
            times.append(time.monotonic())
            return original(memory, readonly=readonly)

        backend.counted.register = register  # type: ignore[method-assign]
        model = make_toy(N)
        offloaded = start(model, backend, checkpoint)
        pinned = offloaded.stats().pinned_bytes
        check(model, make_toy(N))
        offloaded.disable()
        assert backend.counted.taken == 0
        return times[0], times[-1], pinned

    rows = sorted(run_ranks(body, 3))
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(rows))
    assert {pinned for _, _, pinned in rows} == {N * BLOCK}


# --- what is refused ------------------------------------------------------------------------------


def refused(rank: int, error: type[Exception], path: Path | None, seed: int, **more: Any) -> str:
    backend = PoisonBackend(0)
    model = make_toy(N, seed=seed)
    before = snapshot(model)
    with nothing_left(backend):
        with pytest.raises(error) as caught:
            start(model, backend, path, **more)
        text = str(caught.value)
        del caught
    assert segments() == set()
    assert_restored(model, before)
    return text


def test_ranks_with_different_models_cannot_share(checkpoint: Path, tmp_path: Path) -> None:
    for text in run_ranks(lambda r: refused(r, dlo.AgreementError, None, seed=r), 2):
        assert "models differ" in text
        assert "same model, the same checkpoint" in text
    other = tmp_path / "other.safetensors"
    save_file(make_toy(N).state_dict(), other)
    paths = [checkpoint, other]
    for text in run_ranks(lambda r: refused(r, dlo.AgreementError, paths[r], seed=0), 2):
        assert "models differ" in text


def test_all_ranks_of_a_node_share_or_none() -> None:
    hosts = ["shared", "pageable"]
    for text in run_ranks(lambda r: refused(r, dlo.AgreementError, None, 0, host=hosts[r]), 2):
        assert "host='shared' was given on ranks 0 and not on ranks 1" in text


def test_a_rank_that_cannot_be_handed_the_memory_is_told_why(checkpoint: Path) -> None:
    """As from another container: the address leads nowhere."""

    def body(rank: int) -> str:
        if rank == 1:
            original = socket.socket.connect

            def connect(self: Any, address: Any) -> None:
                if str(address).startswith("\0dlo"):
                    raise ConnectionRefusedError(111, "Connection refused")
                original(self, address)

            socket.socket.connect = connect  # type: ignore[method-assign]
        return refused(rank, dlo.HostMemoryError, checkpoint, 0)

    for text in run_ranks(body, 3):
        assert "one user in one network namespace" in text


@pytest.mark.parametrize("step", ["make", "pages", "pages one by one"])
def test_no_room_for_the_memory_is_an_error_on_every_rank(step: str, checkpoint: Path) -> None:
    """The system itself refuses: a limit on the size of files, and a disk that is full."""

    def body(rank: int) -> str:
        if step == "make":
            # The system's own signal would end the process; Python ignores it.
            resource.setrlimit(resource.RLIMIT_FSIZE, (N * BLOCK - 1, resource.RLIM_INFINITY))
        elif rank == 1:

            def full(*args: Any) -> None:
                raise OSError(28, "No space left on device")

            code = errno.ENOMEM if step == "pages" else errno.EINVAL
            module: Any = touch_module
            module._system_madvise = lambda: lambda *_: code
            os.posix_fallocate = full
        return refused(rank, dlo.HostMemoryError, checkpoint, 0)

    for text in run_ranks(body, 2):
        assert f"cannot make {N * BLOCK:,} bytes of shared host memory" in text


def test_a_lock_that_fails_half_way_gives_everything_back(checkpoint: Path) -> None:
    def body(rank: int) -> str:
        # Blocks 3 and 7 of ten, 4096 bytes apart: two ranges, of which one rank may lock one.
        backend = PinningBackend(limit=4096 if rank == 1 else None)
        model = make_toy(4 * N)
        before = snapshot(model)
        with nothing_left(backend):
            with pytest.raises(dlo.HostMemoryError) as caught:
                start(model, backend, pin_budget_bytes=2 * BLOCK)
            text = str(caught.value)
            del caught
        assert backend.counted.taken == 0
        assert segments() == set()
        assert_restored(model, before)
        return text

    for text in run_ranks(body, 2):
        assert "cannot register 4,096 bytes: ulimit -l is 4,096" in text


# --- ranks that die or are slow -------------------------------------------------------------------


def test_a_rank_that_dies_while_loading_is_named_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()

    def body(rank: int) -> None:
        def listen(progress: LoadProgress) -> None:
            if rank == 1:
                die_leaving_a_note(folder)

        text = refused(rank, dlo.AgreementError, checkpoint, 0, progress=listen)
        assert "rank 1 (global rank 1) did not come to it" in text

    with pytest.raises(RanksError) as caught:
        run_ranks(body, 3)
    # The others raised, in time, and have nothing left.
    assert set(caught.value.errors) == {1}
    assert_all_is_gone(folder, ranks=1)


def test_a_rank_that_is_slow_is_named(checkpoint: Path) -> None:
    def body(rank: int) -> str:
        def listen(progress: LoadProgress) -> None:
            if rank == 1 and progress.done_nbytes == progress.total_nbytes:
                time.sleep(7)

        began = time.monotonic()
        text = refused(rank, dlo.AgreementError, checkpoint, 0, progress=listen, load_timeout_s=3.0)
        assert rank == 1 or time.monotonic() - began < 20.0
        return text

    texts = run_ranks(body, 3)
    for rank in (0, 2):
        assert "rank 1 (global rank 1) did not come" in texts[rank]
        assert "raise load_timeout_s if it is still loading" in texts[rank]


def test_a_slow_rank_is_waited_for_as_long_as_loading_may_take(checkpoint: Path) -> None:
    def body(rank: int) -> None:
        def listen(progress: LoadProgress) -> None:
            if rank == 1 and progress.done_nbytes == progress.total_nbytes:
                time.sleep(1.5)

        model = make_toy(N)
        offloaded = start(model, PoisonBackend(0), checkpoint, progress=listen, timeout_s=1.0)
        check(model, make_toy(N))
        offloaded.shutdown()

    run_ranks(body, 2)


def die_leaving_a_note(folder: Path) -> None:
    """Write down which memory this process has, and be killed."""
    (folder / str(os.getpid())).write_text(" ".join(map(str, segments())))
    os.kill(os.getpid(), signal.SIGKILL)


def assert_all_is_gone(folder: Path, *, ranks: int) -> None:
    """Check that nobody has the memory that the processes had that left a note."""
    notes = [set(map(int, note.read_text().split())) for note in folder.iterdir()]
    # A rank may hear of another's death before it comes to its own.
    assert 1 <= len(notes) <= ranks
    left = set().union(*notes)
    assert left
    # It has a name in no folder, so who has it has it mapped or open.
    for process in psutil.process_iter():
        assert not left & segments(process.pid)


@pytest.mark.parametrize("moment", ["made", "handed", "read", "enabled"])
def test_a_job_that_is_killed_at_any_moment_leaves_no_segment(
    moment: str, checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()

    def die(*args: Any, **kwargs: Any) -> Any:
        die_leaving_a_note(folder)

    def body(rank: int) -> None:
        if moment == "made":
            SegmentMaker.duplicate = die  # type: ignore[method-assign]
        elif moment == "handed":
            Segment.__init__ = die  # type: ignore[method-assign]
        progress = die if moment == "read" else False
        start(make_toy(N), PoisonBackend(0), checkpoint, progress=progress, load_timeout_s=5.0)
        die()

    with pytest.raises(RanksError) as caught:
        run_ranks(body, 2)
    assert "died without a result" in str(caught.value)
    assert_all_is_gone(folder, ranks=1 if moment == "made" else 2)


# --- the hand-over --------------------------------------------------------------------------------


def test_the_memory_is_handed_over_and_goes_with_its_last_mapping() -> None:
    before = set(os.listdir("/proc/self/fd"))
    maker = SegmentMaker(5000)
    descriptors = maker.duplicate(), receive(maker.address, "here")
    mine, other = (Segment(each, 5000, (part, 2)) for part, each in enumerate(descriptors))
    for each in descriptors:
        os.close(each)
    mine.tensor[:] = 7
    assert bool((other.tensor == 7).all())
    maker.close()
    maker.close()
    with pytest.raises(dlo.HostMemoryError, match="cannot be handed from rank to rank"):
        receive(maker.address, "here")
    assert len(segments()) == 1
    for part in (mine, other):
        part.release()
        part.release()
        with pytest.raises(dlo.HostMemoryError, match="released"):
            _ = part.tensor
    assert segments() == set()
    assert set(os.listdir("/proc/self/fd")) == before


def test_where_pages_cannot_be_made_by_threads_the_system_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    original = os.posix_fallocate

    def fallocate(descriptor: int, start: int, nbytes: int) -> None:
        made.append((start, nbytes))
        original(descriptor, start, nbytes)

    monkeypatch.setattr(touch_module, "_system_madvise", lambda: lambda *_: errno.EINVAL)
    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    maker = SegmentMaker(9000)
    descriptor = maker.duplicate()
    parts = [Segment(descriptor, 9000, (part, 2)) for part in (0, 1)]
    os.close(descriptor)
    maker.close()
    assert made == [(0, 4096), (4096, 9000 - 4096)]
    for part in parts:
        part.release()


def test_another_user_is_not_handed_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    maker = SegmentMaker(5000)
    monkeypatch.setattr(segment_module, "_user_of", lambda peer: os.geteuid() + 1)
    with pytest.raises(dlo.HostMemoryError, match="another user"):
        receive(maker.address, "here")
    maker.close()


def test_a_system_without_anonymous_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(dlo.HostMemoryError, match="no anonymous shared memory"):
        SegmentMaker(5000)
    with pytest.raises(dlo.ConfigError, match="host='shared' cannot be had"):
        start(make_toy(2), PoisonBackend(0))


# --- who shares by a topology ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "sharing"),
    [
        ({"dp": 2, "tp": 2}, [(0, 2), (1, 3)]),
        ({"dp": 2, "sp": 2}, [(0, 1, 2, 3)]),
        pytest.param({"sp": 2, "tp": 2}, [(0, 2), (1, 3)], marks=pytest.mark.slow),
        pytest.param({"tp": 2}, [(0,), (1,)], marks=pytest.mark.slow),
    ],
)
def test_ranks_of_a_topology_that_have_the_same_weights_share(
    sizes: dict[str, int], sharing: list[tuple[int, ...]]
) -> None:
    """Over DP and SP; TP ranks hold different weights and never share. Twice, and updated."""

    def body(rank: int) -> tuple[int, int]:
        topology = made_topology(**sizes)
        model, fresh = (make_toy(N, seed=seed + topology.tp_rank) for seed in (0, 10))
        resident = twin(model)
        config = dlo.OffloadConfig(host="shared", use_allgather=False, load_timeout_s=20)
        offloaded = dlo.LayerwiseOffload(config, device=PoisonBackend(0), topology=topology)
        for _ in range(2):
            offloaded.enable(model)
            check(model, resident)
            (inode,) = segments()
            offloaded.update_weights(fresh.state_dict())
            check(model, fresh)
            offloaded.update_weights(resident.state_dict())
            check(model, resident)
            dist.barrier()
            offloaded.disable()
        return inode, offloaded.size

    rows = run_ranks(body, sum(map(len, sharing)))
    assert len({inode for inode, _ in rows}) == len(sharing)
    for ranks in sharing:
        assert len({rows[rank][0] for rank in ranks}) == 1
        assert {rows[rank][1] for rank in ranks} == {len(ranks)}


def test_ranks_with_parts_of_the_weights_never_share() -> None:
    """HSDP's by their topology, TP's in a group that was given; a rank that differs is told."""

    def body(rank: int) -> None:
        settings: dict[str, Any] = {"host": "shared", "use_allgather": False, **SHORT}
        topology = made_topology(hsdp=(1, 2))
        with pytest.raises(dlo.ConfigError, match="HSDP's ranks hold different shards"):
            dlo.offload(make_toy(2), device="cpu", topology=topology, **settings)
        with pytest.raises(dlo.ConfigError, match="managed by fully_shard, and each rank has its"):
            dlo.offload(
                make_dit(hsdp=topology.hsdp_mesh),
                device="cpu",
                group=dist.group.WORLD,
                **settings,
            )
        mesh = made_topology(tp=2).mesh
        assert mesh is not None
        model = make_dit(tp=mesh["tp"])
        with pytest.raises(dlo.ConfigError, match="over the ranks \\[0, 1\\], which each have a"):
            dlo.offload(model, device="cpu", group=dist.group.WORLD, **settings)
        # Not even where it would be a way out of too little memory.
        assert (
            dlo.offload(
                model, device="cpu", group=dist.group.WORLD, use_allgather=False
            ).footprint.shared_nbytes
            == 0
        )

    run_ranks(body, 2)
