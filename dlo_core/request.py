"""The request: what ``enable`` was asked for, with one of everything for each model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlo_core.errors import ConfigError
from dlo_core.plan import Loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from dlo_core.key_map import KeyMap
    from dlo_core.post_load import PostLoad
    from dlo_core.progress import LoadProgress
    from dlo_core.salvage import Salvage
    from dlo_core.slicing import TpPlan
    from dlo_core.transforms import Transforms

    Path = str | os.PathLike[str]
    Checkpoints = Path | Sequence[Path | None] | None
    Blocks = Sequence[str] | Callable[[nn.Module], Iterable[nn.Module]] | None
    Progress = bool | Callable[[LoadProgress], None]
    KeyMaps = KeyMap | Sequence[KeyMap]
    TransformsEach = Transforms | Sequence[Transforms]
    PostLoads = PostLoad | Sequence[PostLoad]

__all__ = ["Request"]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What ``enable`` was asked for.

    Attributes:
        models: As in ``enable``.
        checkpoint: As in ``enable``.
        blocks: As in ``enable``.
        progress: As in ``enable``.
        tp_plan: As in ``enable``.
        tp: Rank in the tensor-parallel group, and its size.
        salvage: Shards of an earlier offload, to be used where they fit.
    """

    models: tuple[nn.Module, ...]
    checkpoint: Checkpoints
    blocks: Blocks
    progress: Progress
    key_map: KeyMaps = None
    transforms: TransformsEach = None
    post_load: PostLoads = None
    tp_plan: TpPlan | None = None
    tp: tuple[int, int] = (0, 1)
    salvage: Salvage | None = None

    def loadings(self) -> list[Loading]:
        """Return where each model's values come from.

        Raises:
            ConfigError: There is not one of everything for each model.
        """
        count = len(self.models)
        rows = zip(
            _one_each(self.checkpoint, count),
            _one_of("key_map", self.key_map, count),
            _one_of("transforms", self.transforms, count),
            _one_of("post_load", self.post_load, count),
            strict=True,
        )
        return [Loading(*row, kept=self.salvage is not None) for row in rows]


def _one_each(checkpoint: Checkpoints, count: int) -> list[Path | None]:
    if checkpoint is None:
        return [None] * count
    if isinstance(checkpoint, str | os.PathLike):
        if count > 1:
            raise ConfigError(
                f"{count} models need a sequence of {count} checkpoints; got one path "
                f"{str(checkpoint)!r}"
            )
        return [checkpoint]
    given = checkpoint if isinstance(checkpoint, list | tuple) else [checkpoint]
    paths: list[Path | None] = []
    for path in given:
        if path is not None and not isinstance(path, str | os.PathLike):
            raise ConfigError(
                f"checkpoint= must be a path, or a sequence with one a model; got {checkpoint!r}"
            )
        paths.append(path)
    if len(paths) != count:
        raise ConfigError(f"{count} models need {count} checkpoints; got {len(paths)}")
    return paths


def _one_of(what: str, given: Any, count: int) -> list[Any]:
    """Return one a model; for one model it is what was given."""
    if given is None or count == 1:
        return [given] * count
    if not isinstance(given, list | tuple) or len(given) != count:
        raise ConfigError(
            f"{count} models need a sequence of {count} for {what}=, None where a model has none; "
            f"got {given!r}"
        )
    return list(given)
