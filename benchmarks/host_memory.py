"""Measure the host memory that an offload takes, by mode and tier, as the system counts it.

Writes a checkpoint, starts ranks over gloo, and samples the sum of their proportional set sizes
(PSS: what a process maps, shared pages divided among those who map them) from before ``offload()``
until some forwards are done. The peak, less what there was before and less what counts as device
memory, is divided by the checkpoint's size. On the CPU backend nothing is page-locked.

    python benchmarks/host_memory.py                    # 2.16 GB, 4 ranks; needs 4.5 times that
    python benchmarks/host_memory.py --rows 4000 --json
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

import dlo_core as dlo
from dlo_core.cpu import CpuBackend
from dlo_core.testing.ranks import run_ranks

WIDTH = 1024
PASSES = 2
LIMIT_S = 500.0

CASES: dict[str, dict[str, Any]] = {
    "naive: load_file and load_state_dict": {},
    "rank-local, pageable": {"use_allgather": False, "host": "pageable"},
    "rank-local, shared": {"use_allgather": False, "host": "shared"},
    "rank-local, mapped": {"use_allgather": False, "host": "mapped"},
    "gather": {"use_allgather": True},
    "gather, mapped": {"use_allgather": True, "host": "mapped"},
}


@dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
        case: Its name.
        peak: Peak of the summed PSS during and after loading, over the checkpoint's size.
        after: The same when all is loaded and some forwards are done.
        disk: Bytes read from the disk by all ranks, over the checkpoint's size; the file was not
            in the page cache.
        asked: Bytes that all ranks asked the system for, over the same.
        accounted: What all ranks' ``stats().host_bytes`` add up to, shared memory once.
        load_s: Seconds from ``offload()`` to its return on the slowest rank.
    """

    case: str
    peak: float
    after: float
    disk: float
    asked: float
    accounted: float
    load_s: float


