"""The source: from where a tensor's bytes are read, the module itself or a checkpoint.

A plan to read a checkpoint is proven from its headers before anything is allocated: names, shapes
and dtypes, ties, and buffers that no checkpoint has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.key_map import map_keys
from dlo_core.layout import TensorSpec, contiguous_stride
from dlo_core.pieces import Extent, Laid, pieces_of
from dlo_core.rawbytes import bytes_of, move_bytes
from dlo_core.reading import Computed, Moved, Work, memory_of
from dlo_core.recipe import Recipe
from dlo_core.transforms import TransformTable, transforms_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from dlo_core.checkpoint import Checkpoint
    from dlo_core.inventory import Inventory, Owned
    from dlo_core.key_map import KeyMap
    from dlo_core.reading import Piece
    from dlo_core.slicing import Slicing
    from dlo_core.transforms import Convert, Transforms

__all__ = [
    "ConvertedTensor",
    "ModuleTensor",
    "Source",
    "StoredTensor",
    "prove_checkpoint",
    "prove_module",
    "stored_recipes",
]

_SHOWN = 5
_SAMPLE = 4096


class Source(Protocol):
    """Where one tensor's bytes come from."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of these bytes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint that they are read from, or None."""

    def pieces(self, spec: TensorSpec, start: int, stop: int, out: memoryview) -> Iterator[Piece]:
        """Yield what makes bytes ``[start, stop)`` of the tensor, as ``spec`` lays it out."""

    def read(self, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Write bytes ``[start, stop)`` of the tensor, as ``spec`` lays it out, to ``out``."""

    def canonical(self) -> list[object]:
        """Return what is equal on ranks that read the same, as JSON can hold it."""


class _Readable:
    """Reads a source here and now."""

    __slots__ = ()

    def read(self: Source, spec: TensorSpec, start: int, stop: int, out: torch.Tensor) -> None:
        """Write bytes ``[start, stop)`` of the tensor, as ``spec`` lays it out, to ``out``."""
        work = Work()
        work.add(self, spec, start, memory_of(out))
        work.run()


@dataclass(frozen=True, slots=True, eq=False)
class ModuleTensor(_Readable):
    """The bytes of a tensor that the module holds."""

    tensor: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's dtype."""
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def checkpoint(self) -> None:
        """There is none."""
        return

    def pieces(self, spec: TensorSpec, start: int, stop: int, out: memoryview) -> Iterator[Piece]:
        """Yield copies from the tensor."""
        # The local part of a DTensor lies on the device.
        yield from Moved.cut(bytes_of(self.tensor, spec.nbytes)[start:stop].cpu(), out)

    def canonical(self) -> list[object]:
        """Return that the module has it."""
        return ["module"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor(_Readable):
    """A tensor made from tensors in a checkpoint, as a recipe says."""

    checkpoint: Checkpoint
    recipe: Recipe

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the made tensor."""
        return self.recipe.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the made tensor."""
        return self.recipe.shape

    def pieces(
        self, spec: TensorSpec, start: int, stop: int, out: memoryview
    ) -> Iterator[Extent | Laid]:
        """Yield reads of just what these bytes need."""
        return pieces_of(self.recipe, spec, start, stop, out)

    def canonical(self) -> list[object]:
        """Return the recipe."""
        return self.recipe.canonical()


@dataclass(frozen=True, slots=True, eq=False)
class ConvertedTensor(_Readable):
    """A tensor that a function makes of a whole one."""

    inner: StoredTensor
    convert: Convert

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the made tensor."""
        return self.convert.dtype or self.inner.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the made tensor."""
        return self.inner.shape if self.convert.shape is None else self.convert.shape

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint of the whole tensor."""
        return self.inner.checkpoint

    def pieces(self, spec: TensorSpec, start: int, stop: int, out: memoryview) -> Iterator[Piece]:
        """Yield one piece, which reads the whole tensor."""
        if start < stop:
            first = self.inner.recipe.patches[0].stored
            yield Computed(first, _Conversion(self, spec, start, stop, out), stop - start)

    def canonical(self) -> list[object]:
        """Return the recipe and the result's form; of the function only its name is known."""
        name = getattr(self.convert.function, "__qualname__", type(self.convert.function).__name__)
        return [*self.inner.canonical(), name, str(self.dtype), self.shape]


@dataclass(frozen=True, slots=True, eq=False)
class _Conversion:
    """One call of a ``Convert`` function."""

    source: ConvertedTensor
    spec: TensorSpec
    start: int
    stop: int
    out: memoryview

    def __call__(self) -> None:
        source, spec = self.source, self.spec
        inner = source.inner
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.empty(inner.shape, dtype=inner.dtype, device="cpu")
            row = TensorSpec(spec.name, inner.dtype, inner.shape, contiguous_stride(inner.shape))
            inner.read(row, 0, row.nbytes, bytes_of(whole, row.nbytes))
            made = source.convert.function(whole)
            if (
                not isinstance(made, torch.Tensor)
                or tuple(made.shape) != source.shape
                or made.dtype != source.dtype
                or made.device.type != "cpu"
            ):
                got = (
                    f"{made.dtype} of shape {tuple(made.shape)} on {made.device}"
                    if isinstance(made, torch.Tensor)
                    else type(made).__name__
                )
                raise ConfigError(
                    f"transforms= of {spec.name!r}: {source.convert!r} made {got}; wanted "
                    f"{source.dtype} of shape {source.shape} on the CPU: say what it makes with "
                    "dtype= and shape="
                )
            laid = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device="cpu")
            laid.copy_(made)
            part = bytes_of(laid, spec.nbytes)[self.start : self.stop]
            move_bytes(torch.frombuffer(self.out, dtype=torch.uint8), part)


def prove_module(
    inventory: Inventory, made: Mapping[int, torch.Tensor] | None = None, *, kept: bool = False
) -> dict[str, Source]:
    """Return a source for every tensor, by its first name, all of them in the module.

    Args:
        inventory: The tensors.
        made: Values that ``post_load=`` made, by the id of the tensor that they are for.
        kept: Whether streamed tensors may be on meta, for their bytes are at hand.

    Raises:
        ConfigError: A tensor is on meta; names it.
    """
    values = {item.name: _value_of(item, made or {}) for item in inventory.owned()}
    at_hand = _streamed(inventory) if kept else frozenset()
    empty = [name for name, value in values.items() if value.is_meta and name not in at_hand]
    if empty:
        raise ConfigError(
            f"{_listed(empty)} on the meta device and has no values; pass checkpoint= with the "
            "path of its weights, or load the model first"
        )
    return {name: ModuleTensor(value) for name, value in values.items()}


def stored_recipes(checkpoint: Checkpoint, key_map: KeyMap) -> dict[str, Recipe]:
    """Return recipes by the names that the model should have.

    Raises:
        ConfigError: The key map holds something that is no rule.
        CheckpointError: A rule does not fit the checkpoint.
    """
    plain = {name: Recipe.of(stored) for name, stored in checkpoint.tensors.items()}
    try:
        return map_keys(plain, key_map)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {str(checkpoint.path)!r}: {error}") from error


def prove_checkpoint(
    inventory: Inventory,
    checkpoint: Checkpoint,
    recipes: Mapping[str, Recipe],
    *,
    transforms: Transforms = None,
    made: Mapping[int, torch.Tensor] | None = None,
    slicing: Slicing | None = None,
    kept: bool = False,
) -> dict[str, Source]:
    """Return a source for every tensor, by its first name, having compared all headers.

    A tensor that the checkpoint names under any of its tied names comes from there. A buffer that
    it lacks comes from the module, or is what ``post_load=`` made.

    Args:
        inventory: The tensors.
        checkpoint: The checkpoint.
        recipes: What it has, by the model's names.
        transforms: What is done to its tensors.
        made: Values that ``post_load=`` made, by the id of the tensor that they are for.
        slicing: Which part of each this tensor-parallel rank has; None: all of it.
        kept: Whether streamed tensors may be without a source, for their bytes are at hand.

    Raises:
        ConfigError: A transform does not fit or is for no tensor.
        CheckpointError: A tensor is missing, unknown, or has another shape or dtype; names them all
            up to a few.
    """
    at_hand = _streamed(inventory) if kept else frozenset()
    proof = _Proof(
        checkpoint, recipes, TransformTable(transforms), made or {}, slicing, at_hand=at_hand
    )
    for item in inventory.owned():
        proof.add(item)
    return proof.end()


class _Proof:
    """Compares tensors of a model with a checkpoint, one after the other."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        recipes: Mapping[str, Recipe],
        transforms: TransformTable,
        made: Mapping[int, torch.Tensor],
        slicing: Slicing | None,
        *,
        at_hand: frozenset[str],
    ) -> None:
        self._checkpoint = checkpoint
        self._recipes = recipes
        self._transforms = transforms
        self._made = made
        self._slicing = slicing
        self._at_hand = at_hand
        self._sources: dict[str, Source] = {}
        self._problems: list[str] = []
        self._used: set[str] = set()
        self._missing: list[str] = []
        self._lost: list[str] = []

    def add(self, item: Owned) -> None:
        keys = [name for name in item.names if name in self._recipes]
        self._used.update(keys)
        if keys:
            steps = self._transforms.of(item.names)
            sources = [self._stored(item, key, steps) for key in keys]
            for key, source in zip(keys, sources, strict=True):
                self._problems += _compare(item, key, source)
                if source.dtype != sources[0].dtype:
                    self._problems.append(
                        f"{key!r} is {source.dtype} but {keys[0]!r}, which is tied to it, is "
                        f"{sources[0].dtype}"
                    )
                elif not self._problems and not _sampled_alike(sources[0], source):
                    self._problems.append(
                        f"{key!r} and {keys[0]!r} are one tensor in the model (tied), but their "
                        "bytes differ: build the model without that tie, or leave one of them out "
                        f"with key_map=dlo_core.Ignore({key!r})"
                    )
            self._sources[item.name] = sources[0]
            if item.is_parameter and any(id(e.original) in self._made for e in item.entries):
                self._problems.append(
                    f"{keys[0]!r} is in it, and post_load= made it too: let only one of them"
                )
            return
        value = _value_of(item, self._made)
        if value is item.tensor and item.persistent:
            self._missing.append(item.name)
        elif value.is_meta and item.name not in self._at_hand:
            self._lost.append(item.name)
        else:
            self._sources[item.name] = ModuleTensor(value)

    def end(self) -> dict[str, Source]:
        if self._slicing is not None:
            self._slicing.check_used()
        unknown = [key for key in self._recipes if key not in self._used]
        if self._missing:
            self._problems.append(f"{_listed(self._missing)} missing from it")
        if unknown:
            self._problems.append(f"{_listed(unknown)} in it but not in the model")
        if self._lost:
            self._problems.append(
                f"{_listed(self._lost)} on meta and never in a checkpoint (non-persistent "
                "buffers): pass post_load= with a function that makes them, or build the model "
                "with its buffers real, for example under accelerate.init_empty_weights()"
            )
        if self._problems:
            raise CheckpointError(
                f"checkpoint {str(self._checkpoint.path)!r} does not fit the model: "
                + "; ".join(self._problems)
            )
        if unused := self._transforms.unused():
            raise ConfigError(
                f"transforms= has {unused[0]!r}, but the checkpoint gives the model no tensor of "
                "that name"
            )
        return self._sources

    def _stored(
        self, item: Owned, key: str, steps: Sequence[object]
    ) -> StoredTensor | ConvertedTensor:
        recipe, convert = transforms_for(key, self._recipes[key], steps)  # type: ignore[arg-type]
        cut = None if self._slicing is None else self._slicing.cut_of(item, recipe.shape)
        if cut is not None and convert is not None:
            raise ConfigError(
                f"transforms= of {key!r}: {convert!r} makes a whole tensor, of which a "
                "tensor-parallel rank has only a part (tp_plan=); convert the checkpoint before"
            )
        if cut is not None:
            recipe = cut.apply(recipe)
        stored = StoredTensor(self._checkpoint, recipe)
        return stored if convert is None else ConvertedTensor(stored, convert)


def _sampled_alike(
    first: StoredTensor | ConvertedTensor, other: StoredTensor | ConvertedTensor
) -> bool:
    """Return whether two tensors have equal bytes at the beginning, in the middle and at the end.

    All of them would be read a second time otherwise. Of what a function makes, its input counts.
    """
    pair = [each.inner if isinstance(each, ConvertedTensor) else each for each in (first, other)]
    if pair[0].canonical() == pair[1].canonical():
        return True
    rows = []
    for each in pair:
        spec = TensorSpec("", each.dtype, each.shape, contiguous_stride(each.shape))
        length = min(_SAMPLE, spec.nbytes)
        starts = sorted({0, (spec.nbytes - length) // 2, spec.nbytes - length})
        run = torch.empty(len(starts) * length, dtype=torch.uint8, device="cpu")
        for number, start in enumerate(starts):
            each.read(spec, start, start + length, run[number * length : (number + 1) * length])
        rows.append(run)
    return torch.equal(*rows)


def _streamed(inventory: Inventory) -> frozenset[str]:
    return frozenset(item.name for owned in inventory.streamed for item in owned)


def _value_of(item: Owned, made: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Return what ``post_load=`` made for a tensor, else the tensor."""
    for entry in item.entries:
        if id(entry.original) in made:
            return made[id(entry.original)]
    return item.tensor


def _compare(item: Owned, key: str, source: Source) -> list[str]:
    problems = []
    tensor = item.tensor
    if source.shape != tuple(tensor.shape):
        problems.append(f"{key!r} has shape {source.shape}, the model wants {tuple(tensor.shape)}")
    # A parameter on meta takes the dtype on disk; one with values keeps its own.
    if not tensor.is_meta and source.dtype != tensor.dtype:
        problems.append(
            f"{key!r} is {source.dtype}, but the model's own tensor has values and is "
            f"{tensor.dtype}: convert it while it is read (transforms={{{key!r}: "
            f"dlo_core.Cast({tensor.dtype})}}), or build the model on meta to take the "
            "checkpoint's dtype"
        )
    if any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)):
        problems.append(f"{key!r} is an expanded tensor in the model: call .contiguous() on it")
    return problems


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{shown}{more} {'is' if len(names) == 1 else 'are'}"
