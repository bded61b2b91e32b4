"""Contenders: dlo and its peers, each of which installs an offload and returns what to call."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scratch import SHARED_MEMORY, room_nbytes, scratch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from dlo_core.bench.model import Shape

    Attach = Callable[
        [nn.Module, "Setting"], tuple[Callable[..., Any], Callable[[], dict[str, Any]]]
    ]

__all__ = [
    "CONTENDERS",
    "TIME_EVERY",
    "NotInstalled",
    "Setting",
    "host_used_gb",
    "needs_s",
    "omni_pipe",
    "passes_of",
    "why_absent",
]

_GB = 1e9
TIME_EVERY = 5
"""Of so many of dlo's passes one keeps times: one of each length, and few of those measured."""


class Setting:
    """What a contender runs on.

    Attributes:
        device: The device.
        shape: Of the model.
        on_cpu: Whether there is no accelerator to copy to.
        closing: What is undone when all is measured.
        before_gb: Host memory that was in use when the set-up began.
        start: The time then.
    """

    def __init__(self, device: str, shape: Shape) -> None:
        """Take the options."""
        import torch

        self.device = torch.device(device)
        self.shape = shape
        self.on_cpu = self.device.type == "cpu"
        self.closing = ExitStack()
        self.restart()

    def restart(self) -> None:
        """Let the set-up begin now: what was done before is no part of it."""
        self.before_gb = host_used_gb()
        self.start = time.perf_counter()

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

        timed = {"time_every": TIME_EVERY, "packed": False, **settings}
        offloaded = dlo.offload(model, device=str(setting.device), **timed)

        def facts() -> dict[str, Any]:
            stats = offloaded.stats()
            return {
                "pinned_gb": round(stats.pinned_bytes / _GB, 3),
                "exposed_ms": round(stats.exposed_ms, 2),
            }

        return model, facts

    return attach


def attach_dlo_registered(model: nn.Module, setting: Setting) -> Any:
    """Return dlo over a checkpoint in memory, registered where it lies: no copy of the weights."""
    import tempfile

    import torch
    from safetensors.torch import save_file

    import dlo_core as dlo
    from dlo_core.bench.model import SyntheticTransformer

    nbytes = sum(tensor.nbytes for tensor in model.state_dict().values())
    fits = room_nbytes(SHARED_MEMORY) > 1.05 * nbytes
    where = SHARED_MEMORY if fits else Path(tempfile.gettempdir())
    path = setting.closing.enter_context(scratch(where)) / "model.safetensors"
    save_file(model.state_dict(), path)
    with torch.device("meta"):
        bare = SyntheticTransformer(setting.shape).to(getattr(torch, setting.shape.dtype))
    setting.restart()
    settings: dict[str, Any] = {"host": "mapped", "time_every": TIME_EVERY}
    offloaded = dlo.offload(bare.eval(), device=str(setting.device), checkpoint=path, **settings)

    def facts() -> dict[str, Any]:
        stats = offloaded.stats()
        return {
            "pinned_gb": round(stats.pinned_bytes / _GB, 3),
            "exposed_ms": round(stats.exposed_ms, 2),
            "checkpoint": "in /dev/shm" if fits else "in the page cache",
        }

    return bare, facts


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

    # A world of one talks to nobody.
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_IB_DISABLE", "1")
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
    offload = _import("mmgp.offload")
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


def omni_pipe(offloader: Any, model: nn.Module) -> Any:
    """Return the pipeline of one model that vllm-omni's backends take."""
    from torch import nn

    class Pipe(nn.Module):
        _dit_modules = ("transformer",)
        _encoder_modules = ()
        _vae_modules = ()
        _resident_modules = ()
        _offload_plan = offloader.OffloadPlan(block_attrs={"transformer": ("blocks",)})

    pipe = Pipe()
    pipe.transformer = model
    return pipe


