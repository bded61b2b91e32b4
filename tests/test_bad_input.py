"""Bad input: each a clear error of our tree, on every rank, and nothing was changed or kept."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from leaks import nothing_left
from poison import PoisonBackend
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from toys import WIDTH, Block, Toy, assert_restored, inputs, make_toy, snapshot, twin

import dlo_core as dlo
from dlo_core._install import install_command
from dlo_core.inventory import check_host

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
    return lambda folder: Holder(pre=nn.Linear(64, 64), layers=container)


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
    "host": ["pinned", "mapped", "gpu", "", 1, True, ["pageable"]],
    "pin_budget_bytes": [-1, -(1 << 40), 1.5, True, "1", math.inf],
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
    "no container": in_model(
        "no blocks were found.*no ModuleList", lambda f: Holder(a=Block(), b=Block())
    ),
    "unlike children": in_model(
        "'layers'.*several classes",
        with_list(nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])),
    ),
    "one child": in_model("'layers'.*fewer than two", with_list(nn.ModuleList([Block()]))),
    "tiny children": in_model(
        "'layers'.*less than 1%", with_list(nn.ModuleList([nn.PReLU(1), nn.PReLU(1)]))
    ),
    "all resident": in_model("nothing is left to stream", good, resident=("blocks",)),
    "unknown resident": in_model("resident.*'blocs'", good, resident=("blocs",)),
    # blocks=
    "unknown name": in_model("'blocs'.*perhaps 'blocks'", good, blocks=("blocs",)),
    "unknown index": in_model(r"blocks\.7", good, blocks=("blocks.7",)),
    "no list": in_model("'pre', which is a Linear", good, blocks=("pre",)),
    "a block": in_model(r"'blocks\.0', which is a Block", good, blocks=("blocks.0",)),
    "a tensor": in_model("'table', which is a Parameter", good, blocks=("table",)),
    "named twice": in_model("twice", good, blocks=("blocks", "blocks")),
    "no names": in_model("no block", good, blocks=()),
    "numbers": in_model("blocks", good, blocks=(1,)),
    "a number": in_model("blocks", good, blocks=1),
    "gives nothing": in_model("no block", good, blocks=lambda model: []),
    "gives None": in_model("blocks", good, blocks=lambda model: None),
    "gives numbers": in_model("int", good, blocks=lambda model: [1, 2]),
    "gives strangers": in_model("registered submodule", good, blocks=lambda model: [Block()]),
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
    "more bytes": in_file(
        r"toy\.safetensors.*2 bytes after", lambda f: cut(f, lambda b: b + b"xx")
    ),
    "LFS pointer": in_file(
        r"toy\.safetensors.*git lfs pull",
        lambda f: cut(f, lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
    ),
    "huge header": in_file(
        r"toy\.safetensors.*header", lambda f: cut(f, lambda b: struct.pack("<Q", 1 << 40) + b[8:])
    ),
    "lost file": in_file(
        r"index\.json.*'b\.safetensors'.*'position'",
        lambda f: indexed(f, remove="b.safetensors"),
    ),
    "lost key": in_file(r"index\.json.*'blocks\.9\.ghost'", lambda f: indexed(f, extra=True)),
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


def has_odd_tensors(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    return any(t.is_meta or t.layout != torch.strided for t in tensors)


def identities(model: nn.Module) -> list[tuple[str, int]]:
    named = [*model.named_parameters(), *model.named_buffers(), *model.named_modules()]
    return [(name, id(thing)) for name, thing in named]


def check(bad: Bad, folder: Path, backend: PoisonBackend, **call: Any) -> str:
    """Try it, check what is left, and return the error's text."""
    given = bad.model(folder)
    models = models_of(given)
    before = [{} if has_odd_tensors(model) else snapshot(model) for model in models]
    objects = [identities(model) for model in models]
    ours, text = False, ""
    with nothing_left(backend):
        try:
            dlo.offload(given, **({"device": backend} | call | bad.call(folder)))
        except bad.error as error:
            text = str(error)
            ours = isinstance(error, dlo.DloError)
    assert text, "nothing was raised"
    assert ours or bad.on_peers is not None
    for model, state, known in zip(models, before, objects, strict=True):
        assert identities(model) == known
        assert dlo.offloaded(model) is None
        if state:
            assert_restored(model, state)
    return text


def assert_says(text: str, words: str) -> None:
    assert re.search(words, text, re.DOTALL), f"{words!r} is not in {text!r}"


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    assert_says(check(BAD[name], tmp_path, PoisonBackend(0)), BAD[name].words)


