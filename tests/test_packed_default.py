"""The default of ``packed``: nobody asks, nothing that was promised is lost, no bit changes."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import save_file
from test_packed_choice import assert_ends
from test_packed_engine import WIDTH, Model
from test_packed_order import HeavyBlock
from torch import nn
from toys import Toy, inputs, same_bits, twin

import dlo_core as dlo
from dlo_core import packed_choice, packed_default
from dlo_core.bench.job import BenchJob
from dlo_core.bench.measure import _with_times
from dlo_core.bench.model import Shape
from dlo_core.cgroup import Bound
from dlo_core.coder import Coder
from dlo_core.cpu import CpuBackend
from dlo_core.errors import DloError, UseError
from dlo_core.layout import BlockLayout, TensorSpec
from dlo_core.machine import Machine
from dlo_core.packed_default import ready_to_pack
from dlo_core.packed_figures import Figures
from dlo_core.plan import ModelPlan, with_layouts
from dlo_core.testing import SimBackend, World
from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from dlo_core.interface import MemoryInfo


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
    # Toys have small tensors.
    monkeypatch.setattr(packed_default, "_LEAST_ADDED", 1)


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


def noise_like(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return values that no codec makes smaller."""
    return {
        name: torch.randint(-32768, 32767, tuple(value.shape), dtype=torch.int16).view(value.dtype)
        for name, value in model.state_dict().items()
        if value.dtype is torch.bfloat16
    }


def test_values_that_do_not_pack_can_be_had_at_any_time() -> None:
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(7):
            model(data(number))
        assert offloaded.stats().packed_ratio is not None
        given = noise_like(resident)
        offloaded.update_weights(given)
        resident.load_state_dict(given, strict=False)
        assert offloaded.stats().packed_ratio is None
        assert offloaded.stats().packed_reason == "raw: the weights were updated"
        for number in range(9):
            out, wanted = model(data(number)), resident(data(number))
            assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))
        # It was looked at again.
        assert "does not get smaller" in (offloaded.stats().packed_reason or "")


