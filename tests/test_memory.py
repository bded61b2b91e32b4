"""Memory: what an offload takes on the device and on the host, measured, until it is given back."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import mmap
import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn
from toys import AwkwardBlock, Block, Toy, WideBlock, inputs, make_toy

import dlo_core as dlo
from dlo_core.cpu import CpuBackend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dlo_core.layerwise import LayerwiseOffload

ALIGNMENT = 256
TRAILER = 16
SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def unequal_toy() -> Toy:
    """Return a toy whose blocks differ in size a hundredfold."""
    torch.manual_seed(0)
    blocks = [AwkwardBlock(seed=1), WideBlock(), Block(), WideBlock(), AwkwardBlock(seed=2)]
    return Toy(blocks).requires_grad_(False).eval()


def streamed_by_block(model: Toy) -> list[list[int]]:
    """Return the bytes of every streamed tensor by block, by the rule and not by the engine."""
    return [
        [t.nbytes for t in {id(p): p for p in block.parameters()}.values()]
        + [b.nbytes for b in block.buffers() if b.nbytes > 1 << 20]
        for block in model.blocks
    ]


def resident_nbytes(model: Toy) -> int:
    """Return the bytes of the rest, each tensor aligned."""
    inside = {id(p) for block in model.blocks for p in block.parameters()}
    inside |= {id(b) for block in model.blocks for b in block.buffers() if b.nbytes > 1 << 20}
    tensors = [*model.parameters(), *model.buffers()]
    return sum(align(t.nbytes) for t in tensors if id(t) not in inside)


def padded(run: int, size: int) -> int:
    """Return what a block takes in a slot: equal aligned shards, each with a trailer."""
    return size * max(align(-(-run // size) + TRAILER), align(TRAILER * size)) if size > 1 else run


def check_bytes(rank: int, *, gathers: bool, depth: int, stages: int) -> None:
    model = unequal_toy()
    size = dist.get_world_size() if gathers else 1
    tensors = streamed_by_block(model)
    runs = [sum(map(align, block)) for block in tensors]
    largest = max(padded(run, size) for run in runs)
    rest = resident_nbytes(model)
    backend = CpuBackend()
    # What earlier tests left in cycles must not go away meanwhile.
    gc.collect()
    before = backend.memory().allocated
    offloaded = dlo.offload(
        model,
        device=backend,
        group=dist.group.WORLD,
        use_allgather=gathers,
        depth=depth,
        stages=stages,
        **SHORT,
    )
    predicted, stats = offloaded.footprint, offloaded.stats()

    bound = depth * largest + (stages * largest // size if size > 1 else 0) + rest
    # The trailers that are expected lie on the device too; they are no weights.
    trailers = TRAILER * size * len(runs) if size > 1 else 0
    assert predicted.trailers_nbytes == trailers
    assert predicted.device_nbytes == stats.device_bytes <= bound + trailers
    allocated: set[int] = set()
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda *_: allocated.add(backend.memory().allocated - before)
        )
    with torch.inference_mode():
        for number in range(2):
            model(inputs(rank + number))
    assert allocated == {predicted.device_nbytes}

    weights = sum(map(sum, tensors))
    slack = ALIGNMENT * sum(map(len, tensors)) + (ALIGNMENT + TRAILER * size) * len(runs)
    assert predicted.host_nbytes == stats.host_bytes <= 1.01 * weights / size + slack
    assert stats.host_bytes >= weights / size
    assert stats.pinned_bytes == 0
    offloaded.shutdown()
    # A fill that was under way keeps its slot until it is done.
    assert eventually(lambda: backend.memory().allocated == before)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_device_and_host_bytes_are_as_predicted_and_within_bounds(ranks: int) -> None:
    def body(rank: int) -> None:
        for gathers, depth, stages in itertools.product((True, False), (2, 3), (2, 0)):
            try:
                check_bytes(rank, gathers=gathers, depth=depth, stages=stages)
            except AssertionError as error:
                where = f"gathers={gathers}, depth={depth}, stages={stages}"
                raise AssertionError(f"{where}: {error}") from error

    run_ranks(body, ranks)


def test_fewer_blocks_than_depth_take_no_more_slots_than_blocks() -> None:
    model = make_toy(2)
    offloaded = dlo.offload(model, device=CpuBackend(), depth=4)
    sizes = [sum(map(align, block)) for block in streamed_by_block(make_toy(2))]
    assert offloaded.footprint.slots_nbytes == 2 * max(sizes)
    offloaded.disable()


# --- everything is given back ---------------------------------------------------------------------


def workers() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("dlo-")]


def eventually(condition: Callable[[], bool]) -> bool:
    """Wait for what another thread does when it is told to stop."""
    deadline = time.monotonic() + 5.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def held() -> tuple[int, int]:
    """Return the device bytes and the process groups of this process."""
    gc.collect()
    groups = len(dist.distributed_c10d._world.pg_map)
    return CpuBackend().memory().allocated, groups


def disable(models: list[Toy], offloads: list[LayerwiseOffload]) -> None:
    offloads.pop().disable()


def shut_down(models: list[Toy], offloads: list[LayerwiseOffload]) -> None:
    offloads.pop().shutdown()


def forget(models: list[Toy], offloads: list[LayerwiseOffload]) -> None:
    models.clear()
    offloads.clear()


WAYS_OUT = (disable, shut_down, forget)


def assert_all_comes_back(rank: int, gathers: bool) -> None:
    for end in WAYS_OUT:
        before = held()
        models = [make_toy(4)]
        offloads = [
            dlo.offload(
                models[0],
                device=CpuBackend(),
                group=dist.group.WORLD,
                use_allgather=gathers,
                **SHORT,
            )
        ]
        with torch.inference_mode():
            models[0](inputs(rank))
        engine = offloads[0].engine
        assert engine is not None
        slab = engine.store.slab.data_ptr()
        del engine
        assert mapping_of(slab) is not None
        end(models, offloads)
        assert eventually(lambda: held() == before), end.__name__  # noqa: B023 - called here
        assert mapping_of(slab) is None, end.__name__
        # After shutdown() the model stays and raises; idle workers end with it.
        models.clear()
        gc.collect()
        assert eventually(lambda: not workers()), end.__name__


def test_a_lone_process_gets_all_memory_back() -> None:
    run_ranks(lambda rank: assert_all_comes_back(rank, False), 1)


@pytest.mark.parametrize("gathers", [True, False])
def test_ranks_get_all_memory_back(gathers: bool) -> None:
    run_ranks(lambda rank: assert_all_comes_back(rank, gathers), 2)


def test_many_rounds_leave_no_files_open() -> None:
    def body(rank: int) -> list[int]:
        counts = []
        for number in range(4):
            model = make_toy(3, seed=number)
            dlo.offload(
                model, device=CpuBackend(), group=dist.group.WORLD, use_allgather=True, **SHORT
            ).disable()
            gc.collect()
            counts.append(open_files())
        return counts

    for counts in run_ranks(body, 2):
        assert max(counts) == counts[0]


# --- what the system says -------------------------------------------------------------------------


def mapping_of(address: int) -> dict[str, int] | None:
    """Return the mapping that holds ``address``: its start, and the rows of smaps in bytes."""
    found: dict[str, int] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if "-" in head and ":" not in head:
            if found is not None:
                break
            start, stop = (int(part, 16) for part in head.split("-"))
            found = {"start": start} if start <= address < stop else None
        elif found is not None and rest.strip().endswith("kB"):
            found[head.rstrip(":")] = int(rest.split()[0]) * 1024
    return found


def proportional_nbytes() -> int:
    """Return this process's share of the memory that it maps."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return next(int(row.split()[1]) * 1024 for row in text.splitlines() if row.startswith("Pss:"))


