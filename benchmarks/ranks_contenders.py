"""The contenders of several ranks: each gives a model its weights and returns what to call."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from checks import Skip
from contenders import TIME_EVERY, omni_pipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from dlo_core.bench.launch import Member
    from dlo_core.bench.model import SyntheticTransformer

__all__ = ["CONTENDERS", "Attached", "Contender"]

# Below the time after which ranks that say nothing are ended: dlo says more.
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Attached:
    """A model that can be called.

    Attributes:
        call: Runs a forward.
        facts: Returns figures of the contender's own, as plain values.
        close: Lets everything go; all ranks come to call it.
    """

    call: Callable[..., Any]
    facts: Callable[[], dict[str, Any]] = dict
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to run the model.

    Attributes:
        kind: Who does it: ``"resident"``, ``"dlo"``, ``"peer copies"`` (dlo, gathering so),
            ``"fsdp"``, ``"omni"``.
        settings: Those of dlo.
        residents: Forties of the blocks that stay on the device: of 40 blocks, how many.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    residents: int = 0

    @property
    def gathers(self) -> bool:
        """Whether every rank keeps a part of each block."""
        return self.kind != "resident" and self.settings.get("use_allgather", True)

    @property
    def ours(self) -> bool:
        """Whether it is dlo."""
        return self.kind in ("dlo", "peer copies")

    def num_residents(self, num_blocks: int) -> int:
        """Return how many of so many blocks stay on the device."""
        return num_blocks * self.residents // 40

    def attach(self, member: Member, model: SyntheticTransformer) -> Attached:
        """Take a model on the host (``"resident"``: on the device), on all ranks.

        Raises:
            Skip: It cannot be had here, as all ranks find alike.
        """
        if self.kind == "resident":
            return Attached(model)
        if self.kind == "fsdp":
            return _attach_fsdp(member, model)
        if self.kind == "omni":
            return _attach_omni(member, model)
        settings = dict(self.settings)
        if self.residents:
            settings["resident_layers"] = self.num_residents(len(model.blocks))
        return _attach_dlo(member, model, settings, peer_copies=self.kind == "peer copies")


CONTENDERS: dict[str, Contender] = {
    "resident": Contender("resident"),
    "gather": Contender("dlo"),
    "gather_copies": Contender("dlo", {"gather_by": "copies"}),
    "local": Contender("dlo", {"use_allgather": False}),
    "local_shared": Contender("dlo", {"use_allgather": False, "host": "shared"}),
    "gather_depth3": Contender("dlo", {"depth": 3}),
    "gather_in_place": Contender("dlo", {"stages": 0}),
    "gather_in_place_depth3": Contender("dlo", {"stages": 0, "depth": 3}),
    "gather_residents10": Contender("dlo", residents=10),
    "gather_residents20": Contender("dlo", residents=20),
    "gather_peer_copies": Contender("peer copies"),
    "fsdp2_cpu_offload": Contender("fsdp"),
    "omni_distributed": Contender("omni"),
}


def _attach_dlo(
    member: Member, model: nn.Module, settings: dict[str, Any], *, peer_copies: bool
) -> Attached:
    import dlo_core as dlo

    backend: Any = member.backend
    if settings.get("gather_by") == "copies" and (reason := backend.copies_refusal()):
        raise Skip(reason)
    if peer_copies:
        if backend.device.type != "cuda":
            raise Skip("peer copies need a CUDA device")
        from peer_copies import PeerBackend

        backend = PeerBackend(backend.device, _new_group(member))
    always: dict[str, Any] = {"timeout_s": _TIMEOUT_S, "time_every": TIME_EVERY, "packed": False}
    offloaded = dlo.offload(model, device=backend, group=dist.group.WORLD, **always, **settings)

    def facts() -> dict[str, Any]:
        stats = offloaded.stats()
        return {
            "pinned_nbytes": stats.pinned_bytes,
            "shared_nbytes": stats.shared_bytes,
            "device_nbytes": stats.device_bytes,
            "passes": stats.passes,
            "copied_nbytes": stats.copied_bytes,
            "exposed_ms": stats.exposed_ms,
        }

    def close() -> None:
        member.backend.synchronize()
        member.barrier()
        offloaded.shutdown()
        member.barrier()
        if peer_copies:
            backend.clear()

    return Attached(model, facts, close)


def _attach_fsdp(member: Member, model: SyntheticTransformer) -> Attached:
    """Return PyTorch's FSDP2 with CPU offload, prefetching the next block."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    kind = member.backend.device.type
    options: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(_new_group(member), kind),
        "offload_policy": CPUOffloadPolicy(pin_memory=kind != "cpu"),
        "reshard_after_forward": True,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    blocks: Any = model.blocks
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following])

    def forward(*args: torch.Tensor) -> Any:
        # FSDP knows no inference mode.
        with torch.inference_mode(False), torch.no_grad():
            return model(*args)

    return Attached(forward, _torch_pinned)


def _attach_omni(member: Member, model: SyntheticTransformer) -> Attached:
    """Return vllm-omni's distributed backend over all ranks, set up as its own start does."""
    try:
        from vllm_omni.diffusion import offloader  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise Skip(f"vllm-omni is not installed ({error})") from error
    pipe = omni_pipe(offloader, model)
    config = offloader.OffloadConfig(
        strategy=offloader.OffloadStrategy.DISTRIBUTED_LAYER_WISE,
        pin_cpu_memory=True,
        dp_size=member.size,
        dlo_use_allgather=True,
    )
    made = offloader.DistributedLayerwiseOffloadBackend(config, member.backend.device)
    made.dp_group, made.rank, made.dp_size = _new_group(member), member.rank, member.size
    made.enable(pipe)

    def facts() -> dict[str, Any]:
        # Names it, and keeps it alive.
        return _torch_pinned() | {"backend": type(made).__name__}

    return Attached(model, facts)


def _new_group(member: Member) -> Any:
    """Return a group of all ranks over the device's comm library."""
    return dist.new_group(backend=member.backend.comm_library)


def _torch_pinned() -> dict[str, Any]:
    """Return what torch's own allocator of pinned memory took."""
    if not torch.cuda.is_available():
        return {}
    return {"pinned_nbytes": torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)}