class Nesting(Model):
    """Blocks that come to be called inside of others, when the caller wants it."""

    nest = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run all blocks, the last one inside of the one before, too."""
        handles = []
        if self.nest:
            last = self.blocks[-1]
            hook = self.blocks[-2].register_forward_hook(lambda _, args, out: out + last(args[0]))
            handles.append(hook)
        try:
            return super().forward(x)
        finally:
            for handle in handles:
                handle.remove()


@pytest.mark.parametrize("packed", [None, "auto", True])
def test_blocks_may_come_to_be_called_inside_of_others(packed: bool | str | None) -> None:
    model = Nesting(4)
    resident: Any = twin(model)
    with dlo.offload(model, device="cpu", packed=packed) as offloaded, torch.inference_mode():
        for number in range(12):
            model.nest = resident.nest = number >= 8
            assert torch.equal(model(data(number)), resident(data(number)))
            stats = offloaded.stats()
            if packed is not True:
                # In the pass that begins it another block's memory is taken; then it is given back.
                first = 5 if packed is None else 3
                assert (stats.packed_ratio is not None) == (first <= number <= 8)
        if packed is not True:
            assert (stats.packed_reason or "").startswith("raw: blocks are called inside of others")
            assert stats.device_bytes <= offloaded.footprint.device_nbytes


def test_a_block_inside_of_another_one_without_memory_for_it_raises_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    model = Nesting(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu", packed=True) as offloaded, torch.inference_mode():
        assert torch.equal(model(data(0)), resident(data(0)))
        model.nest = True
        with monkeypatch.context() as patched:
            patched.setattr(CpuBackend, "empty", refuse)
            with pytest.raises(UseError, match=r"another buffer of .* none left; free device"):
                model(data(0))
        model.nest = False
        assert torch.equal(model(data(0)), resident(data(0)))
        assert not offloaded.failed


def test_by_default_only_the_first_such_pass_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    model = Nesting(4)
    resident: Any = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(7):
            model(data(number))
        model.nest = resident.nest = True
        monkeypatch.setattr(CpuBackend, "empty", refuse)
        with pytest.raises(UseError, match="the next call has raw weights"):
            model(data(0))
        for number in range(9):
            assert torch.equal(model(data(number)), resident(data(number)))
        assert (offloaded.stats().packed_reason or "").startswith("raw: blocks are called inside")


@pytest.mark.parametrize("what", ["nests", "ran out"])
def test_raw_weights_are_not_packed_when_the_memory_is_wanted(what: str) -> None:
    """Seen before the first look, and between an update and the next one."""

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("activations")

    for before in (2, 7):
        model = Nesting(4)
        resident: Any = twin(model)
        with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
            for number in range(before):
                model(data(number))
            if before > 5:
                assert offloaded.stats().packed_ratio is not None
                offloaded.update_weights(resident.state_dict())
                model(data(0))
            if what == "nests":
                model.nest = resident.nest = True
            else:
                with pytest.raises(torch.OutOfMemoryError), offloaded.run_pass():
                    fail()
            for number in range(12):
                assert torch.equal(model(data(number)), resident(data(number)))
                stats = offloaded.stats()
                assert stats.packed_ratio is None
                assert stats.device_bytes <= offloaded.footprint.device_nbytes
            assert (stats.packed_reason or "").startswith(("raw: blocks are", "raw: a pass ran"))


def test_several_models_stay_raw() -> None:
    """One of them would decide for all."""
    models = [Model(4), Model(4)]
    plain = [twin(model) for model in models]
    with dlo.offload(models, device="cpu") as offloaded, torch.inference_mode():
        for number in range(12):
            for model, resident in zip(models, plain, strict=True):
                assert torch.equal(model(data(number)), resident(data(number)))
        assert offloaded.stats().packed_reason is None
        assert offloaded.footprint.decoded_nbytes == 0


def test_an_update_keeps_the_form_while_its_values_come() -> None:
    """An iterator may run the model; what it gives next may not pack."""
    model = Model(4)
    resident = twin(model)
    given = noise_like(resident)

    def values() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in given.items():
            for number in range(8):
                model(data(number))
            yield name, value

    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(7):
            model(data(number))
        assert offloaded.stats().packed_ratio is not None
        offloaded.update_weights(values())
        assert offloaded.stats().packed_ratio is None
        resident.load_state_dict(given, strict=False)
        out, wanted = model(data(0)), resident(data(0))
        assert torch.equal(out.view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize("packed", [None, True, "auto"])
@pytest.mark.parametrize("residents", [0, 2])
def test_no_use_takes_more_of_the_device_than_the_footprint(
    packed: bool | str | None, residents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    start = CpuBackend().memory().allocated
    peaks = [0]
    real = CpuBackend.empty

    def empty(self: CpuBackend, nbytes: int) -> torch.Tensor:
        made = real(self, nbytes)
        peaks[0] = max(peaks[0], CpuBackend().memory().allocated - start)
        return made

    model = Model(6)
    resident = twin(model)
    given: dict[str, Any] = {"packed": packed, "resident_layers": residents}
    offloaded = dlo.offload(model, device="cpu", **given)
    promised = offloaded.footprint.device_nbytes
    monkeypatch.setattr(CpuBackend, "empty", empty)
    with torch.inference_mode():
        for number in range(9):
            assert torch.equal(model(data(number)), resident(data(number)))
        assert offloaded.stats().packed_ratio is not None
        uses: list[Callable[[], object]] = [
            model.state_dict,
            lambda: dict(offloaded.named_tensors()),
            lambda: offloaded.update_weights(resident.state_dict()),
        ]
        if packed is True:
            # Slots of packed blocks are too small to compare what was packed.
            uses.pop()
        for use in uses:
            use()
            for number in range(9):
                assert torch.equal(model(data(number)), resident(data(number)))
    assert peaks[0] <= promised
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())
    assert peaks[0] <= promised


@pytest.mark.parametrize("packed", [None, True, "auto"])
def test_what_is_shut_down_holds_no_device_memory(packed: bool | str | None) -> None:
    gc.collect()
    start = CpuBackend().memory().allocated
    model = Model(6)
    offloaded = dlo.offload(model, device="cpu", packed=packed, resident_layers=2)
    with torch.inference_mode():
        for number in range(9):
            model(data(number))
    assert offloaded.stats().packed_ratio is not None
    offloaded.shutdown()
    assert CpuBackend().memory().allocated == start


def test_an_interrupt_behind_the_last_shard_loses_no_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The offload is closed then, but it is known how each block lies."""

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for back in (False, True):
        model = Model(4)
        resident = twin(model)
        offloaded = dlo.offload(model, device="cpu")
        with torch.inference_mode():
            for number in range(7 if back else 5):
                model(data(number))
            with monkeypatch.context() as patched:
                patched.setattr(Transfer, "use", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    offloaded.update_weights(resident.state_dict()) if back else model(data(0))
            with pytest.raises(UseError, match="failed earlier"):
                model(data(0))
        offloaded.disable()
        assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())


