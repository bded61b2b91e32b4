"""The default of ``packed``: nobody asks, nothing that was promised is lost, no bit changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from test_packed_engine import WIDTH, Model
from torch import nn
from toys import twin

import dlo_core as dlo
from dlo_core import packed_choice
from dlo_core.bench.job import BenchJob
from dlo_core.bench.measure import _with_times
from dlo_core.bench.model import Shape
from dlo_core.cgroup import Bound
from dlo_core.cpu import CpuBackend
from dlo_core.machine import Machine
from dlo_core.packed_default import settle_packed
from dlo_core.packed_figures import Figures

if TYPE_CHECKING:
    from pathlib import Path


def data(seed: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's codec count as its own, packing be faster, and the looks come soon."""
    monkeypatch.setattr(CpuBackend, "has_codec", lambda self: True)
    monkeypatch.setattr(
        packed_choice.PackedChoice, "figures", lambda *_: Figures(0.0, 200.0, 1, 0.7)
    )
    monkeypatch.setattr(packed_choice, "_WARM_DEFAULT", 5)
    monkeypatch.setattr(packed_choice, "_EVERY", 1)


def test_a_long_run_is_packed_and_its_bits_stay() -> None:
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        assert offloaded.config.packed is None
        for number in range(8):
            assert torch.equal(model(data(number)), resident(data(number)))
            stats = offloaded.stats()
            assert (stats.packed_ratio is not None) == (number >= 5)
        assert "packed" in (stats.packed_reason or "")
        # The block more was counted from the beginning.
        assert stats.device_bytes <= offloaded.footprint.device_nbytes
        assert offloaded.footprint.decoded_nbytes > 0


class Plain(nn.Module):
    """Blocks of float32."""

    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks."""
        for block in self.blocks:
            x = block(x).tanh()
        return x


def spared(settings: dict[str, Any], model: Any = None) -> None:
    """Check that an offload with these settings stays raw, takes no memory more, and is right."""
    model = model or Model(4)
    resident = twin(model)
    x = data(0)
    with dlo.offload(model, device="cpu", **settings) as offloaded, torch.inference_mode():
        for _ in range(8):
            assert torch.equal(model(x), resident(x))
        stats = offloaded.stats()
        assert stats.packed_ratio is None
        assert stats.packed_reason is None
        assert offloaded.footprint.decoded_nbytes == 0


@pytest.mark.parametrize(
    "settings",
    [{"device_budget_bytes": 1 << 30}, {"time_every": 0}, {"time_every": 9}, {"packed": False}],
    ids=str,
)
def test_what_was_asked_for_goes_before(settings: dict[str, Any]) -> None:
    spared(settings)


def test_weights_of_another_dtype_are_left_alone() -> None:
    spared({}, Plain())


def test_a_backend_without_a_codec_of_its_own_stays_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "has_codec", lambda self: False)
    spared({})


@pytest.mark.filterwarnings("ignore:.*mapped tier is used:dlo_core.errors.DloWarning")
@pytest.mark.parametrize("host", ["mapped", None])
def test_no_kind_of_host_memory_is_lost(
    host: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint's pages are used where they were asked for, or where no memory is left."""
    if host is None:
        full = Bound("machine", "MemAvailable", 400_000)
        monkeypatch.setattr(Machine, "memory_bounds", lambda self: (full,))
    model = Model(4)
    resident = twin(model)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    settings: dict[str, Any] = {"host": host, "checkpoint": tmp_path}
    with dlo.offload(model, device="cpu", **settings) as offloaded, torch.inference_mode():
        for _ in range(8):
            assert torch.equal(model(data(0)), resident(data(0)))
        stats = offloaded.stats()
        assert {block.tier for block in stats.blocks} == {"mapped"}
        assert stats.packed_ratio is None
        assert stats.packed_reason is None
        assert offloaded.footprint.decoded_nbytes == 0


def gathering(rank: int) -> None:
    model = Model(4)
    resident = twin(model)
    with (
        dlo.offload(model, device="cpu", group=torch.distributed.group.WORLD) as offloaded,
        torch.inference_mode(),
    ):
        for number in range(8):
            x = data(10 * rank + number)
            assert torch.equal(model(x), resident(x))
        assert offloaded.stats().packed_reason is None


@pytest.mark.ranks
def test_ranks_that_gather_are_not_made_to_stop() -> None:
    run_ranks(gathering, 2)


def test_a_choice_that_nobody_asked_for_ends_with_a_capture() -> None:
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        engine = offloaded.engine
        assert engine is not None
        assert engine.choice is not None
        assert engine.choice.yields
        engine.choice.stop("a pass was captured as it was")
        for _ in range(8):
            assert torch.equal(model(data(0)), resident(data(0)))
        assert offloaded.stats().packed_ratio is None
        assert offloaded.stats().packed_reason == "raw: a pass was captured as it was"


def test_a_machine_that_cannot_compile_the_codec_stays_raw(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise OSError("no C compiler")

    monkeypatch.setattr("dlo_core.coder.codec_of", refuse)
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for _ in range(8):
            assert torch.equal(model(data(0)), resident(data(0)))
        assert "no C compiler" in (offloaded.stats().packed_reason or "")


def test_explicit_settings_are_not_touched() -> None:
    for packed in (True, False, "auto"):
        config = dlo.OffloadConfig(packed=packed)
        assert settle_packed(config, CpuBackend(), gathers=False) is config


def test_the_bench_measures_raw_weights_unless_asked() -> None:
    shape = Shape(8, 2, 2)
    assert _with_times(BenchJob(shape, (1,)))["packed"] is False
    assert _with_times(BenchJob(shape, (1,), {"packed": "auto"}))["packed"] == "auto"
