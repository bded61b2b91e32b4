#!/usr/bin/env python3
"""Side by side: dlo and the other ways to offload that a user can install, on one device.

Every contender gets the same weights and the same inputs in a process of its own, and the output of
every pass is compared bit for bit with that of the resident run. A peer that is not installed is
left out and said so. See README.md beside this file.

    python benchmarks/peers.py --out results                    on a GPU, about 30 s a contender
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

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from dlo_core.bench.model import Shape

    Attach = Callable[
        [nn.Module, "Setting"], tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
    ]

use_checkout()

_GB = 1e9


class Setting:
    """What a contender runs on.

    Attributes:
        device: The device.
        shape: Of the model.
        on_cpu: Whether there is no accelerator to copy to.
    """

    def __init__(self, device: str, shape: Shape) -> None:
        """Take the options."""
        import torch

        self.device = torch.device(device)
        self.shape = shape
        self.on_cpu = self.device.type == "cpu"

    def synchronize(self) -> None:
        """Wait for the device."""
        import torch

        if not self.on_cpu:
            torch.accelerator.synchronize(self.device)


class NotInstalled(Exception):
    """The peer's package is not here."""


def nothing_more() -> dict[str, Any]:
    """Return no further facts."""
    return {}


# --- contenders: each installs an offload and returns what to call --------------------------------


def attach_dlo(**settings: Any) -> Attach:
    """Return dlo with these settings."""

    def attach(model: nn.Module, setting: Setting) -> Any:
        import dlo_core as dlo

        offloaded = dlo.offload(model, device=str(setting.device), **settings)

        def facts() -> dict[str, Any]:
            stats = offloaded.stats()
            return {"pinned_gb": stats.pinned_bytes / _GB, "exposed_ms": stats.exposed_ms}

        return model, facts

    return attach


def attach_diffusers(**options: Any) -> Attach:
    """Return diffusers' group offloading."""

    def attach(model: nn.Module, setting: Setting) -> Any:
        hooks = _import("diffusers.hooks")
        import torch

        streams = {"use_stream": True, "low_cpu_mem_usage": False}
        given = dict(options)
        if setting.on_cpu:
            # Streams need an accelerator.
            streams = {}
            given.pop("record_stream", None)
        hooks.apply_group_offloading(
            model,
            onload_device=setting.device,
            offload_device=torch.device("cpu"),
            **streams,
            **given,
        )
        return model, nothing_more

    return attach


def attach_accelerate(model: nn.Module, setting: Setting) -> Any:
    """Return accelerate's offload, which copies each layer when it runs."""
    accelerate = _import("accelerate")
    moved = accelerate.cpu_offload(model, execution_device=setting.device, offload_buffers=True)
    return moved, nothing_more


def attach_fsdp(model: nn.Module, setting: Setting) -> Any:
    """Return PyTorch's FSDP2 with CPU offload, prefetching the next block, in a world of one."""
    import os
    import tempfile

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    store = os.path.join(tempfile.mkdtemp(), "store")
    library = "gloo" if setting.on_cpu else "nccl"
    dist.init_process_group(library, init_method=f"file://{store}", rank=0, world_size=1)
    mesh = init_device_mesh(setting.device.type, (1,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=not setting.on_cpu),
        "reshard_after_forward": True,
    }
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])

    def forward(*args: torch.Tensor) -> Any:
        return model(*args)

    return forward, nothing_more


def attach_mmgp(model: nn.Module, setting: Setting) -> Any:
    """Return mmgp with a budget of less than two blocks."""
    offload = _import("mmgp").offload
    blocks: Any = model.blocks
    block_mb = sum(p.nbytes for p in blocks[0].parameters()) / 2**20
    offload.all(
        {"transformer": model},
        pinnedMemory=True,
        quantizeTransformer=False,
        asyncTransfers=True,
        budgets={"transformer": max(100, int(block_mb / 2))},
        perc_reserved_mem_max=0.95,
        verboseLevel=1,
    )
    return model, nothing_more


