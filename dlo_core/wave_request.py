"""A request of a wave, and what requests must have in common to run side by side."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dlo_core.errors import ConfigError

__all__ = ["FREE_ARGUMENTS", "CompatibilityKey", "WaveRequest", "check_wave", "compatibility_key"]

FREE_ARGUMENTS = frozenset(
    {"prompt", "prompt_2", "prompt_3", "negative_prompt", "negative_prompt_2", "negative_prompt_3"}
    | {"prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "class_labels"}
    | {"image", "latents", "generator", "output_type", "callback_on_step_end"}
)
"""Arguments that may differ between the requests of a wave; that one is absent may not."""


@dataclass(frozen=True, slots=True)
class WaveRequest:
    """One request.

    Attributes:
        num_inference_steps: Denoising steps; explicit, because the ranks of a wave walk through
            them together.
        kwargs: Further arguments; they travel by pickle.
        seed: For the request's generator, or None.
    """

    num_inference_steps: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check every value.

        Raises:
            ConfigError: Names what was got and what is wanted.
        """
        steps = self.num_inference_steps
        if steps is None:
            raise ConfigError(
                "num_inference_steps must be given: the ranks of a wave walk through the steps "
                "together, and a default that a pipeline chooses is not known before; got None"
            )
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(
                f"num_inference_steps must be a whole number of at least 1; got {steps!r}"
            )
        if not isinstance(self.kwargs, Mapping) or not all(
            isinstance(name, str) for name in self.kwargs
        ):
            raise ConfigError(f"kwargs must be a mapping from names to values; got {self.kwargs!r}")
        if "num_inference_steps" in self.kwargs:
            raise ConfigError(
                "num_inference_steps stands twice: give it as WaveRequest(num_inference_steps=...) "
                "and not in kwargs, too"
            )
        if self.seed is not None and (
            isinstance(self.seed, bool) or not isinstance(self.seed, int)
        ):
            raise ConfigError(f"seed must be a whole number or None; got {self.seed!r}")


CompatibilityKey = Callable[[WaveRequest], Mapping[str, Hashable]]
"""Gives what must be equal for all requests of a wave, by name."""


def compatibility_key(request: WaveRequest) -> dict[str, Hashable]:
    """Return what must be equal: the steps, every argument that is not free, which are given.

    Tensors, and lists of them, count by shape and dtype. Extend it by a function of your own that
    adds to its result or takes from it.
    """
    key: dict[str, Hashable] = {"num_inference_steps": request.num_inference_steps}
    for name, value in request.kwargs.items():
        if name not in FREE_ARGUMENTS:
            key[name] = _comparable(value)
        elif value is not None:
            # Whether there is a negative prompt decides how often the model runs in a step.
            key[f"{name} is given"] = True
    return key


def _comparable(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return f"tensor {tuple(value.shape)} {value.dtype}"
    if isinstance(value, list | tuple):
        return tuple(map(_comparable, value))
    if isinstance(value, dict):
        return tuple((str(name), _comparable(value[name])) for name in sorted(value, key=str))
    if isinstance(value, Hashable):
        return value
    return repr(value)


def check_wave(requests: Sequence[WaveRequest], key: CompatibilityKey, *, first: int = 0) -> None:
    """Refuse requests that cannot run side by side.

    Args:
        requests: Those of one wave.
        key: Gives what must be equal.
        first: Number of the first one, for the error.

    Raises:
        ConfigError: Names every difference.
    """
    keys = [dict(key(request)) for request in requests]
    names = list(dict.fromkeys(name for each in keys for name in each))
    problems = []
    for name in names:
        values = [each.get(name, "not given") for each in keys]
        if any(value != values[0] for value in values):
            told = ", ".join(f"request {first + i} has {value!r}" for i, value in enumerate(values))
            problems.append(f"{name}: {told}")
    if problems:
        raise ConfigError(
            "these requests cannot run in one wave, because they would walk through the blocks "
            f"differently: {'; '.join(problems)}. Make them equal, send them in different calls, "
            "or allow it with ragged=True; nothing was dispatched"
        )
