"""The plan: all that is decided about a model before a byte is allocated or anything is touched."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dlo_core.attributes import find_attributes
from dlo_core.checkpoint import Checkpoint
from dlo_core.discovery import FoundBlock, find_blocks
from dlo_core.errors import CheckpointError, ConfigError, DloWarning
from dlo_core.inventory import Inventory, Owned, take_inventory
from dlo_core.layout import BlockLayout, TensorSpec
from dlo_core.post_load import Made, PostLoad, make_values, meta_attributes
from dlo_core.residency import Budget, Ring, choose_residents, ring_of
from dlo_core.shard import ShardPlan, trailers_nbytes
from dlo_core.source import (
    ConvertedTensor,
    ModuleTensor,
    Source,
    prove_checkpoint,
    prove_module,
    stored_recipes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.config import OffloadConfig
    from dlo_core.key_map import KeyMap
    from dlo_core.recipe import Recipe
    from dlo_core.slicing import Slicing
    from dlo_core.transforms import Transforms

__all__ = [
    "Footprint",
    "Loading",
    "ModelPlan",
    "files_of",
    "own_values",
    "plan_model",
    "plan_residents",
    "plan_ring",
    "predict",
    "resident_numbers",
    "sample_stored",
    "sample_values",
]


_SAMPLE = 1024
_SAMPLED_BLOCKS = 16


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
        made: What ``post_load=`` made.
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
    made: Made
    attributes: tuple[Owned, ...]
    attribute_layout: BlockLayout

    @property
    def blocks(self) -> tuple[FoundBlock, ...]:
        """The streamed blocks."""
        return self.inventory.blocks

    def digest(self) -> bytes:
        """Return a sha256 over all layouts, cuts and recipes."""
        digest = hashlib.sha256()
        for layout, shard in zip(self.layouts, self.shards, strict=True):
            digest.update(layout.canonical())
            digest.update(f"|{shard.size}|{shard.nbytes}|".encode())
        digest.update(self.remainder.canonical())
        recipes = {name: source.canonical() for name, source in self.sources.items()}
        digest.update(json.dumps(recipes, separators=(",", ":"), sort_keys=True).encode())
        return digest.digest()


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that an offload takes, predicted from layouts alone.

    Attributes:
        slots_nbytes: All slots.
        stages_nbytes: All stages.
        remainder_nbytes: What stays on the device.
        trailers_nbytes: What every shard's trailer must be, in gather mode.
        host_nbytes: Host memory for this rank's shards; memory that ranks share counts in whole,
            the checkpoint's own pages do not.
        blocks_nbytes: All blocks whole, as they would lie on the device.
        pinned_nbytes: Of ``host_nbytes``, what is to be page-locked.
        shared_nbytes: Of ``host_nbytes``, what the node's ranks have in common.
        pageable_nbytes: Of ``host_nbytes``, what is neither.
        staging_nbytes: Of ``host_nbytes``, buffers through which the mapped tier goes.
        residents_nbytes: Blocks that stay on the device; while they are there.
    """

    slots_nbytes: int
    stages_nbytes: int
    remainder_nbytes: int
    trailers_nbytes: int
    host_nbytes: int
    blocks_nbytes: int
    pinned_nbytes: int = 0
    shared_nbytes: int = 0
    pageable_nbytes: int = 0
    staging_nbytes: int = 0
    residents_nbytes: int = 0

    @property
    def device_nbytes(self) -> int:
        """All bytes on the device."""
        ring = self.slots_nbytes + self.stages_nbytes
        return ring + self.residents_nbytes + self.remainder_nbytes + self.trailers_nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Loading:
    """How one model's values are had.

    Attributes:
        checkpoint: Path of its weights, or None for the model's own values.
        key_map: From the checkpoint's names to the model's.
        transforms: What is done to the checkpoint's tensors.
        post_load: Makes what no checkpoint has.
        kept: Whether the blocks' bytes are at hand, so that tensors on meta need no source.
    """

    checkpoint: str | os.PathLike[str] | None = None
    key_map: KeyMap = None
    transforms: Transforms = None
    post_load: PostLoad = None
    kept: bool = False