def attach_omni(name: str) -> Attach:
    """Return one of vllm-omni's backends."""

    def attach(model: nn.Module, setting: Setting) -> Any:
        offloader = _import("vllm_omni.diffusion.offloader")
        from torch import nn

        class Pipe(nn.Module):
            _dit_modules = ("transformer",)
            _encoder_modules = ()
            _vae_modules = ()
            _resident_modules = ()
            _offload_plan = offloader.OffloadPlan(block_attrs={"transformer": ("blocks",)})

        pipe = Pipe()
        pipe.transformer = model
        strategies, config = offloader.OffloadStrategy, offloader.OffloadConfig
        if name == "distributed":
            made = offloader.DistributedLayerwiseOffloadBackend(
                config(
                    strategy=strategies.DISTRIBUTED_LAYER_WISE,
                    pin_cpu_memory=True,
                    dp_size=1,
                    dlo_use_allgather=True,
                ),
                setting.device,
            )
        else:
            made = offloader.LayerWiseOffloadBackend(
                config(strategy=strategies.LAYER_WISE, pin_cpu_memory=True), setting.device
            )
        made.enable(pipe)

        def facts() -> dict[str, Any]:
            # Names it, and keeps it alive.
            return {"backend": type(made).__name__}

        return model, facts

    return attach


def attach_resident(model: nn.Module, setting: Setting) -> Any:
    """Return the model itself, all on the device."""
    return model.to(setting.device), nothing_more


CONTENDERS: dict[str, Attach] = {
    "resident": attach_resident,
    "dlo": attach_dlo(),
    "dlo_depth3": attach_dlo(depth=3),
    "diffusers_block": attach_diffusers(offload_type="block_level", num_blocks_per_group=1),
    "diffusers_block_record_stream": attach_diffusers(
        offload_type="block_level", num_blocks_per_group=1, record_stream=True
    ),
    "diffusers_leaf": attach_diffusers(offload_type="leaf_level"),
    "diffusers_leaf_record_stream": attach_diffusers(offload_type="leaf_level", record_stream=True),
    "fsdp2_cpu_offload": attach_fsdp,
    "accelerate_cpu_offload": attach_accelerate,
    "mmgp": attach_mmgp,
    "omni_distributed": attach_omni("distributed"),
    "omni_layerwise": attach_omni("layerwise"),
}


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(f"{name.partition('.')[0]} is not installed ({error})") from error


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
    before = host_used_gb()
    start = time.perf_counter()
    try:
        with torch.no_grad():
            call, facts = CONTENDERS[options.run](model, setting)
    except NotInstalled as error:
        answer(options.answer, {"skipped": str(error)})
        return
    setting.synchronize()
    found["setup_s"] = round(time.perf_counter() - start, 2)
    if options.run == "resident":
        found |= link_facts(model, setting)
    for tokens in options.lengths:
        passes = 2 if "accelerate" in options.run and not options.small else options.passes
        found["runs"][str(tokens)] = measure(call, setting, tokens, passes)
        found |= memory_facts(setting, before) | facts()
        answer(options.answer, found)
        print(tokens, found["runs"][str(tokens)], flush=True)
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


def memory_facts(setting: Setting, before_gb: float) -> dict[str, Any]:
    """Return what the contender holds on the host."""
    import torch

    found: dict[str, Any] = {"host_added_gb": round(host_used_gb() - before_gb, 2)}
    status = Path("/proc/self/status").read_text()
    found["rss_gb"] = round(int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1e6, 2)
    if not setting.on_cpu:
        stats = torch.cuda.host_memory_stats()
        found["pinned_gb"] = round(stats.get("allocated_bytes.current", 0) / _GB, 3)
    return found


def host_used_gb() -> float:
    """Return the host memory that cannot be had any more."""
    text = Path("/proc/meminfo").read_text()
    total, available = (
        int(re.findall(rf"{name}:\s+(\d+)", text)[0]) for name in ("MemTotal", "MemAvailable")
    )
    return (total - available) / 1e6


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
    passed_on = sys.argv[1:]
    for name in options.contenders:
        left = deadline - time.monotonic()
        if left < min(options.limit, 20):
            found: dict[str, Any] = {"skipped": "out of budget"}
        else:
            found = run_child(
                __file__, [*passed_on, "--run", name], limit_s=min(options.limit, left)
            )
        compare(found, results["contenders"].get("resident", found))
        results["contenders"][name] = found
        (out / "peers.json").write_text(json.dumps(results, indent=1))
        (out / "peers.md").write_text(table(results, options.lengths))
        print(f"{name}: {summary(found)}", flush=True)
    print(table(results, options.lengths))
    ours = [found for name, found in results["contenders"].items() if name.startswith("dlo")]
    return 0 if all(found.get("bit_identical") for found in ours) else 1