@pytest.mark.parametrize("size", [2, 3])
def test_bad_input_on_one_rank_is_refused_on_all(size: int, tmp_path: Path) -> None:
    """One after the other on the same group, each rank in turn; afterwards all is well."""

    def job(rank: int) -> list[str]:
        problems = []
        for number, (name, bad) in enumerate([*BAD.items()][:: size - 1]):
            if name == "no group":
                continue  # without its group a rank can tell nobody
            # A callback is called by a rank that has something to read: in a toy, not by the last.
            victim = number % size if bad.on_peers is None else 0
            mine = bad
            if rank != victim:
                mine = Bad(bad.on_peers or bad.error, f"rank {victim}")
            folder = tmp_path / f"{number}-{rank}"
            folder.mkdir()
            try:
                text = check(mine, folder, PoisonBackend(0), group=dist.group.WORLD)
                assert_says(text, mine.words)
            # All of them are listed at the end.
            except Exception as error:
                problems.append(f"{name}: {type(error).__name__}: {error}")
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=dist.group.WORLD)
        assert torch.equal(model(inputs(rank)), reference(inputs(rank)))
        offloaded.disable()
        assert_restored(model, before)
        return problems

    assert run_ranks(job, size) == [[]] * size


def test_an_absent_backend_comes_with_the_command_that_installs_it() -> None:
    for device, extra in (("cuda", "cuda"), ("cuda:1", "cuda"), ("npu:0", "ascend")):
        if torch.accelerator.is_available():
            pytest.skip("there is an accelerator here")
        with pytest.raises(dlo.BackendError) as caught:
            dlo.offload(make_toy(N), device=device)
        text = str(caught.value)
        assert device.partition(":")[0] in text
        assert install_command(extra) in text or "torch" in text


def test_weights_that_are_on_an_accelerator_already_are_refused() -> None:
    with pytest.raises(dlo.ConfigError, match=r"'a\.w' is on the compute device \(cuda:0\).*CPU"):
        check_host("a.w", torch.device("cuda", 0), "cuda")
    with pytest.raises(dlo.ConfigError, match=r"'a\.w' is on an accelerator \(xpu:1\)"):
        check_host("a.w", torch.device("xpu", 1), "cuda")
    check_host("a.w", torch.device("cpu"), "cuda")
    check_host("a.w", torch.device("meta"), "cuda")


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_refused_for_an_alias_works_when_it_is_resident(size: int) -> None:
    def job(rank: int) -> bool:
        torch.manual_seed(0)
        model = Toy([Recurrent() for _ in range(N)]).requires_grad_(False).eval()
        reference, before = twin(model), snapshot(model)
        backend = PoisonBackend(0)
        group = dist.group.WORLD if size > 1 else None
        with pytest.raises(dlo.ConfigError, match="gru"):
            dlo.offload(model, device=backend, group=group)
        grus = [f"blocks.{number}.gru" for number in range(N)]
        offloaded = dlo.offload(model, device=backend, group=group, resident=grus)
        for seed in range(3):
            x = inputs(seed)
            assert torch.equal(model(x), reference(x))
        offloaded.disable()
        assert_restored(model, before)
        return torch.equal(model(inputs()), reference(inputs()))

    assert all(run_ranks(job, size)) if size > 1 else job(0)


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "depth": ({"depth": 2}, {"depth": 3}),
    "stages": ({"stages": 2}, {"stages": 0}),
    "use_allgather": ({"use_allgather": True}, {"use_allgather": False}),
    "resident": ({}, {"resident": ("blocks.1",)}),
    "timeout_s": ({"timeout_s": 30.0}, {"timeout_s": 40.0}),
    "strict": ({}, {"strict": False}),
    "blocks of model 0": ({}, {"blocks": lambda model: list(model.blocks)[:2]}),
}


def test_different_settings_on_two_ranks_are_refused_on_both() -> None:
    def job(rank: int) -> list[str]:
        texts = []
        backend = PoisonBackend(0)
        for mine in DIFFERENT.values():
            model = make_toy(N)
            before = snapshot(model)
            with nothing_left(backend), pytest.raises(dlo.AgreementError) as caught:
                dlo.offload(model, device=backend, group=dist.group.WORLD, **mine[rank])
            assert_restored(model, before)
            texts.append(str(caught.value))
        return texts

    ours, theirs = run_ranks(job, 2)
    assert ours == theirs
    for name, text in zip(DIFFERENT, ours, strict=True):
        assert_says(text, f"differ in.*{name}.*rank 0 has .*rank 1 has ")


