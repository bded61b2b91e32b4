"""The key map: from the names in a checkpoint to the names in a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlo_core.errors import CheckpointError, ConfigError
from dlo_core.recipe import Recipe, RecipeError

__all__ = [
    "AddPrefix",
    "Fuse",
    "Ignore",
    "KeyMap",
    "KeyRule",
    "Split",
    "StripPrefix",
    "map_keys",
]


@dataclass(frozen=True, slots=True)
class StripPrefix:
    """Take a prefix off the names that begin with it; the others stay.

    Attributes:
        prefix: The prefix, with its dot.
    """

    prefix: str

    def __post_init__(self) -> None:
        """Check the prefix.

        Raises:
            ConfigError: It is no text, or empty.
        """
        _check_names("StripPrefix", self.prefix)

    def rename(self, name: str) -> str:
        """Return the name without the prefix."""
        return name.removeprefix(self.prefix)


@dataclass(frozen=True, slots=True)
class AddPrefix:
    """Put a prefix before every name.

    Attributes:
        prefix: The prefix, with its dot.
    """

    prefix: str

    def __post_init__(self) -> None:
        """Check the prefix.

        Raises:
            ConfigError: It is no text, or empty.
        """
        _check_names("AddPrefix", self.prefix)

    def rename(self, name: str) -> str:
        """Return the name with the prefix."""
        return self.prefix + name


@dataclass(frozen=True, slots=True)
class Fuse:
    """Make one tensor of the model from several of the checkpoint, one behind the other.

    ``*`` stands for one part of a dotted name, the same in all names::

        Fuse("blocks.*.qkv.weight", ("blocks.*.q.weight", "blocks.*.k.weight", "blocks.*.v.weight"))

    Attributes:
        name: The tensor of the model.
        sources: Tensors of the checkpoint, in order.
        dim: Dimension along which they lie one behind the other.
    """

    name: str
    sources: tuple[str, ...]
    dim: int = 0

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ConfigError: There are fewer than two sources, or their ``*`` do not match.
        """
        object.__setattr__(self, "sources", _several("Fuse", self.sources, self.name, self.dim))


