"""Bad input: each a clear error of our tree, on every rank, and nothing was changed or kept."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from operator import attrgetter
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


class Wrapped(torch.Tensor):
    """A tensor subclass, as quantisers have them."""


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


class Holder(nn.Module):
    """Holds what it is given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def good(folder: Path) -> Any:
    return make_toy(N)


def odd(value: Callable[[], torch.Tensor], *, buffer: bool = False) -> Callable[[Path], Toy]:
    """Return what makes a toy whose second block has one odd tensor."""

    def make(folder: Path) -> Toy:
        model = make_toy(N)
        if buffer:
            model.blocks[1].register_buffer("odd", value())
        else:
            tensor = value()
            whole = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, False)
            model.blocks[1].register_parameter("odd", whole)
        return model

    return make


def wrapped() -> torch.Tensor:
    subclass: torch.Tensor = torch.rand(3).as_subclass(Wrapped)
    return subclass


def wrapped_parameter() -> torch.Tensor:
    made = nn.Parameter(wrapped(), False)
    assert type(made) is not nn.Parameter
    return made


def lost_buffer(folder: Path) -> Toy:
    model = make_toy(N)
    model.position = model.position.to("meta")
    return model


def with_list(container: nn.Module) -> Callable[[Path], Holder]:
    return lambda folder: Holder(pre=nn.Linear(WIDTH, WIDTH), layers=container)


def family(folder: Path) -> list[nn.Module]:
    part = make_toy(N)
    return [Holder(dit=part), part]


def stored(folder: Path, **changed: torch.Tensor | None) -> Path:
    """Write the toy's checkpoint, with changes (None: left out; __ stands for a dot)."""
    tensors: dict[str, torch.Tensor | None] = dict(make_toy(N).state_dict())
    tensors |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    path = folder / "toy.safetensors"
    save_file({name: t for name, t in tensors.items() if t is not None}, path)
    return path


def cut(folder: Path, keep: Callable[[bytes], bytes]) -> Path:
    path = stored(folder)
    path.write_bytes(keep(path.read_bytes()))
    return path


def indexed(folder: Path, *, remove: str | None = None, extra: bool = False) -> Path:
    """Write the toy's checkpoint as two files and an index."""
    tensors = make_toy(N).state_dict()
    weight_map = {key: f"{'ab'[n % 2]}.safetensors" for n, key in enumerate(tensors)}
    for file in ("a.safetensors", "b.safetensors"):
        save_file({k: t for k, t in tensors.items() if weight_map[k] == file}, folder / file)
    if extra:
        weight_map["blocks.9.ghost"] = "a.safetensors"
    if remove:
        (folder / remove).unlink()
    path = folder / "toy.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return path


def interrupted(progress: dlo.LoadProgress) -> None:
    raise RuntimeError("the user pressed cancel")


@dataclass(frozen=True)
class Bad:
    """One bad input.

    Attributes:
        error: The class of the error.
        words: A pattern that its text must have.
        model: Makes the model or what is given in its place; gets a folder.
        call: Makes the other arguments of ``offload()``; gets the same folder.
        on_peers: The class of the error on the other ranks, where it is another.
    """

    error: type[BaseException]
    words: str
    model: Callable[[Path], Any] = good
    call: Callable[[Path], dict[str, Any]] = lambda folder: {}
    on_peers: type[BaseException] | None = None


def setting(name: str, value: Any) -> Bad:
    return Bad(dlo.ConfigError, name, call=lambda folder: {name: value})


def on_device(device: Any, words: str) -> Bad:
    return Bad(dlo.BackendError, words, call=lambda folder: {"device": device})


def in_model(words: str, model: Callable[[Path], Any], **call: Any) -> Bad:
    return Bad(dlo.ConfigError, words, model, lambda folder: call)


def in_file(words: str, path: Callable[[Path], Any], **call: Any) -> Bad:
    return Bad(dlo.CheckpointError, words, call=lambda folder: {"checkpoint": path(folder)} | call)


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

