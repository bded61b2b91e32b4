#!/usr/bin/env python3
"""Side by side: dlo and the other ways to offload that a user can install, on one device.

Every contender gets the same weights and the same inputs in a process of its own, and the output of
every pass is compared bit for bit with that of the resident run. A peer that is not installed is
left out and said so. See README.md beside this file.

    python benchmarks/peers.py --out results                    on a GPU, about 30 s a contender
    python benchmarks/peers.py --out results --resume           what is not in results yet
    python benchmarks/peers.py --out here --resume there/peers.json
    python benchmarks/peers.py --device cpu --small --out here  a minute, to see that it works
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkout import use_checkout
from child import answer, end_with_parent, keep, machine, run_child
from contenders import (
    CONTENDERS,
    NotInstalled,
    Setting,
    host_used_gb,
    needs_s,
    passes_of,
    why_absent,
)
from grown import grow
from peers_report import compare, plot, summary, table

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from dlo_core.bench.model import Shape

use_checkout()

_GB = 1e9
# Of a machine: what must be alike for results of two runs to stand in one table.
_ALIKE = (
    *("gpu", "cores", "device", "python", "torch", "nccl"),
    *("diffusers", "accelerate", "mmgp", "vllm-omni"),
)


# --- one contender, in its process ----------------------------------------------------------------


def run_contender(options: argparse.Namespace) -> None:
    """Measure one contender and hand the figures over, length by length."""
    end_with_parent()
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
        passes = passes_of(options.run, options.passes)
        found["runs"][str(tokens)] = measure(call, setting, tokens, passes)
        found |= memory_facts(setting) | facts()
        answer(options.answer, found)
        print(tokens, found["runs"][str(tokens)], flush=True)
    answer(options.answer, found | {"complete": True})
    setting.closing.close()
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
    """Run every contender and write the table as figures come; return the exit code."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget
    results: dict[str, Any] = {
        "machine": machine(options.device),
        "shape": asdict(shape_of(options)),
        "passes": options.passes,
        "contenders": {},
    }
    if options.resume:
        results["contenders"] = known_results(Path(options.resume), results)

    def save() -> None:
        """Keep what is known, in the order of the table."""
        in_order = [known for known in CONTENDERS if known in results["contenders"]]
        contenders = results["contenders"] = {n: results["contenders"][n] for n in in_order}
        for each in contenders.values():
            compare(each, contenders.get("resident", {}))
        keep(out / "peers.json", json.dumps(results, indent=1))
        keep(out / "peers.md", table(results, options.lengths))

    def note(name: str, found: dict[str, Any]) -> None:
        """Keep what was found, beside all that was known of others and of other lengths."""
        results["contenders"][name] = found
        save()

    save()
    todo = what_is_left(results["contenders"], options)
    if todo:
        # Three copies of the weights: the model's, a contender's, and the checkpoint of another.
        nbytes = 1 << 26 if options.small else 3 * 36 * options.width**2 * options.blocks
        results["grown"] = grow(nbytes, limit_s=min(40.0, options.budget / 8))
        print(json.dumps(results["grown"]), flush=True)
    for name, lengths in todo.items():
        rest = Rest(lengths, results["contenders"].get(name, {}))
        found = run_one(name, options, rest, deadline - time.monotonic(), note)
        note(name, found)
        print(f"{name}: {summary(found)}", flush=True)
    for name in options.contenders:
        if name not in todo:
            print(f"{name}: known", flush=True)
    print(table(results, options.lengths))
    if options.plot:
        print(plot(results, options.lengths, out / "peers.png"))
    return verdict(results["contenders"], options.contenders)


def what_is_left(
    known: dict[str, dict[str, Any]], options: argparse.Namespace
) -> dict[str, list[int]]:
    """Return whom to run at which lengths: those that failed before come last."""
    left = {}
    for name in options.contenders:
        runs = known.get(name, {}).get("runs", {})
        lengths = [tokens for tokens in options.lengths if str(tokens) not in runs]
        if lengths:
            left[name] = lengths
    failed = {name for name in left if known.get(name, {}).get("error")}
    return {name: left[name] for name in sorted(left, key=failed.__contains__)}