@dataclass(frozen=True, slots=True)
class Split:
    """Make several tensors of the model from one of the checkpoint; ``*`` as in ``Fuse``.

    Attributes:
        source: The tensor of the checkpoint.
        names: Tensors of the model, in order.
        dim: Dimension along which it is cut.
        sizes: Length of each along it; None: all alike.
    """

    source: str
    names: tuple[str, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check the names.

        Raises:
            ConfigError: There are fewer than two names, their ``*`` do not match, or there is not
                one size for each.
        """
        object.__setattr__(self, "names", _several("Split", self.names, self.source, self.dim))
        if self.sizes is None:
            return
        sizes = self.sizes
        if not isinstance(sizes, tuple | list) or any(type(n) is not int or n < 0 for n in sizes):
            raise ConfigError(f"Split(sizes=) wants whole numbers; got {sizes!r}")
        if len(sizes) != len(self.names):
            raise ConfigError(f"Split() of {len(self.names)} names got {len(sizes)} sizes")
        object.__setattr__(self, "sizes", tuple(sizes))


@dataclass(frozen=True, slots=True)
class Ignore:
    """Leave the tensors of a checkpoint unread whose names match.

    Attributes:
        pattern: A name; ``*`` stands for any text, dots included.
    """

    pattern: str

    def __post_init__(self) -> None:
        """Check the pattern.

        Raises:
            ConfigError: It is no text, or empty.
        """
        _check_names("Ignore", self.pattern)


KeyRule = (
    StripPrefix
    | AddPrefix
    | Fuse
    | Split
    | Ignore
    | Mapping[str, str]
    | Callable[[str], str | None]
)
KeyMap = KeyRule | Sequence[KeyRule] | None


def map_keys(recipes: Mapping[str, Recipe], key_map: KeyMap) -> dict[str, Recipe]:
    """Return the recipes by the names that the rules give them, one rule after the other.

    Args:
        recipes: By the checkpoint's own names.
        key_map: The rules.

    Raises:
        ConfigError: A rule is none.
        CheckpointError: A rule applies to nothing, gives one name twice, or does not fit.
    """
    made = dict(recipes)
    for rule in rules_of(key_map):
        if isinstance(rule, Fuse):
            made = _fuse(made, rule)
        elif isinstance(rule, Split):
            made = _split(made, rule)
        elif isinstance(rule, Ignore):
            made = _ignore(made, rule)
        else:
            made = _rename(made, rule)
    return made


def rules_of(key_map: Any) -> tuple[Any, ...]:
    """Return the rules one by one.

    Raises:
        ConfigError: One is no rule.
    """
    if key_map is None:
        return ()
    rules = tuple(key_map) if isinstance(key_map, list | tuple) else (key_map,)
    for rule in rules:
        known = isinstance(rule, StripPrefix | AddPrefix | Fuse | Split | Ignore | Mapping)
        if not known and not callable(rule):
            raise ConfigError(
                "key_map= wants StripPrefix, AddPrefix, Fuse, Split, Ignore, a mapping from the "
                "checkpoint's names to the model's, a function between them, or a sequence of "
                f"these; got {rule!r}"
            )
        if isinstance(rule, Mapping):
            for pair in rule.items():
                _check_names("key_map= (a mapping)", *pair)
    return rules


def _rename(recipes: Mapping[str, Recipe], rule: Any) -> dict[str, Recipe]:
    made: dict[str, Recipe] = {}
    before: dict[str, str] = {}
    if isinstance(rule, Mapping):
        unknown = [name for name in rule if name not in recipes]
        if unknown:
            raise CheckpointError(f"key_map= renames {unknown[0]!r}, which the checkpoint lacks")
    for name, recipe in recipes.items():
        new = _new_name(rule, name)
        if new is None:
            continue
        if not isinstance(new, str) or not new:
            raise ConfigError(f"key_map= made {new!r} of {name!r}; wanted a name, or None")
        if new in made:
            raise CheckpointError(f"key_map= makes {new!r} of both {before[new]!r} and {name!r}")
        made[new], before[new] = recipe, name
    if isinstance(rule, StripPrefix) and not any(name.startswith(rule.prefix) for name in recipes):
        raise CheckpointError(f"key_map= has {rule!r}, but no name begins with it")
    return made


def _new_name(rule: Any, name: str) -> Any:
    if isinstance(rule, StripPrefix | AddPrefix):
        return rule.rename(name)
    if isinstance(rule, Mapping):
        return rule.get(name, name)
    try:
        return rule(name)
    except Exception as error:
        raise ConfigError(
            f"key_map= raised {type(error).__name__} for {name!r}: {error}"
        ) from error


def _fuse(recipes: Mapping[str, Recipe], rule: Fuse) -> dict[str, Recipe]:
    made = dict(recipes)
    for stars in _matches(recipes, rule.sources[0], rule):
        sources = [_with_stars(source, stars) for source in rule.sources]
        name = _with_stars(rule.name, stars)
        lacking = [source for source in sources if source not in made]
        if lacking:
            raise CheckpointError(f"key_map= makes {name!r} from {lacking[0]!r}, which is missing")
        parts = [made.pop(source) for source in sources]
        if name in made:
            raise CheckpointError(f"key_map= makes {name!r}, which the checkpoint has already")
        try:
            made[name] = Recipe.concat(parts, rule.dim)
        except RecipeError as error:
            raise CheckpointError(f"key_map= cannot make {name!r}: {error}") from error
    return made


def _split(recipes: Mapping[str, Recipe], rule: Split) -> dict[str, Recipe]:
    made = dict(recipes)
    for stars in _matches(recipes, rule.source, rule):
        source = _with_stars(rule.source, stars)
        whole = made.pop(source)
        try:
            sizes = _sizes(whole, rule)
            start = 0
            for pattern, size in zip(rule.names, sizes, strict=True):
                name = _with_stars(pattern, stars)
                if name in made:
                    raise CheckpointError(
                        f"key_map= makes {name!r}, which the checkpoint has already"
                    )
                made[name] = whole.narrow(rule.dim, start, size)
                start += size
        except RecipeError as error:
            raise CheckpointError(f"key_map= cannot split {source!r}: {error}") from error
    return made


def _sizes(whole: Recipe, rule: Split) -> tuple[int, ...]:
    length, count = whole.shape[whole.dim(rule.dim)], len(rule.names)
    if rule.sizes is None:
        if length % count:
            raise RecipeError(f"{length} entries do not make {count} equal parts; give sizes=")
        return (length // count,) * count
    if sum(rule.sizes) != length:
        raise RecipeError(f"its {length} entries are not the {sum(rule.sizes)} of sizes=")
    return rule.sizes


def _ignore(recipes: Mapping[str, Recipe], rule: Ignore) -> dict[str, Recipe]:
    pattern = re.compile(".*".join(map(re.escape, rule.pattern.split("*"))), re.DOTALL)
    made = {name: recipe for name, recipe in recipes.items() if not pattern.fullmatch(name)}
    if len(made) == len(recipes):
        raise CheckpointError(f"key_map= has {rule!r}, but the checkpoint has no such name")
    return made


def _matches(recipes: Mapping[str, Recipe], pattern: str, rule: object) -> list[tuple[str, ...]]:
    """Return what the stars of ``pattern`` stand for, one row for each name that it matches."""
    compiled = re.compile(r"([^.]+)".join(map(re.escape, pattern.split("*"))))
    rows = [match.groups() for name in recipes if (match := compiled.fullmatch(name))]
    if not rows:
        raise CheckpointError(f"key_map= has {rule!r}, but the checkpoint has no {pattern!r}")
    return rows


def _with_stars(pattern: str, stars: Sequence[str]) -> str:
    parts = pattern.split("*")
    return parts[0] + "".join(star + part for star, part in zip(stars, parts[1:], strict=True))


def _several(what: str, many: Any, one: Any, dim: Any) -> tuple[str, ...]:
    if not isinstance(many, tuple | list) or len(many) < 2:
        raise ConfigError(f"{what}() wants a tuple of at least two names; got {many!r}")
    _check_names(what, one, *many)
    if type(dim) is not int:
        raise ConfigError(f"{what}(dim=) wants a whole number; got {dim!r}")
    if len({name.count("*") for name in (one, *many)}) > 1:
        raise ConfigError(f"{what}() wants as many * in each name; got {one!r} and {many!r}")
    if len(set(many)) < len(many):
        raise ConfigError(f"{what}() got a name twice: {many!r}")
    return tuple(many)


def _check_names(what: str, *names: Any) -> None:
    for name in names:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{what} wants names as non-empty texts; got {name!r}")