BAD: dict[str, Bad] = {
    **{f"{n}={v!r}": setting(n, v) for n, values in SETTINGS.items() for v in values},
    "unknown setting": Bad(
        dlo.ConfigError, "unknown setting 'detph'; known: .*depth", call=lambda f: {"detph": 3}
    ),
    "two unknown settings": Bad(
        dlo.ConfigError, "unknown setting 'all', 'slots'", call=lambda f: {"slots": 3, "all": 1}
    ),
    # devices
    "unknown device": on_device("toaster:0", "no backend for device 'toaster:0'"),
    "empty device": on_device("", "no backend for device ''"),
    "no device": on_device(None, "None"),
    "number as device": on_device(3, "3"),
    "torch device": on_device(torch.device("xpu", 1), "'xpu:1'"),
    # not a model
    "number": in_model("torch.nn.Module; got int", lambda f: 3),
    "class": in_model("torch.nn.Module; got type", lambda f: Toy),
    "None": in_model("torch.nn.Module; got NoneType", lambda f: None),
    "dict": in_model("torch.nn.Module; got dict", lambda f: {"a": make_toy(N)}),
    "no models": in_model("at least one model", lambda f: []),
    "second is no model": in_model("Module; got str", lambda f: [make_toy(N), "x"]),
    "same model twice": in_model("twice", lambda f: [make_toy(N)] * 2),
    "model and its part": in_model("share tensors|lies inside|part", family),
    # no blocks
    "empty list": in_model("empty", lambda f: Toy([])),
    "blocks without tensors": in_model("no tensors", lambda f: Toy([nn.GELU(), nn.GELU()])),
    "no container": in_model("no blocks.*no ModuleList", lambda f: Holder(a=Block(), b=Block())),
    "unlike children": in_model(
        "'layers'.*several classes",
        with_list(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])),
    ),
    "one child": in_model("'layers'.*fewer than 2", with_list(nn.ModuleList([Block()]))),
    "tiny children": in_model(
        "'layers'.*below 1%", with_list(nn.ModuleList([nn.PReLU(1), nn.PReLU(1)]))
    ),
    "all resident": in_model("nothing is left to stream", good, resident=("blocks",)),
    "unknown resident": in_model("resident.*'blocs'", good, resident=("blocs",)),
    # blocks=
    "unknown name": in_model("has no 'blocs'.*'blocks'", good, blocks=("blocs",)),
    "unknown index": in_model(r"blocks\.7", good, blocks=("blocks.7",)),
    "no list": in_model("'pre' is a Linear", good, blocks=("pre",)),
    "a block": in_model(r"'blocks\.0' is a Block", good, blocks=("blocks.0",)),
    "a tensor": in_model("'table' is a Parameter", good, blocks=("table",)),
    "named twice": in_model("twice", good, blocks=("blocks", "blocks")),
    "no names": in_model("no block", good, blocks=()),
    "numbers": in_model("blocks", good, blocks=(1,)),
    "a number": in_model("blocks", good, blocks=1),
    "gives nothing": in_model("no block", good, blocks=lambda model: []),
    "gives None": in_model("blocks", good, blocks=lambda model: None),
    "gives numbers": in_model("int", good, blocks=lambda model: [1, 2]),
    "gives strangers": in_model("not a registered", good, blocks=lambda model: [Block()]),
    "gives parts": in_model(
        "lies inside", good, blocks=lambda model: [model.blocks[0], model.blocks[0].linear]
    ),
    # tensors
    "meta": in_model("meta.*checkpoint=", lambda f: make_toy(N).to("meta")),
    "meta buffer": in_model("'position' is on the meta device", lost_buffer),
    "subclass": in_model(r"'blocks\.1\.odd' is a .*Wrapped", odd(wrapped_parameter)),
    "subclass buffer": in_model(r"'blocks\.1\.odd' is a .*Wrapped", odd(wrapped, buffer=True)),
    "sparse": in_model(
        r"'blocks\.1\.odd' has layout", odd(lambda: torch.eye(3).to_sparse(), buffer=True)
    ),
    "conjugate": in_model(
        r"'blocks\.1\.odd' is a lazy",
        odd(lambda: torch.ones(2, dtype=torch.complex64).conj(), buffer=True),
    ),
    "GRU": in_model(
        r"gru.*resident=\('blocks\.\d\.gru',\)", lambda f: Toy([Recurrent() for _ in range(N)])
    ),
    "own list": in_model(r"kept.*resident=", lambda f: Toy([Keeper() for _ in range(N)])),
    # checkpoints
    "two models, one path": in_model(
        "2 models need", lambda f: [make_toy(N), make_toy(N)], checkpoint="x.safetensors"
    ),
    "one model, two paths": in_model("1 models? needs?", good, checkpoint=["x", "y"]),
    "number as path": in_model("checkpoint", good, checkpoint=5),
    "bytes as path": in_model("checkpoint", good, checkpoint=b"x.safetensors"),
    "no file": in_file("no checkpoint at '.*nowhere'", lambda f: f / "nowhere"),
    "empty folder": in_file("no .safetensors file", lambda f: f),
    "missing key": in_file(
        r"'blocks\.1\.linear\.weight' is missing",
        lambda f: stored(f, blocks__1__linear__weight=None),
    ),
    "missing outside": in_file("'post.bias' is missing", lambda f: stored(f, post__bias=None)),
    "extra key": in_file(
        r"'blocks\.8\.bias' is in it but not", lambda f: stored(f, blocks__8__bias=torch.ones(1))
    ),
    "broadcast shape": in_file(
        r"'blocks\.2\.linear\.weight' has shape \(1,\).*\(8, 8\)",
        lambda f: stored(f, blocks__2__linear__weight=torch.ones(1)),
    ),
    "other shape": in_file(
        r"'pre\.weight' has shape \(8,\).*\(8, 8\)", lambda f: stored(f, pre__weight=torch.ones(8))
    ),
    "wrong dtype": in_file(
        r"'blocks\.0\.norm\.bias' is torch.float16.*torch.float32",
        lambda f: stored(f, blocks__0__norm__bias=torch.zeros(8, dtype=torch.float16)),
    ),
    "truncated": in_file(r"toy\.safetensors.*'.+'.*truncated", lambda f: cut(f, lambda b: b[:-10])),
    "cut header": in_file(r"toy\.safetensors.*header", lambda f: cut(f, lambda b: b[:100])),
    "four bytes": in_file(r"toy\.safetensors.*too few", lambda f: cut(f, lambda b: b[:4])),
    "no bytes": in_file(r"toy\.safetensors.*too few", lambda f: cut(f, lambda b: b"")),
    "more bytes": in_file(r"toy\.safetensors.*2 bytes after", lambda f: cut(f, lambda b: b + b"xx")),
    "LFS pointer": in_file(
        r"toy\.safetensors.*git lfs pull",
        lambda f: cut(f, lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    "huge header": in_file(
        r"toy\.safetensors.*header", lambda f: cut(f, lambda b: struct.pack("<Q", 1 << 40) + b[8:])
    ),
    "lost file": in_file(
        r"index\.json.*'b\.safetensors' for 'pre\.weight'",
        lambda f: indexed(f, remove="b.safetensors"),
    ),
    "lost key": in_file(r"'blocks\.9\.ghost' is in 'a\.safetensors'", lambda f: indexed(f, extra=True)),
    # progress
    "progress that raises": Bad(
        RuntimeError,
        "pressed cancel",
        call=lambda f: {"progress": interrupted},
        on_peers=dlo.AgreementError,
    ),
    "number as progress": in_model("progress", good, progress=3),
    "word as progress": in_model("progress", good, progress="bar"),
    # groups
    "no group": in_model("group", good, group="world"),
}


def models_of(given: Any) -> list[nn.Module]:
    listed = given if isinstance(given, list) else [given]
    return [model for model in listed if isinstance(model, nn.Module)]


def check(bad: Bad, folder: Path, backend: PoisonBackend, **call: Any) -> str:
    """Try it, check what is left, and return the error's text."""
    given = bad.model(folder)
    models = models_of(given)
    before = [snapshot(model) for model in models]
    with nothing_left(backend):
        try:
            dlo.offload(given, **({"device": backend} | call | bad.call(folder)))
        except bad.error as error:
            text = str(error)
            assert isinstance(error, dlo.DloError) or bad.on_peers is not None
        else:
            pytest.fail("nothing was raised")
    for model, state in zip(models, before, strict=True):
        assert_restored(model, state)
        assert dlo.offloaded(model) is None
    return text


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    assert_matches(check(BAD[name], tmp_path, PoisonBackend(0)), BAD[name].words)


def assert_matches(text: str, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)
