#!/usr/bin/env python3
"""One command for a machine with several GPUs: gather mode against its limits and its rivals.

Every section runs in a process of its own with a time limit and starts one process a rank; what
it found so far is kept when it is killed. A table and JSON are written after each. All ranks and
sections share one copy of the weights. NVLink multicast stays off.

    python benchmarks/several_gpus.py --ranks 2 --out results --budget 470
    python benchmarks/several_gpus.py --sections links,modes --tokens 4096,10240
    python benchmarks/several_gpus.py --sections links,modes --contenders gather,gather_copies
    python benchmarks/several_gpus.py --device cuda:0 --ranks 2 --small   two ranks on one GPU: bits
    python benchmarks/several_gpus.py --device cpu --small                to see that it works
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checkout import use_checkout
from child import keep, machine, run_child, said
from grown import grow
from ranks_section import SECTIONS, run_section, shape_of

# A program that multicasts over NVLink can put GPUs out of service that others share.
os.environ |= {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
use_checkout()

_PASSES = (8, 5, 3)
_LARGE, _SMALL = (4096, 10240, 24576), (8, 16, 32)
# What the ranks' processes take beside the weights.
_SPARE_NBYTES = 6 << 30


# --- all sections ---------------------------------------------------------------------------------


def run_all(options: argparse.Namespace) -> int:
    """Run every section within the budget; return 0 when all bits of dlo are right."""
    from ranks_model import make_model
    from ranks_report import crossing, rows_of
    from ranks_tables import tables
    from ranks_weights import make_weights, weights_nbytes

    deadline = time.monotonic() + options.budget
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    shapes = {name: shape_of(options, unequal=name == "unequal") for name in ("equal", "unequal")}
    results: dict[str, Any] = {
        "machine": machine(options.device) | {"ranks": options.ranks, "links": topology(options)},
        "ranks": options.ranks,
        "contenders": options.contenders,
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
        "host_blocks": options.device.startswith("cpu"),
        "sections": {},
        "rows": [],
    }
    print(json.dumps(results["machine"], indent=1), flush=True)
    start = time.monotonic()
    import torch

    dtype = getattr(torch, shapes["equal"].dtype)
    sizes = [weights_nbytes(make_model(shape, "dp", None), dtype) for shape in shapes.values()]
    if not options.small:
        # These weights, and a copy for every rank in rank-local mode.
        wanted = (options.ranks + 1) * max(sizes) + _SPARE_NBYTES
        results["available_gb"] = grow_until(wanted, limit_s=options.budget / 8)
    options.weights = make_weights(max(sizes), dtype)
    results["prepare_s"] = round(time.monotonic() - start, 1)
    print(f"weights {max(sizes) / 1e9:.2f} GB, ready after {results['prepare_s']} s", flush=True)

    def note(name: str, found: dict[str, Any]) -> None:
        """Keep what was found; the tables can be made again, the figures cannot."""
        results["sections"][name] = found
        keep(out / "several_gpus.json", json.dumps(results, indent=1))
        try:
            rows = rows_of(results)
            results["rows"] = [row.to_dict() for row in rows]
            results["crossing"] = crossing(rows)
            keep(out / "several_gpus.json", json.dumps(results, indent=1))
            keep(out / "several_gpus.md", tables(results, rows))
        except Exception:
            traceback.print_exc()

    for name in options.sections:
        left = deadline - time.monotonic()
        reason = why_not(options, name, left)
        if reason:
            found: dict[str, Any] = {"skipped": reason}
        else:
            limit_s = min(SECTIONS[name].limit_s, left)
            print(f"== {name} (at most {limit_s:.0f} s)", flush=True)
            arguments, on_answer = passed_on(options, name, limit_s), partial(note, name)
            found = run_child(__file__, arguments, limit_s=limit_s, on_answer=on_answer)
        note(name, found)
        show(name, found, [row for row in rows_of(results) if row.section == name])
    print(tables(results, rows_of(results)))
    return verdict(results)


def grow_until(nbytes: int, *, limit_s: float) -> float:
    """Make a machine whose memory grows as it is used have so much, and return its GB.

    What is planned goes by what there is, and whoever uses it first would pay for it.
    """
    import psutil

    deadline = time.monotonic() + limit_s

    def available() -> int:
        return int(psutil.virtual_memory().available)

    while (before := available()) < nbytes and (left := deadline - time.monotonic()) > 0:
        grow(nbytes, limit_s=left)
        if available() <= before:
            break
    return round(available() / 1e9, 1)


def why_not(options: argparse.Namespace, name: str, left_s: float) -> str:
    """Return why a section is left out; empty: it is not."""
    section, heads = SECTIONS[name], shape_of(options, unequal=False).num_heads
    if section.needs and find_spec(section.needs) is None:
        return f"{section.needs} is not installed"
    if section.parallel == "sp" and heads % options.ranks:
        return f"{heads} heads cannot be divided among {options.ranks} ranks"
    return "out of budget" if left_s < 15 else ""


def passed_on(options: argparse.Namespace, name: str, limit_s: float) -> list[str]:
    """Return the options of a section's process."""
    arguments = ["--device", options.device, "--ranks", str(options.ranks)]
    arguments += ["--tokens", ",".join(map(str, options.lengths))]
    arguments += ["--passes", ",".join(map(str, options.passes))]
    arguments += ["--run", name, "--weights", options.weights]
    arguments += ["--reference", reference_for(name, options.sections)]
    arguments += ["--until", str(time.time() + limit_s)]
    if options.contenders:
        arguments += ["--contenders", ",".join(options.contenders)]
    return arguments + (["--small"] if options.small else [])