def plan_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    blocks: Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None,
    loading: Loading,
    size: int,
    alignment: int,
    device_type: str,
    slicing: Slicing | None = None,
) -> ModelPlan:
    """Decide everything about ``model``; nothing is allocated, nothing is changed.

    Args:
        model: The model, with values or on meta.
        config: The settings.
        blocks: Its blocks, as ``find_blocks`` takes them.
        loading: Where its values come from.
        size: Ranks over which each block is cut; 1 in rank-local mode.
        alignment: In bytes, of tensors and shards.
        device_type: Of the compute device.
        slicing: How a tensor-parallel rank's part is cut out of the checkpoint.

    Raises:
        ConfigError: The model cannot be offloaded like this.
        CheckpointError: The checkpoint is damaged or does not fit.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"offload() needs a torch.nn.Module; got {type(model).__name__}")
    if loading.checkpoint is None and (loading.key_map or loading.transforms):
        what = "key_map=" if loading.key_map else "transforms="
        raise ConfigError(f"{what} is about a checkpoint's tensors: pass checkpoint= too")
    found = find_blocks(model, blocks)
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    strict = config.strict or on_meta
    opened = _open(loading, strict=strict, direct_io=config.direct_io)
    try:
        made = make_values(model, loading.post_load, () if opened is None else opened.recipes)
        inventory = take_inventory(
            model,
            found,
            resident=config.resident,
            stored=None if opened is None else frozenset(opened.recipes),
            device_type=device_type,
        )
        sources, opened = _prove(inventory, opened, loading, made, slicing, strict=strict)
        for name, source in sources.items():
            if size > 1 and isinstance(source, ConvertedTensor):
                raise ConfigError(_NO_CONVERT.format(name=name))
        if opened is not None and on_meta:
            meta_attributes(model, made)
    except BaseException:
        if opened is not None:
            opened.checkpoint.close()
        raise
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
        None if opened is None else opened.checkpoint,
        made,
        attributes,
        BlockLayout.pack("", (_spec(item, sources) for item in attributes), alignment),
    )


_NO_CONVERT = (
    "transforms= of {name!r}: Convert needs the whole tensor, but in gather mode each rank reads "
    "its own part of the checkpoint only (online quantisation is such a transform): use "
    "use_allgather=False, or disable online quantisation (convert the checkpoint beforehand, or "
    "load the model first and leave checkpoint= out)"
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


@dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint, and what it has by the model's names."""

    checkpoint: Checkpoint
    recipes: dict[str, Recipe]


def _open(loading: Loading, *, strict: bool, direct_io: bool) -> _Opened | None:
    if loading.checkpoint is None:
        return None
    try:
        checkpoint = Checkpoint.open(loading.checkpoint, direct_io=direct_io)
        return _Opened(checkpoint, stored_recipes(checkpoint, loading.key_map))
    except CheckpointError as error:
        if strict:
            raise
        _warn_fallback(error)
        return None


def _prove(
    inventory: Inventory,
    opened: _Opened | None,
    loading: Loading,
    made: Made,
    slicing: Slicing | None,
    *,
    strict: bool,
) -> tuple[dict[str, Source], _Opened | None]:
    if opened is None:
        return prove_module(inventory, made.values, kept=loading.kept), None
    try:
        sources = prove_checkpoint(
            inventory,
            opened.checkpoint,
            opened.recipes,
            transforms=loading.transforms,
            made=made.values,
            slicing=slicing,
            kept=loading.kept,
        )
    except CheckpointError as error:
        if strict:
            raise
        _warn_fallback(error)
        opened.checkpoint.close()
        return prove_module(inventory, made.values), None
    return sources, opened


def _warn_fallback(error: CheckpointError) -> None:
    warnings.warn(
        f"{error}; strict=False: the model's own values are used instead", DloWarning, stacklevel=2
    )


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


def files_of(plan: ModelPlan) -> str:
    """Return what is equal on this node for the same files of a checkpoint, unchanged.

    Nothing is read. Two files with the same content differ.
    """
    told = []
    assert plan.checkpoint is not None
    for path in sorted({tensor.path for tensor in plan.checkpoint.tensors.values()}):
        status = os.stat(path)
        told.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
    return hashlib.sha256(repr(told).encode()).hexdigest()


