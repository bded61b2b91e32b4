"""Reading: each rank reads its own bytes of a checkpoint once; a load that fails leaves nothing."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import Toy, WideBlock, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.layerwise import LayerwiseOffload
    from dlo_core.progress import LoadProgress

RANKS = 4
SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}


class HeavyBlock(nn.Module):
    """A block of 1 MiB and a few small tensors, whose run does not divide by four."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(rows, 8))
        self.small = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use all of it."""
        return x + self.weight.sum(0) / len(self.weight) + self.small.sum()


def heavy_toy() -> Toy:
    torch.manual_seed(3)
    blocks = [HeavyBlock(32_768), HeavyBlock(32_001), HeavyBlock(16_500), WideBlock()]
    return Toy(blocks).requires_grad_(False).eval()


def blocks_nbytes(model: Toy) -> int:
    sizes: list[int] = [tensor.nbytes for tensor in model.blocks.state_dict().values()]
    return sum(sizes)


def remainder_nbytes(model: Toy) -> int:
    sizes: list[int] = [tensor.nbytes for tensor in model.state_dict().values()]
    return sum(sizes) - blocks_nbytes(model)


def write(model: nn.Module, folder: Path) -> Path:
    """Write the model in two files, of which neither has whole blocks."""
    folder.mkdir()
    tensors = list(model.state_dict().items())
    save_file(dict(tensors[::2]), folder / "a.safetensors")
    save_file(dict(tensors[1::2]), folder / "b.safetensors")
    return folder


def start(model: nn.Module, path: Path, **more: Any) -> LayerwiseOffload:
    group = dist.group.WORLD if dist.is_initialized() else None
    return dlo.offload(
        model, device=CpuBackend(), group=group, checkpoint=path, **{**SHORT, **more}
    )


def checkpoint_of(offloaded: LayerwiseOffload) -> Checkpoint:
    assert offloaded.engine is not None
    checkpoint = offloaded.engine.plans[0].checkpoint
    assert checkpoint is not None
    return checkpoint


def read_by_process() -> int:
    """Return the bytes that this process asked the system for, from files and the like."""
    rows = dict(row.split(": ") for row in Path("/proc/self/io").read_text().splitlines())
    return int(rows["rchar"])


# --- how much is read -----------------------------------------------------------------------------


def test_each_rank_reads_a_quarter_and_each_byte_is_read_once(tmp_path: Path) -> None:
    resident = heavy_toy()
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> int:
        model = twin(resident)
        offloaded = start(model, path)
        read = checkpoint_of(offloaded).bytes_read
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank)), resident(inputs(rank)))
        # A pass reads nothing.
        assert checkpoint_of(offloaded).bytes_read == read
        offloaded.shutdown()
        return read

    whole, rest = blocks_nbytes(resident), remainder_nbytes(resident)
    assert rest < whole / 1000
    read = run_ranks(body, RANKS)
    # Spilled ends of shards change their owner (shard.py) and are read by nobody else.
    assert sum(read) == whole + RANKS * rest
    for nbytes in read:
        # Padding makes the last shard the lighter.
        assert abs((nbytes - rest) - whole / RANKS) < 0.01 * whole / RANKS


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_byte_is_read_once_by_any_number_of_ranks(num_ranks: int, tmp_path: Path) -> None:
    resident = make_toy(5)
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> int:
        offloaded = start(twin(resident), path)
        read = checkpoint_of(offloaded).bytes_read
        offloaded.shutdown()
        return read

    read = run_ranks(body, num_ranks)
    assert sum(read) == blocks_nbytes(resident) + num_ranks * remainder_nbytes(resident)


def test_in_rank_local_mode_each_rank_reads_all(tmp_path: Path) -> None:
    resident = heavy_toy()
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> int:
        offloaded = start(twin(resident), path, use_allgather=False)
        read = checkpoint_of(offloaded).bytes_read
        offloaded.shutdown()
        return read

    every = blocks_nbytes(resident) + remainder_nbytes(resident)
    assert run_ranks(body, 2) == [every] * 2


def test_the_system_counts_a_quarter_too(tmp_path: Path) -> None:
    resident = heavy_toy()
    path = write(resident, tmp_path / "stored")
    # Lengths of the two headers, and what the ranks tell each other.
    allowance = 64 << 10

    def body(rank: int) -> tuple[int, int]:
        marks: list[int] = []
        told: list[LoadProgress] = []

        def listen(progress: LoadProgress) -> None:
            told.append(progress)
            if progress.done_nbytes == progress.total_nbytes:
                marks.append(read_by_process())

        before = read_by_process()
        offloaded = start(twin(resident), path, progress=listen)
        offloaded.shutdown()
        return marks[0] - before, told[-1].total_nbytes

    for asked, shard in run_ranks(body, RANKS):
        assert shard <= asked <= shard + allowance
        assert asked < 1.05 * blocks_nbytes(resident) / RANKS


def test_from_memory_nothing_is_read() -> None:
    def body(rank: int) -> int:
        model = heavy_toy()
        marks: list[int] = []
        before = read_by_process()
        offloaded = dlo.offload(
            model,
            device=CpuBackend(),
            group=dist.group.WORLD,
            progress=lambda _: marks.append(read_by_process()),
            **SHORT,
        )
        offloaded.shutdown()
        return marks[-1] - before

    assert max(run_ranks(body, 2)) < 64 << 10


# --- a load that fails ----------------------------------------------------------------------------


class Untouched:
    """A model and what the process holds, before a load that must fail."""

    def __init__(self, model: Toy) -> None:
        """Note everything."""
        self.model = model
        self._before = snapshot(model)
        self._held = self._count()

    @staticmethod
    def _count() -> tuple[int, int, int]:
        gc.collect()
        groups = len(dist.distributed_c10d._world.pg_map) if dist.is_initialized() else 0
        return CpuBackend().memory().allocated, groups, len(os.listdir("/proc/self/fd"))

    def check(self) -> None:
        """Check that the model is as it was and nothing is held."""
        assert_restored(self.model, self._before)
        with torch.no_grad():
            assert torch.equal(self.model(inputs()), twin(self.model)(inputs()))
        # Threads and sockets of a group end a little after it.
        deadline = time.monotonic() + 5.0
        while self._count() > self._held and time.monotonic() < deadline:
            time.sleep(0.02)
        now = self._count()
        assert now[:2] == self._held[:2]
        assert now[2] <= self._held[2]


def fails(
    rank: int, path: Path, error: type[BaseException] = dlo.CheckpointError, **more: Any
) -> str:
    """Let a load fail twice on this rank and return the message; once to warm up, once to count."""
    model = make_toy(4)
    with pytest.raises(error):
        start(model, path, **more)
    untouched = Untouched(model)
    with pytest.raises(error) as caught:
        start(model, path, **more)
    text = str(caught.value)
    # The error's traceback holds the frames of the load.
    del caught
    untouched.check()
    return text


def drop_tail(folder: Path) -> None:
    file = folder / "b.safetensors"
    os.truncate(file, file.stat().st_size - 10)


def drop_half_the_header(folder: Path) -> None:
    os.truncate(folder / "b.safetensors", 100)


def empty(folder: Path) -> None:
    os.truncate(folder / "b.safetensors", 0)


@pytest.mark.parametrize("damage", [drop_tail, drop_half_the_header, empty])
@pytest.mark.parametrize("gathers", [True, False])
def test_a_truncated_file_is_refused_on_every_rank(
    damage: Callable[[Path], None], gathers: bool, tmp_path: Path
) -> None:
    path = write(make_toy(4), tmp_path / "stored")
    damage(path)
    for text in run_ranks(lambda rank: fails(rank, path, use_allgather=gathers), 2):
        assert str(path / "b.safetensors") in text


def test_a_truncated_file_is_refused_naming_the_key_that_is_cut(tmp_path: Path) -> None:
    path = write(make_toy(4), tmp_path / "stored")
    drop_tail(path)
    # The file's last tensor.
    for text in run_ranks(lambda rank: fails(rank, path), 2):
        assert any(repr(key) in text for key in make_toy(4).state_dict())


def test_a_file_damaged_on_one_rank_alone_is_refused_on_every_rank(tmp_path: Path) -> None:
    whole = write(make_toy(4), tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut)
    drop_tail(cut)
    texts = run_ranks(lambda rank: fails(rank, cut if rank == 2 else whole), RANKS)
    for rank, text in enumerate(texts):
        assert str(cut / "b.safetensors") in text
        assert rank == 2 or "rank 2" in text


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_a_missing_file_is_refused_on_every_rank(missing: str, tmp_path: Path) -> None:
    path = write(make_toy(4), tmp_path / "stored")
    if missing == "folder":
        path = tmp_path / "nowhere"
    else:
        (path / "b.safetensors").unlink()
    # Without its second file the folder is a checkpoint that lacks keys.
    wanted = str(path) if missing == "folder" else "blocks.0.norm.bias"
    for text in run_ranks(lambda rank: fails(rank, path), 2):
        assert str(path) in text
        assert wanted in text


def test_a_missing_file_of_an_index_is_named_with_a_key(tmp_path: Path) -> None:
    path = write(make_toy(4), tmp_path / "stored")
    index = path / "model.safetensors.index.json"
    keys = list(make_toy(4).state_dict())
    rows = [f'"{k}": "{"ab"[n % 2]}.safetensors"' for n, k in enumerate(keys)]
    index.write_text(f'{{"weight_map": {{{", ".join(rows)}}}}}')
    (path / "b.safetensors").unlink()
    for text in run_ranks(lambda rank: fails(rank, index), 2):
        assert str(index) in text
        assert "b.safetensors" in text
        assert keys[1] in text


def test_a_file_cut_while_it_is_read_is_refused_on_every_rank(tmp_path: Path) -> None:
    """The headers were whole; the votes after the reading see to it that all ranks refuse."""
    resident = heavy_toy()
    paths = [write(resident, tmp_path / f"stored-{rank}") for rank in range(2)]

    def body(rank: int) -> str:
        def cut(progress: LoadProgress) -> None:
            if rank == 1:
                for file in paths[1].iterdir():
                    os.truncate(file, file.stat().st_size // 2)

        model = twin(resident)
        assert isinstance(model, Toy)
        untouched = Untouched(model)
        with pytest.raises(dlo.CheckpointError) as caught:
            start(model, paths[rank], progress=cut)
        text = str(caught.value)
        del caught
        untouched.check()
        return text

    for text in run_ranks(body, 2):
        assert str(paths[1]) in text
        assert "blocks." in text
        assert "truncated" in text or "was written to" in text


def test_a_lone_process_refuses_alike(tmp_path: Path) -> None:
    path = write(make_toy(4), tmp_path / "stored")
    drop_tail(path)
    assert str(path / "b.safetensors") in fails(0, path)


# --- progress -------------------------------------------------------------------------------------


def test_progress_grows_to_the_total_on_every_rank(tmp_path: Path) -> None:
    resident = heavy_toy()
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> int:
        told: list[LoadProgress] = []
        offloaded = start(twin(resident), path, progress=told.append)
        offloaded.shutdown()
        done = [progress.done_nbytes for progress in told]
        assert done == sorted(set(done))
        assert len({progress.total_nbytes for progress in told}) == 1
        assert done[-1] == told[-1].total_nbytes
        assert all(a.seconds <= b.seconds for a, b in itertools.pairwise(told))
        assert told[-1].rate_gb_s >= 0
        return done[-1]

    rest = remainder_nbytes(resident)
    assert sum(run_ranks(body, RANKS)) == blocks_nbytes(resident) + RANKS * rest


class CancelledError(Exception):
    """Raised by a caller's callback."""


@pytest.mark.parametrize("gathers", [True, False])
def test_an_exception_of_one_ranks_callback_cancels_on_all(gathers: bool, tmp_path: Path) -> None:
    path = write(make_toy(4), tmp_path / "stored")

    def body(rank: int) -> str:
        def listen(progress: LoadProgress) -> None:
            if rank == 1:
                raise CancelledError("the user pressed stop")

        expected = CancelledError if rank == 1 else dlo.AgreementError
        return fails(rank, path, expected, progress=listen, use_allgather=gathers)

    for rank, text in enumerate(run_ranks(body, 3)):
        assert "the user pressed stop" in text
        assert rank == 1 or "rank 1" in text


def test_after_a_cancelled_load_the_next_one_works(tmp_path: Path) -> None:
    resident = make_toy(4)
    path = write(resident, tmp_path / "stored")

    def body(rank: int) -> None:
        def listen(progress: LoadProgress) -> None:
            raise CancelledError

        model = twin(resident)
        with pytest.raises(CancelledError):
            start(model, path, progress=listen)
        offloaded = start(model, path)
        with torch.inference_mode():
            assert torch.equal(model(inputs(rank)), resident(inputs(rank)))
        offloaded.disable()

    run_ranks(body, 2)