@dataclass(frozen=True, slots=True)
class Rest:
    """What is to be measured of a contender.

    Attributes:
        lengths: Those that are not known.
        before: What is known.
    """

    lengths: list[int]
    before: dict[str, Any] = field(default_factory=dict)


def run_one(
    name: str,
    options: argparse.Namespace,
    rest: Rest,
    left_s: float,
    note: Callable[[str, dict[str, Any]], None],
) -> dict[str, Any]:
    """Run one contender in its process, within the time that is left, beside what is known."""
    lengths, before = rest.lengths, rest.before
    absent = why_absent(name)
    if absent is not None:
        return before | {"skipped": absent}
    scale = options.width**2 * options.blocks / (3072**2 * 40)
    needs = 0.0 if options.small else needs_s(name, lengths, options.passes, scale)
    if left_s < needs:
        return before | {"skipped": f"out of budget: {left_s:.0f} s of about {needs:.0f} s left"}
    limit_s = min(max(options.limit, 1.5 * needs), left_s)
    arguments = [*sys.argv[1:], "--run", name, "--tokens", ",".join(map(str, lengths))]

    def beside(found: dict[str, Any]) -> dict[str, Any]:
        return beside_known(before, found, options.lengths)

    found = run_child(
        __file__, arguments, limit_s=limit_s, on_answer=lambda told: note(name, beside(told))
    )
    return beside(found)


def beside_known(
    before: dict[str, Any], found: dict[str, Any], lengths: list[int]
) -> dict[str, Any]:
    """Return what was found together with the lengths that were known."""
    runs = before.get("runs", {}) | found.get("runs", {})
    order = sorted(runs, key=int)
    old = {key: value for key, value in before.items() if key not in ("skipped", "error", "log")}
    made = old | found | {"runs": {tokens: runs[tokens] for tokens in order}}
    if not set(map(str, lengths)) <= runs.keys():
        made.pop("complete", None)
    return made


def known_results(path: Path, results: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what an earlier run like this one found, of the lengths that came to their end.

    The machine must be of the same kind, with the same packages, model and number of passes; of dlo
    itself the code must be the same, too.
    """
    path = path / "peers.json" if path.is_dir() else path
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        print(f"no earlier results: {error}", flush=True)
        return {}
    now, then = results["machine"], before["machine"]
    other = [f"machine.{key}" for key in _ALIKE if then.get(key) != now.get(key)]
    other += [key for key in ("shape", "passes") if before.get(key) != results[key]]
    if other:
        print(f"earlier results differ in {', '.join(other)}: not used", flush=True)
        return {}
    ours = then.get("code") is not None and then.get("code") == now.get("code")
    kept = {}
    for name, found in before["contenders"].items():
        if name.startswith("dlo") and not ours:
            continue
        if found.get("runs") or found.get("error"):
            kept[name] = {"from": then["date"]} | found
    return kept


def verdict(contenders: dict[str, dict[str, Any]], asked: list[str]) -> int:
    """Return 1 when dlo gave other bits than the resident run, or failed where it was asked."""
    ours = {name: found for name, found in contenders.items() if name.startswith("dlo")}
    wrong = [name for name, found in ours.items() if found.get("bit_identical") is False]
    silent = [name for name in asked if name in ours and ours[name].get("error")]
    return 1 if wrong or silent else 0


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
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="keep what an earlier run has found: peers.json or its folder; that of --out",
    )
    parser.add_argument("--plot", action="store_true", help="write peers.png (needs matplotlib)")
    parser.add_argument("--run", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.small:
        options.width, options.heads, options.blocks, options.passes = 64, 4, 5, 3
    lengths = options.tokens or ("8,32" if options.small else "4096,10240,24576")
    if options.resume is not None:
        options.resume = options.resume or options.out
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
