"""The plan: all that is decided about a model before a byte is allocated or anything is touched."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from dlo_core.attributes import find_attributes
from dlo_core.checkpoint import Checkpoint
from dlo_core.discovery import FoundBlock, find_blocks
from dlo_core.errors import CheckpointError, ConfigError, DloWarning
from dlo_core.inventory import Inventory, Owned, take_inventory
from dlo_core.layout import BlockLayout, TensorSpec
from dlo_core.shard import ShardPlan, trailers_nbytes
from dlo_core.source import ModuleTensor, Source, prove_checkpoint, prove_module

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.config import OffloadConfig

__all__ = ["Footprint", "ModelPlan", "plan_model", "predict", "sample_values"]


_SAMPLE = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ModelPlan:
    """What happens to one model.

    Attributes:
        model: The model.
        inventory: Its tensors.
        layouts: One a block.
        shards: How each block is cut.
        remainder: Layout of what stays on the device.
        sources: Where every tensor's bytes come from, by its first name.
        checkpoint: The checkpoint that they come from, or None.
        attributes: Plain attributes that move to the device; each rank's own affair.
        attribute_layout: Their layout.
    """

    model: nn.Module
    inventory: Inventory
    layouts: tuple[BlockLayout, ...]
    shards: tuple[ShardPlan, ...]
    remainder: BlockLayout
    sources: dict[str, Source]
    checkpoint: Checkpoint | None
    attributes: tuple[Owned, ...]
    attribute_layout: BlockLayout

    @property
    def blocks(self) -> tuple[FoundBlock, ...]:
        """The streamed blocks."""
        return self.inventory.blocks

    def digest(self) -> bytes:
        """Return a sha256 over all layouts and cuts."""
        digest = hashlib.sha256()
        for layout, shard in zip(self.layouts, self.shards, strict=True):
            digest.update(layout.canonical())
            digest.update(f"|{shard.size}|{shard.nbytes}|".encode())
        digest.update(self.remainder.canonical())
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that an offload takes, predicted from layouts alone.

    Attributes:
        slots_nbytes: All slots.
        stages_nbytes: All stages.
        remainder_nbytes: What stays on the device.
        trailers_nbytes: What every shard's trailer must be, in gather mode.
        host_nbytes: This rank's shards.
        blocks_nbytes: All blocks whole, as they would lie on the device.
    """

    slots_nbytes: int
    stages_nbytes: int
    remainder_nbytes: int
    trailers_nbytes: int
    host_nbytes: int
    blocks_nbytes: int

    @property
    def device_nbytes(self) -> int:
        """All bytes on the device."""
        return self.slots_nbytes + self.stages_nbytes + self.remainder_nbytes + self.trailers_nbytes


