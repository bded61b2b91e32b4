"""Bad input: each a clear error of our tree, on every rank, and nothing was changed or kept."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import dlo_core as dlo
from dlo_core._install import install_command
from dlo_core.inventory import check_host
from leaks import nothing_left
from poison import PoisonBackend
from ranks import run_ranks
from toys import WIDTH, Block, Toy, assert_restored, inputs, make_toy, snapshot, twin

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

N = 3
Call = dict[str, Any]


class Wrapped(torch.Tensor):
    """A tensor subclass as quantisers have them."""


class Recurrent(nn.Module):
    """Its GRU keeps a flat list of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run both."""
        out: torch.Tensor = self.linear(self.gru(x)[0])
        return out


class Keeper(Block):
    """Keeps its weight in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"w": [self.linear.weight]}


def toy_with(parameter: Callable[[], Any]) -> Toy:
    """Return a toy whose second block has an odd parameter."""
    model = make_toy(N)
    model.blocks[1].register_parameter("odd", parameter())
    return model


def bare(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def meta_toy() -> Toy:
    return make_toy(N).to("meta")


def parameterless() -> nn.Module:
    return Toy([nn.GELU(), nn.GELU()])


def without_containers() -> nn.Module:
    return nn.ModuleDict({"a": Block(), "b": nn.Linear(2, 2)})["a"]


def in_a_row() -> nn.Module:
    """Return a model whose only list is no list of blocks."""
    model = nn.Module()
    model.mixed = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    model.single = nn.ModuleList([Block()])
    return model


SETTINGS: dict[str, list[Any]] = {
    "use_allgather": [1, 0, "yes", None],
    "depth": [1, 0, -2, 2.0, True, "2", None, math.inf],
    "stages": [1, 3, -1, 2.0, True, "2", None],
    "resident": ["blocks.0", (1,), ("",), 5, None, ("blocks.0", None)],
    "host": ["pinned", "shared", "mapped", "gpu", "", 1, True, ["pageable"]],
    "timeout_s": [0, -1, math.nan, math.inf, "5", None, True, 1e300],
    "load_timeout_s": [0, -1, math.nan, math.inf, "5", None, True, 1e300],
    "strict": [1, 0, "no", None],
}

# What is wrong, the class of the error, words that it must have, and the arguments of offload().
CALLS: dict[str, tuple[type[Exception], str, Callable[[], Call]]] = {
    f"{name}={value!r}": (dlo.ConfigError, name, lambda name=name, value=value: {name: value})
    for name, values in SETTINGS.items()
    for value in values
} | {
    "unknown setting": (
        dlo.ConfigError,
        "unknown setting 'detph'; known: .*depth",
        lambda: {"detph": 3},
    ),
    "two unknown settings": (
        dlo.ConfigError,
        "unknown setting 'allgather', 'slots'",
        lambda: {"slots": 3, "allgather": 1},
    ),
    "unknown device": (dlo.BackendError, "no backend for device 'toaster:0'", device("toaster:0")),
    "empty device": (dlo.BackendError, "no backend for device ''", device("")),
    "no device": (dlo.BackendError, "None", device(None)),
    "number as device": (dlo.BackendError, "3", device(3)),
    "torch device": (dlo.BackendError, "'xpu:1'", device(torch.device("xpu", 1))),
    "not a module": (dlo.ConfigError, "torch.nn.Module; got int", model(lambda: 3)),
    "a class": (dlo.ConfigError, "torch.nn.Module; got type", model(lambda: Toy)),
    "nothing": (dlo.ConfigError, "torch.nn.Module; got NoneType", model(lambda: None)),
    "a dict": (dlo.ConfigError, "torch.nn.Module; got dict", model(lambda: {"a": make_toy(N)})),
    "no models": (dlo.ConfigError, "at least one model", model(list)),
    "one of two": (dlo.ConfigError, "Module; got str", model(lambda: [make_toy(N), "x"])),
    "same model twice": (dlo.ConfigError, "twice", model(lambda: [make_toy(N)] * 2)),
    "a model and its part": (dlo.ConfigError, "another model", model(lambda: family())),
}