def attach_omni(name: str) -> Attach:
    """Return one of vllm-omni's backends."""

    def attach(model: nn.Module, setting: Setting) -> Any:
        offloader = _import("vllm_omni.diffusion.offloader")
        pipe = omni_pipe(offloader, model)
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


# The most telling first.
CONTENDERS: dict[str, Attach] = {
    "resident": attach_resident,
    "dlo": attach_dlo(),
    "diffusers_block_record_stream": attach_diffusers(
        offload_type="block_level", num_blocks_per_group=1, record_stream=True
    ),
    "fsdp2_cpu_offload": attach_fsdp,
    "diffusers_block": attach_diffusers(offload_type="block_level", num_blocks_per_group=1),
    "dlo_registered": attach_dlo_registered,
    "diffusers_leaf_record_stream": attach_diffusers(offload_type="leaf_level", record_stream=True),
    "accelerate_cpu_offload": attach_accelerate,
    "diffusers_leaf": attach_diffusers(offload_type="leaf_level"),
    "mmgp": attach_mmgp,
    "omni_distributed": attach_omni("distributed"),
    "omni_layerwise": attach_omni("layerwise"),
    "dlo_depth3": attach_dlo(depth=3),
}


# By the beginning of a contender's name; what is not here comes with dlo or torch.
PACKAGES = {
    "diffusers": "diffusers",
    "accelerate": "accelerate",
    "mmgp": "mmgp",
    "omni": "vllm_omni",
}


# Seconds on a machine with one H200, beyond what every contender takes (`_EACH_S`: Python, torch,
# the weights on the host): of the set-up, and of a pass at 4096 tokens and what longer ones add.
_EACH_S, _SLACK = 12.0, 1.25
_PASS_S = {"accelerate": 2.1, "mmgp": 0.5, "fsdp2": 0.34, "resident": 0.09}
_SETUP_S = {
    **{"resident": 4.0, "dlo": 3.0, "dlo_registered": 25.0, "diffusers": 27.0, "fsdp2": 30.0},
    **{"accelerate": 1.0, "mmgp": 22.0, "omni": 19.0},
}


def passes_of(name: str, passes: int) -> int:
    """Return how many passes of a contender are timed at each length, of so many wanted."""
    return min(2, passes) if name.startswith("accelerate") else passes


def needs_s(name: str, lengths: list[int], passes: int, scale: float = 1.0) -> float:
    """Return about how many seconds a contender takes; it is not begun with fewer.

    Args:
        name: Of the contender.
        lengths: What is measured.
        passes: Timed passes of each.
        scale: Of the model's weights, those of 40 blocks of 340 MB being 1.
    """
    kind = name.partition("_")[0]
    setup = _SETUP_S.get(name, _SETUP_S[kind])
    shortest = _PASS_S.get(kind, 0.28)
    # What is computed: 0.09 s at 4096 tokens, 0.27 at 10240, 0.91 at 24576.
    steps = [max(shortest, 0.016 * (n / 1024) + 0.9e-3 * (n / 1024) ** 2) for n in lengths]
    if kind == "accelerate":
        steps = [shortest + 0.04 * n / 1024 for n in lengths]
    counted = 2 + passes_of(name, passes)
    return _EACH_S + _SLACK * scale * (setup + counted * sum(steps))


def why_absent(name: str) -> str | None:
    """Return that a contender's package is not installed, or None; nothing is imported."""
    package = PACKAGES.get(name.partition("_")[0])
    if package is None or find_spec(package) is not None:
        return None
    return f"{package} is not installed"


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotInstalled(f"{name.partition('.')[0]} is not installed ({error})") from error


def host_used_gb() -> float:
    """Return the host memory that cannot be had any more."""
    text = Path("/proc/meminfo").read_text()
    total, available = (
        int(re.findall(rf"{name}:\s+(\d+)", text)[0]) for name in ("MemTotal", "MemAvailable")
    )
    return (total - available) / 1e6