def test_a_change_that_was_interrupted_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real, left = Coder.encode, [3]

    def encode(self: Coder, *args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Coder, "encode", encode)
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(5):
            model(data(number))
        with pytest.raises(KeyboardInterrupt):
            model(data(0))
        for number in range(9):
            assert torch.equal(model(data(number)), resident(data(number)))
        assert offloaded.stats().packed_ratio is not None
        assert offloaded.stats().packed_reason == "packed: a change of the form was interrupted"
        offloaded.update_weights(resident.state_dict())
        assert offloaded.stats().packed_ratio is None
        assert offloaded.stats().packed_reason == (
            "raw: the weights were updated; they stay so: a change of the form was interrupted"
        )


def test_a_device_that_cannot_decode_leaves_it_to_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model(4)
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu")
    with torch.inference_mode():
        for number in range(7):
            model(data(number))
    assert offloaded.stats().packed_ratio is not None

    def lost(*_: Any) -> Any:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(Coder, "_upload", lost)
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())
    assert "decoded on the host, slowly: the device is lost" in caplog.text


def test_a_pass_that_runs_out_of_memory_gets_the_block_back() -> None:
    model = Model(4)
    resident = twin(model)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("activations of another size")

    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(7):
            model(data(number))
        held = offloaded.stats().device_bytes
        hook = model.blocks[1].register_forward_pre_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            model(data(0))
        hook.remove()
        for number in range(9):
            assert torch.equal(model(data(number)), resident(data(number)))
        stats = offloaded.stats()
        assert stats.packed_ratio is None
        assert (stats.packed_reason or "").startswith("raw: a pass ran out of memory: activa")
        assert stats.device_bytes < held


