"""Measure how fast a checkpoint is loaded, against the usual way and against a plain read.

Writes a checkpoint of about ``--gb`` gigabytes and loads it four ways, in turn, ``--runs`` times:

- ``offload``: ``dlo_core.offload()`` of a model on meta, from the call to its return;
- ``read``: only the reading in it, from the first byte to the last, into fresh memory;
- ``preadv``: a plain parallel ``preadv`` of the files' bytes into fresh memory, by as many threads;
- ``load_file``: ``safetensors.torch.load_file`` and ``load_state_dict`` into a model with values.

Once cold (the files are pushed out of the page cache before each way), then warm. The medians of
the warm runs count; the exit status is not zero when ``read`` is slower than 0.9 of ``preadv``::

    python benchmarks/load_rate.py --folder /tmp
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dlo_core as dlo
from dlo_core.reading import CALL_NBYTES, default_threads

if TYPE_CHECKING:
    from collections.abc import Callable

WIDTH = 2048
WANTED = 0.9


class Block(nn.Module):
    """The linear layers of a transformer's block, without its arithmetic."""

    def __init__(self) -> None:
        """Make them, in bfloat16."""
        super().__init__()
        for name, rows, columns in (
            ("qkv", 3 * WIDTH, WIDTH),
            ("out", WIDTH, WIDTH),
            ("up", 4 * WIDTH, WIDTH),
            ("down", WIDTH, 4 * WIDTH),
        ):
            self.add_module(name, nn.Linear(columns, rows, dtype=torch.bfloat16))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x."""
        return x


class Model(nn.Module):
    """Blocks between an embedder and a head."""

    dlo_blocks = ("blocks",)

    def __init__(self, num_blocks: int) -> None:
        """Make them."""
        super().__init__()
        self.embed = nn.Linear(64, WIDTH, dtype=torch.bfloat16)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 64, dtype=torch.bfloat16)


def on_meta(num_blocks: int) -> Model:
    """Return the model without values."""
    with torch.device("meta"):
        return Model(num_blocks).requires_grad_(False).eval()


def write(folder: Path, num_blocks: int) -> list[Path]:
    """Write a checkpoint of several files with an index, as Hugging Face writes them."""
    state = on_meta(num_blocks).state_dict()
    per_file = max(1, num_blocks // 4)
    groups: dict[int, list[str]] = {}
    for name in state:
        parts = name.split(".")
        number = int(parts[1]) // per_file if parts[0] == "blocks" else 0
        groups.setdefault(number, []).append(name)
    weight_map, files = {}, []
    noise = torch.randint(0, 255, (WIDTH * 4 * WIDTH * 2 + 64,), dtype=torch.uint8)
    for number, names in groups.items():
        path = folder / f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for count, name in enumerate(names):
            like = state[name]
            start = 2 * (count % 32)
            part = noise[start : start + like.nbytes].clone()
            tensors[name] = part.view(like.dtype).view(like.shape)
            weight_map[name] = path.name
        save_file(tensors, path)
        files.append(path)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return files


def push_out(files: list[Path]) -> None:
    """Let the system forget the files' pages."""
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def plain_preadv(files: list[Path], threads: int) -> float:
    """Read all bytes of the files into fresh memory and return the seconds."""
    start_s = time.perf_counter()
    sizes = [path.stat().st_size for path in files]
    memory = memoryview(mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    pieces, at = [], 0
    for descriptor, size in zip(descriptors, sizes, strict=True):
        for offset in range(0, size, CALL_NBYTES):
            nbytes = min(CALL_NBYTES, size - offset)
            pieces.append((descriptor, offset, memory[at : at + nbytes]))
            at += nbytes
    todo, lock = iter(pieces), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                piece = next(todo, None)
            if piece is None:
                return
            descriptor, offset, out = piece
            while out:
                got = os.preadv(descriptor, [out], offset)
                out, offset = out[got:], offset + got

    crew = [threading.Thread(target=work) for _ in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    seconds = time.perf_counter() - start_s
    for descriptor in descriptors:
        os.close(descriptor)
    return seconds


class Bench:
    """The four ways, on one checkpoint."""

    def __init__(self, folder: Path, num_blocks: int, threads: int) -> None:
        """Write the checkpoint."""
        self._folder, self._num_blocks, self._threads = folder, num_blocks, threads
        self.files = write(folder, num_blocks)
        self.nbytes = sum(path.stat().st_size for path in self.files)
        self._target: Model | None = None

    def offload(self) -> dict[str, float]:
        """Load by dlo and return the seconds of the whole and of the reading."""
        model = on_meta(self._num_blocks)
        marks: list[float] = []

        def listen(progress: dlo.LoadProgress) -> None:
            if progress.done_nbytes == progress.total_nbytes:
                marks.append(progress.seconds)

        start_s = time.perf_counter()
        offloaded = dlo.offload(
            model,
            device="cpu",
            checkpoint=self._folder,
            load_threads=self._threads,
            progress=listen,
        )
        seconds = time.perf_counter() - start_s
        offloaded.shutdown()
        return {"offload": seconds, "read": marks[-1]}

    def preadv(self) -> dict[str, float]:
        """Read plainly."""
        return {"preadv": plain_preadv(self.files, self._threads)}

    def load_file(self) -> dict[str, float]:
        """Load the usual way, into a model that has memory already."""
        model = Model(self._num_blocks)
        start_s = time.perf_counter()
        state: dict[str, torch.Tensor] = {}
        for path in self.files:
            state.update(load_file(path))
        model.load_state_dict(state)
        return {"load_file": time.perf_counter() - start_s}

    def turn(self, number: int, cold: bool = False) -> dict[str, float]:
        """Do each way once, beginning with another one each time."""
        ways: list[Callable[[], dict[str, float]]] = [self.offload, self.preadv, self.load_file]
        seconds: dict[str, float] = {}
        for index in range(len(ways)):
            if cold:
                push_out(self.files)
            seconds |= ways[(number + index) % len(ways)]()
        return seconds


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.2, help="size of the checkpoint")
    parser.add_argument("--folder", type=Path, help="where to write it; removed afterwards")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    num_blocks = max(4, round(asked.gb * 1e9 / (12 * WIDTH * WIDTH * 2)))
    folder = Path(tempfile.mkdtemp(prefix="load_rate_", dir=asked.folder))
    try:
        bench = Bench(folder, num_blocks, asked.threads)
        cold = bench.turn(0, cold=True)
        for path in bench.files:  # warm again
            path.read_bytes()
        turns = [bench.turn(number) for number in range(asked.runs)]
    finally:
        shutil.rmtree(folder)
    warm = {way: statistics.median(turn[way] for turn in turns) for way in turns[0]}
    rates = {way: bench.nbytes / seconds / 1e9 for way, seconds in warm.items()}
    result = {
        "nbytes": bench.nbytes,
        "threads": asked.threads,
        "runs": asked.runs,
        "warm_gb_s": rates,
        "cold_gb_s": {way: bench.nbytes / seconds / 1e9 for way, seconds in cold.items()},
        "read_to_preadv": rates["read"] / rates["preadv"],
        "offload_to_preadv": rates["offload"] / rates["preadv"],
    }
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{bench.nbytes / 1e9:.2f} GB, {asked.threads} threads, medians of {asked.runs} runs")
        for way, rate in rates.items():
            print(f"{way:>10}: {rate:6.2f} GB/s warm, {result['cold_gb_s'][way]:6.2f} cold")
        print(f"read / preadv: {result['read_to_preadv']:.2f} (at least {WANTED} is wanted)")
        print(f"offload / preadv: {result['offload_to_preadv']:.2f}")
    return 0 if result["read_to_preadv"] >= WANTED else 1


if __name__ == "__main__":
    raise SystemExit(main())
