"""What a forward may do with its weights: the same bits where it is fair, else an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from toys import WIDTH, Toy, assert_restored, inputs, make_toy, same_bits, snapshot, twin

import dlo_core as dlo
from dlo_core.cpu import CpuBackend
from dlo_core.errors import AgreementError, ConfigError, UseError

if TYPE_CHECKING:
    from pathlib import Path


class Swapped(nn.Module):
    """A linear without a bias over a transposed batch: its kernel depends on requires_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x plus its transform."""
        out: torch.Tensor = self.linear(x.transpose(0, 1)).transpose(0, 1) + x
        return out


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_that_is_not_frozen_gives_the_same_bits(frozen: bool, mode: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Swapped() for _ in range(6))).requires_grad_(not frozen)
    resident = twin(model)
    before = snapshot(model)
    offloaded = dlo.offload(model, device=CpuBackend(), blocks=lambda m: m.children())
    x = torch.randn(2, 33, 64)
    with mode():
        for _ in range(3):
            assert torch.equal(model(x), resident(x))
    # What is set later counts, too.
    for each in (model, resident):
        each.requires_grad_(frozen)
    with mode():
        assert torch.equal(model(x), resident(x))
        offloaded.disable()
    model.requires_grad_(not frozen)
    assert_restored(model, before)


class Misuse(nn.Module):
    """Uses its weight in a way that needs it to stay."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
        self.how = how
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute, and do the wrong thing."""
        if self.how == "returns a view":
            return self.weight.t()
        if self.how == "caches a view":
            self.kept = self.kept if self.kept is not None else self.weight.t()
            out: torch.Tensor = x @ self.kept
            return out
        if self.how == "writes":
            self.weight.mul_(0.5)
        return x @ self.weight


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("returns a view", "outlives the block's forward"),
        ("caches a view", "outlives the block's forward"),
        ("hook keeps a view", "outlives the block's forward"),
        ("writes", "was written during its forward"),
    ],
)
def test_a_weight_that_is_kept_or_written_is_an_error_and_not_a_wrong_number(
    how: str, told: str
) -> None:
    model = Toy([Misuse(how) for _ in range(4)])
    kept: list[torch.Tensor] = []
    if how == "hook keeps a view":
        for block in model.blocks:
            block.register_forward_hook(lambda module, *_: kept.append(module.weight.detach()))
    dlo.offload(model, device=CpuBackend())
    with torch.inference_mode(), pytest.raises(UseError, match=rf"'blocks\.0'.*{told}"):
        model(inputs())


def test_a_block_that_raises_may_be_kept_by_its_traceback() -> None:
    model = make_toy(3)
    resident = twin(model)
    dlo.offload(model, device=CpuBackend())
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match="shape"):
            model.blocks[0](torch.zeros(2, 3))
        assert torch.equal(model(inputs()), resident(inputs()))


@pytest.mark.parametrize("context", ["offload", "forward", "disable"])
def test_a_default_device_of_the_user_changes_nothing(context: str) -> None:
    model = make_toy(4)
    resident = twin(model)
    before = snapshot(model)
    device = torch.device("meta")
    if context == "offload":
        with device:
            offloaded = dlo.offload(model, device=CpuBackend())
    else:
        offloaded = dlo.offload(model, device=CpuBackend())
    x = inputs()
    with torch.inference_mode():
        wanted = resident(x)
        if context == "forward":
            with device:
                got = model(x)
        else:
            got = model(x)
        assert torch.equal(got, wanted)
    if context == "disable":
        with device:
            offloaded.disable()
    else:
        offloaded.disable()
    assert_restored(model, before)


@pytest.mark.parametrize("where", ["blocks", "post"])
def test_tensors_made_in_inference_mode_are_refused_before_anything_is_touched(where: str) -> None:
    model = make_toy(3)
    with torch.inference_mode():
        part = model.get_submodule(where)
        for module in part.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(parameter.clone(), requires_grad=False)
    with pytest.raises(ConfigError, match=r"inference_mode\(\)"):
        dlo.offload(model, device=CpuBackend())
    assert dlo.offloaded(model) is None


def unseeded(rank: int) -> str:
    model = make_toy(4, seed=rank)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AgreementError, match="values of model 0") as caught:
        dlo.offload(model, device=CpuBackend(), group=dist.group.WORLD)
    assert all(same_bits(value, before[name]) for name, value in model.state_dict().items())
    # Each keeps its own weights where nothing is gathered.
    dlo.offload(model, device=CpuBackend(), group=dist.group.WORLD, use_allgather=False).disable()
    return str(caught.value)


def test_ranks_whose_values_differ_are_told_and_compute_no_mixture() -> None:
    assert len(set(run_ranks(unseeded, 2))) == 1


def test_parametrized_blocks_are_found() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.blocks = nn.ModuleList(weight_norm(nn.Linear(8, 8)) for _ in range(4))
    offloaded = dlo.offload(model.requires_grad_(False), device=CpuBackend())
    assert len(offloaded.blocks) == 4


def changes_folder(rank: int, folder: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        with torch.device("meta"):
            model = make_toy(3)
        model.position = torch.zeros(WIDTH)
        offloaded = dlo.offload(
            model, device=CpuBackend(), group=dist.group.WORLD, checkpoint="toy.safetensors"
        )
        patch.chdir("/")
        offloaded.disable()
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_a_relative_checkpoint_is_found_after_the_folder_was_changed(tmp_path: Path) -> None:
    save_file(make_toy(3).state_dict(), tmp_path / "toy.safetensors")
    run_ranks(changes_folder, 2, str(tmp_path))
