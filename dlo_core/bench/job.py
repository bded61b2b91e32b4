"""The job of a bench: which model, over which tokens, offloaded how."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlo_core.bench.model import Shape, build, inputs
from dlo_core.config import OffloadConfig
from dlo_core.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["BenchJob"]


@dataclass(frozen=True, slots=True)
class BenchJob:
    """What is measured; the same on all ranks.

    Attributes:
        shape: Of the synthetic transformer.
        tokens: Lengths of the runs, one row of the table each.
        settings: Those of ``OffloadConfig``.
        num_passes: Passes that are timed.
        num_warm: Passes before them.
        model: ``"module:function"`` of a function that returns a model on the host and its
            arguments, as a tuple and a dict; empty: the synthetic transformer.
    """

    shape: Shape
    tokens: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    num_passes: int = 5
    num_warm: int = 2
    model: str = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            ConfigError: Names the value.
        """
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"tokens must be lengths of at least 1; got {self.tokens}")
        for name, least in (("num_passes", 1), ("num_warm", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if self.model and self.model.count(":") != 1:
            raise ConfigError(f"model must be written module:function; got {self.model!r}")
        OffloadConfig.of(self.settings)

    @property
    def runs(self) -> tuple[int, ...]:
        """The lengths; one run, written 0, for a model that brings its own arguments."""
        return (0,) if self.model else self.tokens

    def make(self, device: torch.device | str) -> nn.Module:
        """Return the model with its weights on ``device``."""
        if not self.model:
            return build(self.shape, device)
        model: nn.Module = _call(self.model)[0]
        return model.to(device)

    def arguments(
        self, tokens: int, device: torch.device, seed: int
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward, on ``device``."""
        if not self.model:
            return inputs(self.shape, tokens, device, seed), {}
        _, args, kwargs = _call(self.model)
        return (
            tuple(_to(value, device) for value in args),
            {name: _to(value, device) for name, value in kwargs.items()},
        )


def _call(name: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model {name!r} cannot be found: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 3):
        raise ConfigError(
            f"{name} must return (model, arguments as a tuple, arguments as a dict); got "
            f"{type(made).__name__}"
        )
    return made


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if hasattr(value, "to") else value
