"""Transforms: what is done to a tensor of a checkpoint before it becomes one of the model.

Each knows dtype and shape of its result before anything is read. All but ``Convert`` can make any
part of a tensor from the part's own bytes, piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from dlo_core.errors import ConfigError
from dlo_core.recipe import Recipe, RecipeError

__all__ = [
    "Cast",
    "Convert",
    "Reshape",
    "Transform",
    "TransformTable",
    "Transforms",
    "Transpose",
    "transforms_for",
]


@dataclass(frozen=True, slots=True)
class Cast:
    """Convert to a dtype, element by element, as ``Tensor.to`` does.

    Attributes:
        dtype: The dtype.
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        """Check the dtype.

        Raises:
            ConfigError: It is none.
        """
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"Cast() wants a torch.dtype; got {self.dtype!r}")

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the result."""
        return recipe.cast(self.dtype)


@dataclass(frozen=True, slots=True)
class Transpose:
    """Swap two dimensions; the result is row-major again.

    Attributes:
        dim0: One dimension.
        dim1: The other.
    """

    dim0: int = 0
    dim1: int = 1

    def __post_init__(self) -> None:
        """Check the dimensions.

        Raises:
            ConfigError: One is no whole number.
        """
        if type(self.dim0) is not int or type(self.dim1) is not int:
            raise ConfigError(f"{self!r}: dimensions must be whole numbers")

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the result."""
        return recipe.transpose(self.dim0, self.dim1)


@dataclass(frozen=True, slots=True)
class Reshape:
    """See the same elements in the same order in another shape.

    Attributes:
        shape: The shape; one -1 stands for what is left.
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check the shape.

        Raises:
            ConfigError: It is no sequence of whole numbers.
        """
        if not isinstance(self.shape, tuple | list) or any(type(n) is not int for n in self.shape):
            raise ConfigError(f"Reshape() wants a tuple of whole numbers; got {self.shape!r}")
        object.__setattr__(self, "shape", tuple(self.shape))

    def apply(self, recipe: Recipe) -> Recipe:
        """Return the recipe of the result."""
        return recipe.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Convert:
    """Give the whole tensor to a function, for what depends on all of its values.

    Online quantisation is such a thing. It needs the whole tensor, so it cannot be used in gather
    mode with a checkpoint, where each rank reads its own bytes only. It must be the last of a
    tensor's transforms. The function is called once for each load and each restore, maybe in a
    thread, and must return the same bits each time.

    Attributes:
        function: From a tensor on the host to a new one.
        dtype: Of the result; None: unchanged.
        shape: Of the result; None: unchanged.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            ConfigError: One is of a wrong kind.
        """
        if not callable(self.function):
            raise ConfigError(f"Convert() wants a function; got {self.function!r}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise ConfigError(f"Convert(dtype=) wants a torch.dtype; got {self.dtype!r}")
        if self.shape is not None:
            object.__setattr__(self, "shape", tuple(self.shape))


Transform = Cast | Transpose | Reshape | Convert
Transforms = (
    Mapping[str, Transform | Sequence[Transform]]
    | Callable[[str], Transform | Sequence[Transform] | None]
    | None
)


class TransformTable:
    """The transforms of one model, by the names of its tensors."""

    def __init__(self, given: Transforms) -> None:
        """Check what was given.

        Raises:
            ConfigError: It is no mapping and no function, or holds something else than transforms.
        """
        self._function = given if callable(given) else None
        self._exact: dict[str, tuple[Transform, ...]] = {}
        self._patterns: dict[str, tuple[Transform, ...]] = {}
        self._used: set[str] = set()
        if given is None or callable(given):
            return
        if not isinstance(given, Mapping):
            raise ConfigError(
                "transforms= must be a mapping from names of the model's tensors to transforms, or "
                f"a function of the name; got {type(given).__name__}"
            )
        for name, value in given.items():
            if not isinstance(name, str):
                raise ConfigError(f"transforms= wants names of tensors as keys; got {name!r}")
            table = self._patterns if set(name) & set("*?[") else self._exact
            table[name] = _chain(name, value)

    def of(self, names: Sequence[str]) -> tuple[Transform, ...]:
        """Return the transforms of the tensor that has these names; an exact name goes first."""
        for name in names:
            if self._function is not None:
                value = self._function(name)
                if value is not None:
                    return _chain(name, value)
            elif name in self._exact:
                self._used.add(name)
                return self._exact[name]
        for pattern, value in self._patterns.items():
            if any(fnmatchcase(name, pattern) for name in names):
                self._used.add(pattern)
                return value
        return ()

    def unused(self) -> list[str]:
        """Return the names and patterns that no tensor had; nothing is accepted and ignored."""
        return [name for name in (*self._exact, *self._patterns) if name not in self._used]


def transforms_for(
    name: str, recipe: Recipe, steps: Sequence[Transform]
) -> tuple[Recipe, Convert | None]:
    """Return the recipe after all steps, and the ``Convert`` at their end if there is one.

    Raises:
        ConfigError: A step does not fit; names the tensor and the step.
    """
    for number, step in enumerate(steps):
        if isinstance(step, Convert):
            if number < len(steps) - 1:
                raise ConfigError(f"transforms= of {name!r}: Convert must be the last of them")
            return recipe, step
        try:
            recipe = step.apply(recipe)
        except RecipeError as error:
            raise ConfigError(f"transforms= of {name!r}: {step!r} does not fit: {error}") from error
    return recipe, None


def _chain(name: str, value: Any) -> tuple[Transform, ...]:
    steps = tuple(value) if isinstance(value, list | tuple) else (value,)
    for step in steps:
        if not isinstance(step, Cast | Transpose | Reshape | Convert):
            raise ConfigError(
                f"transforms= of {name!r} must be Cast, Transpose, Reshape or Convert, or a "
                f"sequence of them; got {step!r}"
                + (
                    ": wrap a function in Convert(function, dtype=..., shape=...), which says what "
                    "it makes"
                    if callable(step)
                    else ""
                )
            )
    return steps