class Rows(nn.Module):
    """A block of much weight and little work."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use a few of the rows."""
        return x + self.weight[:: max(1, len(self.weight) // 8)].sum(0)


class Tower(nn.Module):
    """Equal blocks and a small head."""

    dlo_blocks = ("blocks",)

    def __init__(self, blocks: int, rows: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Rows(rows) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def build(blocks: int, rows: int) -> Tower:
    """Return the model without values."""
    with torch.device("meta"):
        return Tower(blocks, rows).requires_grad_(False).eval()


def write(path: Path, blocks: int, rows: int) -> None:
    """Write a checkpoint, one block at a time."""
    header: dict[str, Any] = {}
    end = 0
    tensors = build(blocks, rows).state_dict()
    for name, tensor in tensors.items():
        span = [end, end + tensor.nbytes]
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": span}
        end += tensor.nbytes
    head = json.dumps(header).encode()
    values = torch.arange(rows * WIDTH * 2, dtype=torch.int32).to(torch.uint8)
    values[1::2] = 0x3F
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for tensor in tensors.values():
            file.write(values[: tensor.nbytes].numpy().data)
        file.flush()
        os.fsync(file.fileno())


# --- one rank -------------------------------------------------------------------------------------


class CountedBackend(CpuBackend):
    """Tells the process that measures how many bytes are device memory."""

    def __init__(self, board: mmap.mmap, rank: int) -> None:
        super().__init__()
        self._told = memoryview(board).cast("q")
        self._rank = rank

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return device memory, counted and really there."""
        made = super().empty(nbytes).fill_(0)
        self._told[self._rank] = self.memory().allocated
        return made


def work(rank: int, folder: Path, case: str, blocks: int, rows: int) -> dict[str, float]:
    """Do what the case says, and report."""
    checkpoint = folder / "model.safetensors"
    with (folder / "board").open("r+b") as file:
        board = mmap.mmap(file.fileno(), 0)
    backend = CountedBackend(board, rank)
    warm_up(backend)
    model = build(blocks, rows)
    before = counters()
    meet(rank, folder, "ready")
    began = time.perf_counter()
    if CASES[case]:
        offloaded: Any = dlo.offload(
            model, device=backend, group=dist.group.WORLD, checkpoint=checkpoint, **CASES[case]
        )
    else:
        from safetensors.torch import load_file

        # As it is usually done: real memory, then the values.
        model = model.to_empty(device="cpu")
        model.load_state_dict(load_file(checkpoint))
        offloaded = None
    load_s = time.perf_counter() - began
    with torch.inference_mode():
        for _ in range(PASSES):
            model(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    backend.synchronize()
    after = counters()
    settle()
    meet(rank, folder, "loaded")
    stats = offloaded.stats() if offloaded is not None else None
    weights = sum(tensor.nbytes for tensor in model.state_dict().values()) if stats is None else 0
    dist.barrier()
    if offloaded is not None:
        offloaded.shutdown()
    return {
        "load_s": load_s,
        "disk": after["read_bytes"] - before["read_bytes"],
        "asked": after["rchar"] - before["rchar"],
        "private": weights if stats is None else stats.host_bytes - stats.shared_bytes,
        "shared": 0 if stats is None else stats.shared_bytes,
    }


def warm_up(backend: CpuBackend) -> None:
    """Pay for what the first use of everything costs."""
    model = Tower(3, 16).requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.zero_()
    with dlo.offload(model, device=backend, group=dist.group.WORLD), torch.inference_mode():
        model(torch.zeros(1, WIDTH, dtype=torch.bfloat16))
    settle()


def settle() -> None:
    """Give memory back to the system that is free already."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def counters() -> dict[str, int]:
    """Return what this process has read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def meet(rank: int, folder: Path, moment: str) -> None:
    """Tell the process that measures that all ranks are there; go on when it has looked."""
    dist.barrier()
    if rank == 0:
        (folder / moment).touch()
    while not (folder / f"{moment}.seen").exists():
        time.sleep(0.01)
    dist.barrier()


# --- the process that measures --------------------------------------------------------------------


def measure(folder: Path, case: str, *, blocks: int, rows: int, ranks: int) -> Row:
    """Run one case in processes of its own and watch them."""
    checkpoint = folder / "model.safetensors"
    nbytes = checkpoint.stat().st_size
    for name in ("ready", "ready.seen", "loaded", "loaded.seen"):
        (folder / name).unlink(missing_ok=True)
    (folder / "board").write_bytes(bytes(8 * ranks))
    forget(checkpoint)
    command = [sys.executable, __file__, "--work", case, "--folder", str(folder)]
    command += ["--blocks", str(blocks), "--rows", str(rows), "--ranks", str(ranks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as job:
        with (folder / "board").open("r+b") as file, mmap.mmap(file.fileno(), 0) as board:
            peak, after = watch(job, folder, board)
        assert job.stdout is not None
        told = job.stdout.read()
    if job.returncode:
        raise SystemExit(f"{case}: the ranks failed")
    rows_ = json.loads(told.splitlines()[-1])
    taken = sum(row["private"] for row in rows_) + max(row["shared"] for row in rows_)
    return Row(
        case,
        peak=peak / nbytes,
        after=after / nbytes,
        disk=sum(row["disk"] for row in rows_) / nbytes,
        asked=sum(row["asked"] for row in rows_) / nbytes,
        accounted=taken / nbytes,
        load_s=max(row["load_s"] for row in rows_),
    )


def watch(job: subprocess.Popen[str], folder: Path, board: mmap.mmap) -> tuple[int, int]:
    """Return the peak and the last of the ranks' memory, less what there was at first."""
    count = len(board) // 8

    def now() -> int:
        """Return the ranks' memory, without what is device memory."""
        ranks = psutil.Process(job.pid).children(recursive=True)
        # Halted, or a page that one rank maps between two looks would count twice.
        try:
            for rank in ranks:
                rank.suspend()
            device: int = sum(struct.unpack(f"{count}q", board[:]))
            return sum(proportional(rank) for rank in ranks) - device
        finally:
            for rank in ranks:
                with contextlib.suppress(psutil.NoSuchProcess):
                    rank.resume()

    baseline, peak = 0, 0
    while job.poll() is None:
        if (folder / "ready").exists() and not (folder / "ready.seen").exists():
            baseline = now()
            (folder / "ready.seen").touch()
        elif (folder / "loaded").exists():
            after = now() - baseline
            (folder / "loaded.seen").touch()
            return max(peak, after), after
        elif (folder / "ready.seen").exists():
            peak = max(peak, now() - baseline)
        time.sleep(0.005)
    return peak, 0


def proportional(process: psutil.Process) -> int:
    """Return the PSS of a process; nothing when it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def forget(path: Path) -> None:
    """Have the system drop the file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def main() -> None:
    """Measure every case and print a table, or be the ranks of one case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--rows", type=int, default=26_368, help="of a block; 2048 bytes each")
    parser.add_argument("--case", action="append", choices=CASES, help="all by default")
    parser.add_argument("--folder", help="for the checkpoint, which is deleted at the end")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = {"blocks": given.blocks, "rows": given.rows}
    if given.work:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore", dlo.DloWarning)
        arguments = (Path(given.folder), given.work, given.blocks, given.rows)
        told = run_ranks(work, given.ranks, *arguments, limit_s=LIMIT_S, timeout_s=300.0)
        print(json.dumps(told))
        return
    with tempfile.TemporaryDirectory(prefix="dlo-host-memory-", dir=given.folder) as name:
        folder = Path(name)
        write(folder / "model.safetensors", given.blocks, given.rows)
        rows = []
        for case in given.case or CASES:
            rows.append(measure(folder, case, ranks=given.ranks, **sizes))
            if not given.json:
                print(rows[-1], file=sys.stderr)
        nbytes = (folder / "model.safetensors").stat().st_size
    if given.json:
        print(json.dumps({"checkpoint_nbytes": nbytes, "rows": [asdict(row) for row in rows]}))
        return
    print(f"checkpoint {nbytes / 1e9:.2f} GB, {given.ranks} ranks; all but seconds in checkpoints")
    print("| case | peak | after | accounted | read from disk | asked for | load, s |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row.case} | {row.peak:.3f} | {row.after:.3f} | {row.accounted:.3f} | "
            f"{row.disk:.3f} | {row.asked:.3f} | {row.load_s:.1f} |"
        )


if __name__ == "__main__":
    main()
