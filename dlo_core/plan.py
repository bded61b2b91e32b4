"""The plan: all that is decided about a model before a byte is allocated or anything is touched."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import nn

from dlo_core.attributes import find_attributes
from dlo_core.checkpoint import Checkpoint
from dlo_core.discovery import FoundBlock, find_blocks
from dlo_core.errors import CheckpointError, ConfigError, DloWarning
from dlo_core.inventory import Inventory, Owned, take_inventory
from dlo_core.layout import BlockLayout, TensorSpec
from dlo_core.packed_cut import PackedCut
from dlo_core.packed_format import CHUNK_NBYTES
from dlo_core.post_load import Made, PostLoad, make_values, meta_attributes
from dlo_core.shard import ShardPlan
from dlo_core.source import (
    ConvertedTensor,
    ModuleTensor,
    Source,
    prove_checkpoint,
    prove_module,
    stored_recipes,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Sequence

    from dlo_core.config import OffloadConfig
    from dlo_core.key_map import KeyMap
    from dlo_core.recipe import Recipe
    from dlo_core.slicing import Slicing
    from dlo_core.transforms import Transforms

__all__ = ["Loading", "ModelPlan", "plan_model", "with_layouts"]


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
    shards: tuple[ShardPlan | PackedCut, ...]
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
    # Packed, each tensor begins at a chunk.
    step = max(alignment, CHUNK_NBYTES) if config.packed else alignment
    layouts = tuple(
        BlockLayout.pack(block.name, (_spec(item, sources) for item in owned), step)
        for block, owned in zip(inventory.blocks, inventory.streamed, strict=True)
    )
    return ModelPlan(
        model,
        inventory,
        layouts,
        _cuts(layouts, size, alignment, packed=config.packed),
        BlockLayout.pack("", (_spec(item, sources) for item in inventory.remainder), alignment),
        sources,
        None if opened is None else opened.checkpoint,
        made,
        attributes,
        BlockLayout.pack("", (_spec(item, sources) for item in attributes), alignment),
    )


def with_layouts(plan: ModelPlan, layouts: Sequence[BlockLayout], *, alignment: int) -> ModelPlan:
    """Return a raw plan of one rank whose blocks lie otherwise.

    Args:
        plan: The plan.
        layouts: Of its blocks.
        alignment: Of the shards, in bytes.
    """
    shards = tuple(ShardPlan.cut(layout.nbytes, 1, alignment) for layout in layouts)
    return replace(plan, layouts=tuple(layouts), shards=shards)


def _cuts(
    layouts: Sequence[BlockLayout], size: int, alignment: int, *, packed: bool | str | None
) -> tuple[ShardPlan | PackedCut, ...]:
    if packed == "auto":
        # Raw shards that a rank can pack by itself later: they begin and end at a chunk.
        alignment = max(alignment, CHUNK_NBYTES)
    elif packed:
        return tuple(PackedCut.cut(layout.nbytes, size, alignment) for layout in layouts)
    return tuple(ShardPlan.cut(layout.nbytes, size, alignment) for layout in layouts)


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