def reference_for(name: str, sections: list[str]) -> str:
    """Return the section whose resident run is the reference: its own where none is asked for."""
    wanted = SECTIONS[name].reference
    alike = [each for each in sections if SECTIONS[each].reference == wanted]
    alike = [each for each in alike if SECTIONS[each].kind == "steps"]
    return wanted if wanted in sections else next(iter(alike), name)


def topology(options: argparse.Namespace) -> str:
    """Return how the GPUs are linked, in a line."""
    if not options.device.startswith("cuda"):
        return "none"
    return " / ".join(said(["nvidia-smi", "topo", "-m"]).split("\n\n")[0].split("\n"))


def show(name: str, found: dict[str, Any], rows: list[Any]) -> None:
    """Print what a section found."""
    for row in rows:
        limit = "–" if row.limit_ms is None else f"{row.limit_ms:.1f}"
        print(
            f"  {row.contender}, {row.tokens} tokens: {row.step_ms:.1f} ms, limit {limit}, "
            f"same bits: {row.same_bits}"
        )
    for rank, each in found.get("ranks", {}).items():
        print(f"  rank {rank}: {json.dumps(each)}")
    for contender, ranks in found.get("contenders", {}).items():
        for key in ("skipped", "errors"):
            if key in ranks.get("0", {}):
                print(f"  {contender}: {key}: {ranks['0'][key]}")
    for key in ("skipped", "error", "log"):
        if key in found:
            print(f"  {key}: {found[key]}")
    print(f"  {name}: {found.get('seconds', 0)} s", flush=True)


def verdict(results: dict[str, Any]) -> int:
    """Return 0 when dlo never failed, always had the resident run's bits, and gather mode ran."""
    from ranks_contenders import CONTENDERS

    ours = [row for row in results["rows"] if CONTENDERS[row["contender"]].ours]
    wrong = [f"{row['section']}, {row['contender']}" for row in ours if not row["same_bits"]]
    if wrong:
        print(f"other bits than the resident run, or unknown: {'; '.join(wrong)}")
    failed = [
        f"{section}, {name}"
        for section, found in results["sections"].items()
        for name, ranks in found.get("contenders", {}).items()
        if CONTENDERS[name].ours and any("errors" in each for each in ranks.values())
    ]
    if failed:
        print(f"failed: {'; '.join(failed)}")
    left_out = results.get("contenders") and "gather" not in results["contenders"]
    sections = [] if left_out else results["sections"]
    asked = [name for name in sections if "gather" in SECTIONS[name].contenders]
    silent = set(asked) - {row["section"] for row in ours if row["contender"] == "gather"}
    if silent:
        print(f"no step of gather mode came out of: {', '.join(sorted(silent))}")
    return 1 if wrong or failed or silent else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda: a GPU a rank; cuda:0: one for all")
    parser.add_argument("--ranks", type=int, default=0, help="as many as there are GPUs; 2")
    parser.add_argument("--small", action="store_true", help="a model of a few megabytes")
    parser.add_argument("--out", default=".", help="folder of several_gpus.json and .md")
    parser.add_argument("--sections", default="", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--contenders", default="", help="only these, beside the resident run")
    parser.add_argument("--tokens", default="", help="lengths of a rank, with commas between")
    parser.add_argument("--passes", default="", help="timed passes of each length, likewise")
    parser.add_argument("--budget", type=float, default=470, help="seconds for everything")
    for name in ("run", "weights", "reference", "answer"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    lengths = _SMALL if options.small else _LARGE
    options.lengths = _numbers(options.tokens) or list(lengths)
    passes = _numbers(options.passes) or list(_PASSES)
    options.passes = [passes[min(n, len(passes) - 1)] for n in range(len(options.lengths))]
    options.ranks = options.ranks or _num_gpus(options.device)
    options.sections = options.sections.split(",") if options.sections else [*SECTIONS]
    unknown = [name for name in options.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
    known = {"resident"} | {name for each in SECTIONS.values() for name in each.contenders}
    options.contenders = options.contenders.split(",") if options.contenders else []
    unknown = [name for name in options.contenders if name not in known]
    if unknown:
        parser.error(f"unknown contenders {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if options.ranks < 2:
        parser.error(f"--ranks must be at least 2; got {options.ranks}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")] if text else []


def _num_gpus(device: str) -> int:
    if device != "cuda":
        return 2
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    given = parse()
    sys.exit(run_section(given) if given.run else run_all(given))