def test_a_rank_with_more_models_than_its_peer_is_refused() -> None:
    def job(rank: int) -> str:
        models: list[nn.Module] = [make_toy(N) for _ in range(1 + rank)]
        before = [snapshot(model) for model in models]
        with pytest.raises(dlo.AgreementError) as caught:
            dlo.offload(models, device=PoisonBackend(0), group=dist.group.WORLD)
        for model, state in zip(models, before, strict=True):
            assert_restored(model, state)
        return str(caught.value)

    ours, theirs = run_ranks(job, 2)
    assert ours == theirs
    assert "blocks of model 1" in ours


def test_a_group_that_the_caller_is_not_in_is_refused() -> None:
    def job(rank: int) -> str:
        group = dist.new_group([0, 1])
        model = make_toy(N)
        before = snapshot(model)
        if rank == 2:
            with pytest.raises(dlo.ConfigError, match="not in the group") as caught:
                dlo.offload(model, device=PoisonBackend(0), group=group)
            assert_restored(model, before)
            return str(caught.value)
        offloaded = dlo.offload(model, device=PoisonBackend(0), group=group)
        offloaded.disable()
        assert_restored(model, before)
        return ""

    answers = run_ranks(job, 3)
    assert "global rank 2" in answers[2]


def test_a_group_without_torch_distributed_is_refused() -> None:
    assert not dist.is_initialized()
    group: Any = object()
    with pytest.raises(dlo.ConfigError, match="init_process_group"):
        dlo.offload(make_toy(N), device=PoisonBackend(0), group=group)


def test_no_group_in_a_job_of_several_ranks_is_warned_about() -> None:
    def job(rank: int) -> bool:
        with pytest.warns(dlo.DloWarning, match="every rank keeps all"):
            offloaded = dlo.offload(make_toy(N), device=PoisonBackend(0))
        return offloaded.size == 1

    assert run_ranks(job, 2) == [True, True]


def test_a_checkpoint_that_does_not_fit_may_be_left_aside(tmp_path: Path) -> None:
    """strict=False: the model's own values, a warning that says why; never for a meta model."""
    for name in ("missing key", "extra key", "broadcast shape", "wrong dtype", "truncated"):
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        model, backend = make_toy(N), PoisonBackend(0)
        reference, before = twin(model), snapshot(model)
        path = BAD[name].call(folder)["checkpoint"]
        with nothing_left(backend):
            with pytest.warns(dlo.DloWarning, match="strict=False"):
                offloaded = dlo.offload(model, device=backend, checkpoint=path, strict=False)
            assert torch.equal(model(inputs()), reference(inputs()))
            offloaded.disable()
            assert_restored(model, before)
            del offloaded
        if name == "wrong dtype":
            continue  # what is on meta takes the checkpoint's dtype
        meta = make_toy(N).to("meta")
        meta.position = reference.get_buffer("position").clone()
        with pytest.raises(dlo.CheckpointError):
            dlo.offload(meta, device=backend, checkpoint=path, strict=False)


def test_errors_are_of_our_tree_and_of_pythons() -> None:
    trees = {
        dlo.ConfigError: ValueError,
        dlo.BackendError: RuntimeError,
        dlo.CheckpointError: ValueError,
        dlo.AgreementError: RuntimeError,
        dlo.HostMemoryError: MemoryError,
        dlo.UseError: RuntimeError,
        dlo.FillError: RuntimeError,
        dlo.RestoreError: RuntimeError,
    }
    for ours, pythons in trees.items():
        assert issubclass(ours, dlo.DloError)
        assert issubclass(ours, pythons)
    assert issubclass(dlo.FillTimeout, dlo.FillError)


def test_host_memory_that_cannot_be_had_is_an_error_with_the_bytes() -> None:
    """Asked for from the allocator itself: a model of that size cannot be built here."""
    with pytest.raises(dlo.HostMemoryError, match=r"70,368,744,177,664,000 bytes"):
        PoisonBackend().allocator.allocate(1000 << 46)


def test_part_of_a_model_that_is_offloaded_says_so() -> None:
    model = make_toy(N)
    dlo.offload(model, device=PoisonBackend(0))
    block: nn.Module = attrgetter("blocks.1")(model)
    with pytest.raises(dlo.ConfigError, match="offloaded already"):
        dlo.offload(block, device=PoisonBackend(0), blocks=lambda m: [m.get_submodule("linear")])
