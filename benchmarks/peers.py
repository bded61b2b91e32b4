#!/usr/bin/env python3
"""Side by side: dlo and the other ways to offload that a user can install, on one device.

Every contender gets the same weights and the same inputs in a process of its own, and the output of
every pass is compared bit for bit with that of the resident run. A peer that is not installed is
left out and said so. See README.md beside this file.

    python benchmarks/peers.py --out results                    on a GPU, about 30 s a contender
    python benchmarks/peers.py --out results --resume           what is not in results yet
    python benchmarks/peers.py --device cpu --small --out here  a minute, to see that it works
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkout import use_checkout
from child import answer, machine, run_child
from contenders import CONTENDERS, NotInstalled, Setting, host_used_gb, why_absent
from grown import grow
from peers_report import compare, plot, summary, table

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from dlo_core.bench.model import Shape

use_checkout()

_GB = 1e9


# --- one contender, in its process ----------------------------------------------------------------


def run_contender(options: argparse.Namespace) -> None:
    """Measure one contender and hand the figures over, length by length."""
    import torch

    from dlo_core.bench.model import build

    if options.small:
        torch.set_num_threads(1)
    setting = Setting(options.device, shape_of(options))
    model = build(setting.shape)
    if not setting.on_cpu:
        torch.zeros(1, device=setting.device)
        setting.synchronize()
    found: dict[str, Any] = {"runs": {}}
    setting.restart()
    try:
        with torch.no_grad():
            call, facts = CONTENDERS[options.run](model, setting)
    except NotInstalled as error:
        answer(options.answer, {"skipped": str(error)})
        return
    setting.synchronize()
    found["setup_s"] = round(time.perf_counter() - setting.start, 2)
    if options.run == "resident":
        found |= link_facts(model, setting)
    for tokens in options.lengths:
        passes = 2 if "accelerate" in options.run and not options.small else options.passes
        found["runs"][str(tokens)] = measure(call, setting, tokens, passes)
        found |= memory_facts(setting) | facts()
        answer(options.answer, found)
        print(tokens, found["runs"][str(tokens)], flush=True)
    answer(options.answer, found | {"complete": True})
    sys.stdout.flush()
    # A peer's own clean-up at exit is not what is measured, and one of them hangs in it.
    import os

    os._exit(0)


def link_facts(model: nn.Module, setting: Setting) -> dict[str, Any]:
    """Return the bytes of all blocks, and the rate of the link for a copy of one."""
    from dlo_core.bench.probe import link_rate
    from dlo_core.registry import get_backend

    blocks: Any = model.blocks
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    backend = get_backend(str(setting.device))
    buffer = backend.allocator.allocate(max(sizes))
    buffer.tensor.fill_(1)
    rate = link_rate(backend, buffer.tensor)
    buffer.release()
    if not setting.on_cpu:
        import torch

        torch.accelerator.empty_cache()
    return {"blocks_gb": sum(sizes) / _GB, "link_gb_s": round(rate, 2)}


def measure(call: Callable[..., Any], setting: Setting, tokens: int, passes: int) -> dict[str, Any]:
    """Time passes that follow each other with no wait of the host between."""
    import torch

    from dlo_core.bench.model import inputs

    args = inputs(setting.shape, tokens, setting.device)
    with torch.no_grad():
        outputs = [call(*args) for _ in range(2)]
        setting.synchronize()
        if not setting.on_cpu:
            torch.cuda.reset_peak_memory_stats()
        marks, host = [mark(setting)], []
        for _ in range(passes):
            start = time.perf_counter()
            outputs.append(call(*args))
            host.append((time.perf_counter() - start) * 1e3)
            marks.append(mark(setting))
        setting.synchronize()
    steps = [between_ms(a, b) for a, b in pairwise(marks)]
    found = {
        "step_ms": round(statistics.median(steps), 3),
        "steps_ms": [round(ms, 3) for ms in steps],
        "host_ms": round(statistics.median(host), 3),
        "digests": sorted({digest(output) for output in outputs}),
    }
    if not setting.on_cpu:
        found["allocated_gb"] = round(torch.cuda.max_memory_allocated() / _GB, 3)
        found["reserved_gb"] = round(torch.cuda.max_memory_reserved() / _GB, 3)
    return found


def mark(setting: Setting) -> Any:
    """Return the point in time at which the work queued so far is done."""
    import torch

    if setting.on_cpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between_ms(start: Any, end: Any) -> float:
    """Return the milliseconds between two marks."""
    return (end - start) * 1e3 if isinstance(start, float) else float(start.elapsed_time(end))


def digest(output: torch.Tensor) -> str:
    """Return a sha256 of the output's bytes."""
    import hashlib

    import torch

    return hashlib.sha256(output.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def memory_facts(setting: Setting) -> dict[str, Any]:
    """Return what the contender holds on the host."""
    import torch

    found: dict[str, Any] = {"host_added_gb": round(host_used_gb() - setting.before_gb, 2)}
    status = Path("/proc/self/status").read_text()
    found["rss_gb"] = round(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1e6, 2)
    if not setting.on_cpu:
        stats = torch.cuda.host_memory_stats()
        found["pinned_gb"] = round(stats.get("allocated_bytes.current", 0) / _GB, 3)
    return found


# --- all contenders -------------------------------------------------------------------------------


def shape_of(options: argparse.Namespace) -> Shape:
    """Return the shape that was asked for."""
    from dlo_core.bench.model import Shape

    dtype = "float32" if options.device.startswith("cpu") else "bfloat16"
    return Shape(options.width, options.heads, options.blocks, options.half_blocks, dtype)


def run_all(options: argparse.Namespace) -> int:
    """Run every contender and write the table after each; return the exit code."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget
    results: dict[str, Any] = {
        "machine": machine(options.device),
        "shape": asdict(shape_of(options)),
        "contenders": {},
    }
    known = known_results(out / "peers.json", results, options.lengths) if options.resume else {}
    # Three copies of the weights: the model's, a contender's, and the checkpoint of another.
    nbytes = 1 << 26 if options.small else 3 * 36 * options.width**2 * options.blocks
    results["grown"] = grow(nbytes, limit_s=min(40.0, options.budget / 8))
    print(json.dumps(results["grown"]), flush=True)
    for name in options.contenders:
        found = known.get(name) or run_one(name, options, deadline - time.monotonic())
        compare(found, results["contenders"].get("resident", found))
        results["contenders"][name] = found
        (out / "peers.json").write_text(json.dumps(results, indent=1))
        (out / "peers.md").write_text(table(results, options.lengths))
        print(f"{name}: {summary(found)}", flush=True)
    print(table(results, options.lengths))
    if options.plot:
        print(plot(results, options.lengths, out / "peers.png"))
    ours = [found for name, found in results["contenders"].items() if name.startswith("dlo")]
    wrong = [found for found in ours if "skipped" not in found and not found.get("bit_identical")]
    return 1 if wrong or not ours else 0


def run_one(name: str, options: argparse.Namespace, left_s: float) -> dict[str, Any]:
    """Run one contender in its process, within the time that is left."""
    absent = why_absent(name)
    if absent is not None:
        return {"skipped": absent}
    if left_s < min(options.limit, 20):
        return {"skipped": "out of budget"}
    return run_child(__file__, [*sys.argv[1:], "--run", name], limit_s=min(options.limit, left_s))


def known_results(
    path: Path, results: dict[str, Any], lengths: list[int]
) -> dict[str, dict[str, Any]]:
    """Return the contenders that came to their end in an earlier run like this one."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = ("gpu", "torch", "device", "nccl", "diffusers", "accelerate", "mmgp", "vllm-omni")
    if before.get("shape") != results["shape"] or any(
        before["machine"].get(key) != results["machine"].get(key) for key in same
    ):
        print("the earlier results are of another model, machine or package: not used")
        return {}
    ours = before["machine"].get("commit") == results["machine"].get("commit")
    return {
        name: found | {"from": before["machine"]["date"]}
        for name, found in before["contenders"].items()
        if found.get("complete")
        and set(map(str, lengths)) <= set(found["runs"])
        and (ours or not name.startswith("dlo"))
    }


def parse() -> argparse.Namespace:
    """Return the options; small ones where ``--small`` says so."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try it")
    parser.add_argument("--small", action="store_true", help="a model of a few megabytes")
    parser.add_argument("--out", default=".", help="folder of peers.json and peers.md")
    parser.add_argument("--contenders", default="", help="names with commas between; all")
    parser.add_argument("--tokens", default="", help="lengths with commas between")
    for name, default in (("width", 3072), ("heads", 24), ("blocks", 40), ("half-blocks", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--passes", type=int, default=6, help="timed passes of each length")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all contenders")
    parser.add_argument("--limit", type=float, default=110, help="seconds for one contender")
    parser.add_argument("--resume", action="store_true", help="keep what --out has already")
    parser.add_argument("--plot", action="store_true", help="write peers.png (needs matplotlib)")
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.width, options.heads, options.blocks, options.passes = 64, 4, 5, 3
    lengths = options.tokens or ("8,32" if options.small else "4096,10240,24576")
    options.lengths = [int(part) for part in lengths.split(",")]
    options.contenders = options.contenders.split(",") if options.contenders else [*CONTENDERS]
    unknown = [name for name in options.contenders if name not in CONTENDERS]
    if unknown:
        parser.error(f"unknown contenders {', '.join(unknown)}; known: {', '.join(CONTENDERS)}")
    if "resident" not in options.contenders:
        options.contenders.insert(0, "resident")
    return options


if __name__ == "__main__":
    given = parse()
    if given.run:
        run_contender(given)
    else:
        sys.exit(run_all(given))