def plan_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    blocks: Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None,
    checkpoint: str | os.PathLike[str] | None,
    size: int,
    alignment: int,
    device_type: str,
) -> ModelPlan:
    """Decide everything about ``model``; nothing is allocated, nothing is changed.

    Args:
        model: The model, with values or on meta.
        config: The settings.
        blocks: Its blocks, as ``find_blocks`` takes them.
        checkpoint: Path of its weights, or None.
        size: Ranks over which each block is cut; 1 in rank-local mode.
        alignment: In bytes, of tensors and shards.
        device_type: Of the compute device.

    Raises:
        ConfigError: The model cannot be offloaded like this.
        CheckpointError: The checkpoint is damaged or does not fit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {type(model).__name__}")
    found = find_blocks(model, blocks)
    opened = None if checkpoint is None else _open(model, checkpoint, config)
    inventory = take_inventory(
        model,
        found,
        resident=config.resident,
        stored=None if opened is None else frozenset(opened.tensors),
        device_type=device_type,
    )
    sources, opened = _prove(model, inventory, opened, config)
    attributes = _place_attributes(model, inventory, sources, device_type)
    layouts = tuple(
        BlockLayout.pack(block.name, (_spec(item, sources) for item in owned), alignment)
        for block, owned in zip(inventory.blocks, inventory.streamed, strict=True)
    )
    return ModelPlan(
        model,
        inventory,
        layouts,
        tuple(ShardPlan.cut(layout.nbytes, size, alignment) for layout in layouts),
        BlockLayout.pack("", (_spec(item, sources) for item in inventory.remainder), alignment),
        sources,
        opened,
        attributes,
        BlockLayout.pack("", (_spec(item, sources) for item in attributes), alignment),
    )


def _place_attributes(
    model: nn.Module, inventory: Inventory, sources: dict[str, Source], device_type: str
) -> tuple[Owned, ...]:
    """Return the plain attributes that move; those that cannot are warned about."""
    found, problems = find_attributes(model, inventory.remainder, device_type)
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        warnings.warn(
            f"{type(model).__name__} keeps tensors in plain attributes that stay where they are: "
            f"{'; '.join(problems[:4])}{more}. If its forward uses them on {device_type}, make "
            "them buffers (register_buffer(..., persistent=False))",
            DloWarning,
            stacklevel=2,
        )
    sources.update({item.name: ModuleTensor(item.tensor) for item in found})
    return tuple(found)


def _open(
    model: nn.Module, path: str | os.PathLike[str], config: OffloadConfig
) -> Checkpoint | None:
    try:
        return Checkpoint.open(path)
    except CheckpointError as error:
        if config.strict or any(t.is_meta for t in _tensors(model)):
            raise
        _warn_fallback(error)
        return None


def _prove(
    model: nn.Module, inventory: Inventory, opened: Checkpoint | None, config: OffloadConfig
) -> tuple[dict[str, Source], Checkpoint | None]:
    if opened is None:
        return prove_module(inventory), None
    try:
        return prove_checkpoint(inventory, opened), opened
    except CheckpointError as error:
        if config.strict or any(t.is_meta for t in _tensors(model)):
            raise
        _warn_fallback(error)
        opened.close()
        return prove_module(inventory), None


def _warn_fallback(error: CheckpointError) -> None:
    warnings.warn(
        f"{error}; strict=False: the model's own values are used instead", DloWarning, stacklevel=2
    )


def _tensors(model: nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def _spec(item: Owned, sources: dict[str, Source]) -> TensorSpec:
    tensor = item.tensor
    return TensorSpec(
        item.name, sources[item.name].dtype, tuple(tensor.shape), tuple(tensor.stride())
    )


def sample_values(plan: ModelPlan) -> bytes:
    """Return a sha256 over the first, middle and last bytes of every streamed tensor of the module.

    In gather mode each rank gives a part of every block; ranks whose values differ, after a random
    start without a seed for example, would compute with a mixture.
    """
    digest = hashlib.sha256()
    for layout in plan.layouts:
        for spec in layout.tensors:
            whole = spec.nbytes
            for start in sorted({0, max(0, whole // 2 - _SAMPLE), max(0, whole - _SAMPLE)}):
                part = torch.empty(min(_SAMPLE, whole - start), dtype=torch.uint8, device="cpu")
                plan.sources[spec.name].read(spec, start, start + part.numel(), part)
                digest.update(part.numpy().tobytes())
    return digest.digest()


def predict(plans: Sequence[ModelPlan], config: OffloadConfig) -> Footprint:
    """Return the bytes that an offload of ``plans`` takes."""
    shards = [shard for plan in plans for shard in plan.shards]
    gathers = any(shard.size > 1 for shard in shards)
    num_slots = min(config.depth, max(len(plan.layouts) for plan in plans))
    slot = max(shard.padded_nbytes for shard in shards)
    stage = max(shard.nbytes for shard in shards) if gathers else 0
    return Footprint(
        slots_nbytes=num_slots * slot,
        stages_nbytes=config.stages * stage,
        remainder_nbytes=sum(p.remainder.nbytes + p.attribute_layout.nbytes for p in plans),
        trailers_nbytes=trailers_nbytes(len(shards), shards[0].size),
        host_nbytes=sum(shard.nbytes for shard in shards),
        blocks_nbytes=sum(layout.nbytes for plan in plans for layout in plan.layouts),
    )