def compare(found: dict[str, Any], resident: dict[str, Any]) -> None:
    """Add whether every pass of every length gave the resident run's bits."""
    if found.get("runs"):
        found["bit_identical"] = all(
            run["digests"] == resident.get("runs", {}).get(tokens, {}).get("digests")
            and len(run["digests"]) == 1
            for tokens, run in found["runs"].items()
        )


def summary(found: dict[str, Any]) -> str:
    """Return one line about a contender."""
    if "runs" not in found or not found["runs"]:
        end = found.get("log", "").strip().splitlines()[-1:]
        return " ".join([found.get("skipped") or found.get("error", "?"), *end])
    steps = ", ".join(f"{tokens}: {run['step_ms']} ms" for tokens, run in found["runs"].items())
    error = f"; {found['error']}" if "error" in found else ""
    return f"{steps}; same bits: {found['bit_identical']}; {found['seconds']} s{error}"


def table(results: dict[str, Any], lengths: list[int]) -> str:
    """Return the results as a Markdown table."""
    rows = [
        "| contender | "
        + " | ".join(f"{tokens} tokens, ms (× limit)" for tokens in lengths)
        + " | peak allocated / reserved GB | pinned GB | host added GB | set-up s | same bits |",
        "|---|" + "---|" * (len(lengths) + 5),
    ]
    limits = limits_ms(results)
    for name, found in results["contenders"].items():
        if not found.get("runs"):
            rows.append(f"| {name} | {summary(found)[:200]} |" + " |" * (len(lengths) + 4))
            continue
        cells = [name]
        for tokens in map(str, lengths):
            run = found["runs"].get(tokens)
            ratio = f" ({run['step_ms'] / limits[tokens]:.3f})" if run and tokens in limits else ""
            cells.append(f"{run['step_ms']:.1f}{ratio}" if run else "–")
        peaks = [
            f"{run['allocated_gb']:.2f} / {run['reserved_gb']:.2f}"
            for run in found["runs"].values()
            if "allocated_gb" in run
        ]
        cells += [peaks[-1] if peaks else "–"]
        cells += [str(found.get(key, "–")) for key in ("pinned_gb", "host_added_gb", "setup_s")]
        cells.append("yes" if found.get("bit_identical") else "**no**")
        rows.append("| " + " | ".join(cells) + " |")
    about = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    limit = "The limit is the longer of a resident step and of the link's time for all blocks: "
    limit += ", ".join(f"{tokens} tokens {ms:.1f} ms" for tokens, ms in limits.items())
    return "\n".join([about, "", limit, "", *rows, "", *against_peers(results, lengths), ""])


def limits_ms(results: dict[str, Any]) -> dict[str, float]:
    """Return what no offload of all blocks can beat, by length."""
    resident = results["contenders"].get("resident", {})
    if "link_gb_s" not in resident:
        return {}
    copy_ms = resident["blocks_gb"] / resident["link_gb_s"] * 1e3
    return {tokens: max(run["step_ms"], copy_ms) for tokens, run in resident["runs"].items()}


def against_peers(results: dict[str, Any], lengths: list[int]) -> list[str]:
    """Return dlo's step against the fastest peer's, a line for each length."""
    lines = []
    for tokens in map(str, lengths):
        steps = {
            name: found["runs"][tokens]["step_ms"]
            for name, found in results["contenders"].items()
            if found.get("runs", {}).get(tokens)
        }
        peers = {k: v for k, v in steps.items() if k != "resident" and not k.startswith("dlo")}
        if "dlo" in steps and peers:
            best = min(peers, key=lambda name: peers[name])
            lines.append(
                f"{tokens} tokens: dlo takes {steps['dlo'] / peers[best]:.3f} of the fastest "
                f"peer's time ({best})"
            )
    return lines


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