def sample_stored(plan: ModelPlan) -> bytes:
    """Return a sha256 over a few bytes of a few blocks of the checkpoint.

    As ``sample_values``, for ranks that read different files; but reads are slow in some places, so
    it is one from each of at most 16 blocks.
    """
    digest = hashlib.sha256()
    step = -(-len(plan.layouts) // _SAMPLED_BLOCKS)
    for layout in plan.layouts[::step]:
        spec = max(layout.tensors, key=lambda spec: spec.nbytes)
        start = max(0, spec.nbytes // 2 - _SAMPLE)
        part = torch.empty(min(_SAMPLE, spec.nbytes - start), dtype=torch.uint8, device="cpu")
        plan.sources[spec.name].read(spec, start, start + part.numel(), part)
        digest.update(part.numpy().tobytes())
    return digest.digest()


def own_values(plan: ModelPlan) -> dict[str, str]:
    """Return digests of the streamed tensors that each rank made itself, by name.

    That is what ``post_load=`` made and what a checkpoint lacks: each rank gives a part of it.
    """
    made = {id(tensor) for tensor in plan.made.values.values()}
    digests: dict[str, str] = {}
    for layout in plan.layouts:
        for spec in layout.tensors:
            source = plan.sources[spec.name]
            if not isinstance(source, ModuleTensor) or source.tensor.is_meta:
                continue
            if plan.checkpoint is None and id(source.tensor) not in made:
                continue
            run = torch.empty(spec.nbytes, dtype=torch.uint8, device="cpu")
            source.read(spec, 0, spec.nbytes, run)
            array: Any = run.numpy()
            digests[spec.name] = hashlib.sha256(memoryview(array)).hexdigest()[:24]
    return digests


def plan_residents(plans: Sequence[ModelPlan], config: OffloadConfig) -> tuple[frozenset[int], ...]:
    """Return the numbers of the blocks that stay, of each model.

    Raises:
        ConfigError: There are not so many, or the budget is too small.
    """
    return choose_residents(
        [plan.shards for plan in plans],
        config.resident_layers,
        placement=config.resident_placement,
        depth=config.depth,
        stages=_num_stages(plans, config),
        budget=Budget(
            config.device_budget_bytes, _remainder_nbytes(plans) + _trailers_nbytes(plans)
        ),
    )


def resident_numbers(
    plans: Sequence[ModelPlan], residents: Sequence[frozenset[int]]
) -> tuple[int, ...]:
    """Return the numbers of the blocks that stay, counted over all models."""
    found: list[int] = []
    first = 0
    for plan, stay in zip(plans, residents, strict=True):
        found += [first + number for number in sorted(stay)]
        first += len(plan.layouts)
    return tuple(found)


def plan_ring(
    plans: Sequence[ModelPlan], config: OffloadConfig, residents: Sequence[frozenset[int]]
) -> Ring:
    """Return the slots and stages for the blocks that do not stay."""
    cuts = [plan.shards for plan in plans]
    return ring_of(cuts, residents, depth=config.depth, stages=_num_stages(plans, config))


def predict(
    plans: Sequence[ModelPlan], config: OffloadConfig, residents: Sequence[frozenset[int]]
) -> Footprint:
    """Return the bytes that an offload of ``plans`` takes.

    Args:
        plans: The models.
        config: The settings.
        residents: Of each model, the numbers of the blocks that stay.
    """
    ring = plan_ring(plans, config, residents)
    return Footprint(
        slots_nbytes=ring.num_slots * ring.slot_nbytes,
        stages_nbytes=ring.num_stages * ring.stage_nbytes,
        remainder_nbytes=_remainder_nbytes(plans),
        trailers_nbytes=_trailers_nbytes(plans),
        host_nbytes=sum(shard.nbytes for plan in plans for shard in plan.shards),
        blocks_nbytes=sum(layout.nbytes for plan in plans for layout in plan.layouts),
        residents_nbytes=sum(
            plan.shards[number].padded_nbytes
            for plan, stay in zip(plans, residents, strict=True)
            for number in stay
        ),
    )


def _num_stages(plans: Sequence[ModelPlan], config: OffloadConfig) -> int:
    return config.stages if any(shard.size > 1 for plan in plans for shard in plan.shards) else 0


def _remainder_nbytes(plans: Sequence[ModelPlan]) -> int:
    return sum(plan.remainder.nbytes + plan.attribute_layout.nbytes for plan in plans)


def _trailers_nbytes(plans: Sequence[ModelPlan]) -> int:
    shards = [shard for plan in plans for shard in plan.shards]
    return trailers_nbytes(len(shards), shards[0].size)