@pytest.mark.parametrize("gathers", [True, False])
def test_the_slab_is_a_mapping_of_exactly_the_shards_pages(gathers: bool) -> None:
    def body(rank: int) -> None:
        model = unequal_toy()
        offloaded = dlo.offload(
            model, device=CpuBackend(), group=dist.group.WORLD, use_allgather=gathers, **SHORT
        )
        assert offloaded.engine is not None
        slab = offloaded.engine.store.slab
        mapping = mapping_of(slab.data_ptr())
        assert mapping is not None
        pages = -(-offloaded.stats().host_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        assert mapping["start"] == slab.data_ptr()
        assert mapping["Size"] == pages
        assert mapping["Rss"] <= pages
        offloaded.shutdown()

    run_ranks(body, 2)


class Rows(nn.Module):
    """A block of much weight and little work."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, 1024, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use a few of the rows."""
        return x + self.weight[:: max(1, len(self.weight) // 8)].sum(0)


class Tower(nn.Module):
    """Equal blocks of a given size and a small head."""

    def __init__(self, num_blocks: int, rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rows(rows) for _ in range(num_blocks))
        self.head = nn.Linear(1024, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def tower_on_meta(num_blocks: int, rows: int) -> Tower:
    with torch.device("meta"):
        return Tower(num_blocks, rows).requires_grad_(False).eval()


def write_tower(path: Path, num_blocks: int, rows: int) -> None:
    """Write a checkpoint one block at a time, with one block's memory."""
    header: dict[str, Any] = {}
    end = 0
    tensors = tower_on_meta(num_blocks, rows).state_dict()
    for name, tensor in tensors.items():
        span = [end, end + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": span}
        end += tensor.nbytes
    head = json.dumps(header).encode()
    values = torch.arange(rows * 1024 * 2, dtype=torch.int32).to(torch.uint8)
    # Finite bfloat16 whatever the other byte is.
    values[1::2] = 0x3F
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(bytes(values[: tensor.nbytes].numpy()))


def measure(rank: int, path: Path, num_blocks: int, rows: int, gathers: bool) -> dict[str, int]:
    """Offload a tower from its checkpoint, run it, and return what it took, in bytes."""
    model = tower_on_meta(num_blocks, rows)
    backend = CpuBackend()
    # What the first use of everything costs belongs to the baseline.
    warm_up(rank)
    settle()
    dist.barrier()
    allocated, before = backend.memory().allocated, proportional_nbytes()
    offloaded = dlo.offload(
        model,
        device=backend,
        group=dist.group.WORLD,
        checkpoint=path,
        use_allgather=gathers,
        **SHORT,
    )
    with torch.inference_mode():
        for _ in range(2):
            model(torch.zeros(1, 1024, dtype=torch.bfloat16))
    backend.synchronize()
    settle()
    # Nobody ends, and so changes the others' shares, before all have measured.
    dist.barrier()
    taken = proportional_nbytes() - before
    dist.barrier()
    device = backend.memory().allocated - allocated
    stats = offloaded.stats()
    offloaded.shutdown()
    weights = num_blocks * rows * 1024 * 2
    return {"taken": taken, "device": device, "host": stats.host_bytes, "weights": weights}


def settle() -> None:
    """Give memory back to the system that is free already: what gloo needed for a gather."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def warm_up(rank: int) -> None:
    model = make_toy(3)
    offloaded = dlo.offload(model, device=CpuBackend(), group=dist.group.WORLD, **SHORT)
    with torch.inference_mode():
        model(inputs(rank))
    offloaded.shutdown()


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 24 blocks of 90 MB: 2.16 GB."""
    path = tmp_path_factory.mktemp("large") / "model.safetensors"
    write_tower(path, 24, 43_946)
    assert path.stat().st_size > 2 << 30
    yield path
    path.unlink()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("gathers", [True, False])
def test_a_process_takes_no_more_than_shards_and_slots(
    gathers: bool, large_checkpoint: Path
) -> None:
    for row in run_ranks(
        measure, 2, large_checkpoint, 24, 43_946, gathers, limit_s=150.0, timeout_s=60.0
    ):
        on_host = row["taken"] - row["device"]
        assert 0.95 * row["host"] <= on_host <= 1.05 * row["host"], row
        assert row["host"] <= 1.01 * row["weights"] / (2 if gathers else 1)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_small_process_holds_no_second_copy(gathers: bool, tmp_path: Path) -> None:
    """As above with 6 blocks of 40 MB; what else a process does weighs more there.

    Smaller blocks would measure the C library, which keeps what gloo frees of up to 32 MB.
    """
    path = tmp_path / "model.safetensors"
    write_tower(path, 6, 20_000)
    for row in run_ranks(measure, 2, path, 6, 20_000, gathers):
        on_host = row["taken"] - row["device"]
        assert 0.95 * row["host"] <= on_host <= 1.05 * row["host"] + (12 << 20), row
        assert row["host"] <= 1.01 * row["weights"] / (2 if gathers else 1)