@pytest.mark.parametrize("again", [False, True])
def test_a_device_that_is_nearly_full_is_left_alone(
    again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CpuBackend.memory

    def full(backend: CpuBackend) -> MemoryInfo:
        info = real(backend)
        return replace(info, free=info.total // 10)

    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        if again:
            for number in range(8):
                model(data(number))
            assert offloaded.stats().packed_ratio is not None
            offloaded.update_weights(resident.state_dict())
        monkeypatch.setattr(CpuBackend, "memory", full)
        for number in range(9):
            assert torch.equal(model(data(number)), resident(data(number)))
        stats = offloaded.stats()
        assert stats.packed_ratio is None
        assert "only where a tenth of the device is left" in (stats.packed_reason or "")


def test_nothing_waits_where_waits_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``torch.cuda.set_sync_debug_mode()``."""
    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(12):
            monkeypatch.setattr(CpuBackend, "may_wait", lambda _, may=number > 8: may)
            assert torch.equal(model(data(number)), resident(data(number)))
            assert (offloaded.stats().packed_ratio is not None) == (number > 8)


def test_blocks_that_stay_lie_as_if_nobody_chose() -> None:
    for packed in (None, False):
        model = Model(6)
        resident = twin(model)
        given: dict[str, Any] = {"packed": packed, "resident_layers": 2}
        with dlo.offload(model, device="cpu", **given) as offloaded, torch.inference_mode():
            engine = offloaded.engine
            assert engine is not None
            runs = [streamer.residents.run_nbytes for streamer in engine.streamers]
            assert runs == [0]
            for number in range(9):
                assert torch.equal(model(data(number)), resident(data(number)))
            stats = offloaded.stats()
            assert sum(block.resident for block in stats.blocks) == 2
            assert (stats.packed_ratio is not None) == (packed is None)
            assert stats.device_bytes <= offloaded.footprint.device_nbytes


@pytest.mark.parametrize("place", ["trial", "measure"])
def test_an_interrupt_before_the_change_is_only_an_interrupt(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    model = Model(4)
    resident = twin(model)
    with dlo.offload(model, device="cpu") as offloaded, torch.inference_mode():
        for number in range(5):
            model(data(number))
        with monkeypatch.context() as patched:
            patched.setattr(Coder, place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(data(0))
        for number in range(4):
            assert torch.equal(model(data(number)), resident(data(number)))
        assert not offloaded.failed
        # The trial is made again; a change that was begun is not.
        assert (offloaded.stats().packed_ratio is not None) == (place == "trial")


def test_a_packed_engine_ends_with_its_last_user() -> None:
    gc.collect()
    held = CpuBackend().memory().allocated
    model = Model(4)
    offloaded = dlo.offload(model, device="cpu")
    with torch.inference_mode():
        for number in range(7):
            model(data(number))
    assert offloaded.stats().packed_ratio is not None
    last = [offloaded]
    del offloaded
    assert_ends(last, held)


def test_reading_leaves_nothing_that_the_next_pass_takes_for_decoded() -> None:
    """It writes the buffer that has a block, which stays and is not filled again."""
    model = Model(2)
    resident: Any = twin(model)
    given: dict[str, Any] = {"packed": True, "resident_layers": 2}
    with dlo.offload(model, device="cpu", **given) as offloaded, torch.inference_mode():
        for number in range(2):
            with offloaded.run_pass():
                out = model.blocks[0](data(number))
            assert torch.equal(out, resident.blocks[0](data(number)))
            # The last one that it decodes is the other one.
            model.state_dict()


@pytest.mark.parametrize("back", [False, True])
def test_a_device_that_is_lost_in_the_change_loses_no_weights(
    back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the device is lost")

    real, left = Coder.encode, [3]

    def encode(self: Coder, *args: Any) -> Any:
        left[0] -= 1
        if left[0] or back:
            return real(self, *args)
        for name in ("copy", "empty", "synchronize", "current_stream"):
            monkeypatch.setattr(CpuBackend, name, lost)
        raise RuntimeError("the device is lost")

    if back:
        # In the decoding of the second block, on the way back.
        real_decode, seen = Coder.decode, [0]

        def decode(self: Coder, *args: Any) -> Any:
            seen[0] += 1
            if seen[0] == 2:
                for name in ("copy", "empty", "synchronize"):
                    monkeypatch.setattr(CpuBackend, name, lost)
            return real_decode(self, *args)

        monkeypatch.setattr(Coder, "decode", decode)
    monkeypatch.setattr(Coder, "encode", encode)
    model = Model(4)
    resident = twin(model)
    offloaded = dlo.offload(model, device="cpu")
    with torch.inference_mode():
        for number in range(5):
            model(data(number))
        if back:
            model(data(0))
            assert offloaded.stats().packed_ratio is not None
            with pytest.raises(DloError):
                offloaded.update_weights(resident.state_dict())
        else:
            with pytest.raises(RuntimeError, match="lost"):
                model(data(0))
    monkeypatch.undo()
    monkeypatch.setattr(Coder, "_upload", lost)
    offloaded.disable()
    assert all(same_bits(model.state_dict()[k], v) for k, v in resident.state_dict().items())


def captured_job(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, SimBackend, Any]:
    monkeypatch.setattr(SimBackend, "has_codec", lambda self: True)
    torch.manual_seed(0)
    model = Toy([HeavyBlock(30000) for _ in range(4)]).requires_grad_(False)
    resident = twin(model)
    backend = SimBackend(World(), host_ahead=True)
    return model, resident, backend, dlo.offload(model, device=backend)


def test_a_capture_ends_the_choice_with_raw_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph copies what it was made with, so an update must find it like that."""
    model, resident, backend, offloaded = captured_job(monkeypatch)
    with torch.no_grad(), backend.compute():
        for number in range(7):
            model(inputs(number))
        assert offloaded.stats().packed_ratio is not None
        captured = offloaded.capture(model, inputs(0))
        assert offloaded.stats().packed_ratio is None
        given = noise_like(resident)
        for turn in range(3):
            for number in range(9):
                got = (captured if number % 2 else model)(inputs(number)).clone()
                backend.synchronize()
                wanted = resident(inputs(number))
                assert torch.equal(got.view(torch.int32), wanted.view(torch.int32)), turn
            offloaded.update_weights(given if not turn % 2 else resident.state_dict())
            if not turn % 2:
                resident.load_state_dict(given, strict=False)
        reason = offloaded.stats().packed_reason
    assert reason == "raw: a pass was captured, and its graph copies what it was made with"
    offloaded.shutdown()


def test_a_capture_that_is_refused_does_not_end_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, resident, backend, offloaded = captured_job(monkeypatch)
    with torch.no_grad(), backend.compute():
        for number in range(3):
            model(inputs(number))
        with pytest.raises(UseError, match="it must run it once"):
            offloaded.capture(lambda x: (model(x), model(x)), inputs(0))
        for number in range(9):
            assert torch.equal(model(inputs(number)), resident(inputs(number)))
        assert offloaded.stats().packed_ratio is not None
    offloaded.shutdown()


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


def test_many_small_tensors_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would begin at a chunk, which would take memory."""
    monkeypatch.setattr(packed_default, "_LEAST_ADDED", 1000)
    spared({})
    model = Model(2)
    sizes = []
    for packed in (None, False):
        with dlo.offload(model, device="cpu", packed=packed) as offloaded:
            sizes.append(offloaded.footprint)
    assert sizes[0] == sizes[1]


def test_chunks_add_at_most_a_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_default, "_LEAST_ADDED", 1000)
    big, small = 1 << 22, 4096 * 3 // 2
    specs = [TensorSpec("w", torch.bfloat16, (big // 2,), (1,))]
    specs += [TensorSpec(f"b{n}", torch.bfloat16, (small // 2,), (1,)) for n in range(4)]

    def added(count: int) -> int | None:
        layout = BlockLayout.pack("b", specs[:count], 256)
        plan = ModelPlan(*[None] * 10)  # type: ignore[arg-type]
        plan = with_layouts(plan, [layout], alignment=256)
        made = ready_to_pack([plan], 256)
        return None if made is None else made[0].shards[0].nbytes - plan.shards[0].nbytes

    assert added(1) == 0
    assert added(2) == 2048
    assert added(3) == 4096
    assert added(5) is None


def test_the_bench_measures_raw_weights_unless_asked() -> None:
    shape = Shape(8, 2, 2)
    assert _with_times(BenchJob(shape, (1,)))["packed"] is False
    assert _with_times(BenchJob(shape, (1,), {"packed": "auto"}))["packed"] == "auto"
