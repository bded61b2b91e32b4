"""Residents: the bits of a resident run whatever stays, is dropped and comes back; true bytes."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from kernels import Program
from mutations import REUSED_MEMORY, WAIT_ON_RESIDENT, mutant, sites
from ranks import run_ranks
from safetensors.torch import save_file
from test_lifecycle import by_blocks
from test_memory import eventually
from test_order import COPY, MODES, count_wrong, run_passes
from toys import (
    Toy,
    assert_restored,
    inputs,
    make_mixed_toy,
    make_toy,
    snapshot,
    twin,
)

import dlo_core as dlo
from dlo_core import engine as engine_module
from dlo_core.cpu import CpuBackend
from dlo_core.cpu_stream import CpuStream
from dlo_core.host import PrivateStore
from dlo_core.planner import simulate
from dlo_core.residency import resident_positions
from dlo_core.stats import BlockState
from dlo_core.testing import GlooAgreement, SimBackend, World
from dlo_core.testing.compute import Compute
from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from dlo_core.layerwise import LayerwiseOffload

SHORT: dict[str, Any] = {"timeout_s": 20.0, "load_timeout_s": 20.0}
STAGE: dict[str, Any] = {"resident_scope": "stage"}
N = 5


def start(
    model: nn.Module | list[Any], backend: CpuBackend | None = None, **settings: Any
) -> LayerwiseOffload:
    group = dist.group.WORLD if dist.is_initialized() else None
    settings = {**SHORT, **settings}
    return dlo.offload(model, device=backend or CpuBackend(), group=group, **settings)


def everywhere(job: Callable[[int], Any], size: int) -> list[Any]:
    # What earlier tests left behind must not count, nor be collected meanwhile.
    gc.collect()
    return [job(0)] if size == 1 else run_ranks(job, size)


def check(model: nn.Module, reference: nn.Module, rank: int = 0, passes: int = 2) -> None:
    with torch.inference_mode():
        for seed in range(passes):
            x = inputs(10 * rank + seed)
            assert torch.equal(model(x), reference(x))
            skip = (seed, 3)
            assert torch.equal(model(x, skip=skip), reference(x, skip=skip))


# --- bits -----------------------------------------------------------------------------------------


def check_cycles(rank: int, make: Callable[[], Toy], **settings: Any) -> None:
    """Passes, a drop, passes, a drop, a load, passes, a drop; then a plain module again."""
    model = make()
    reference, before = twin(model), snapshot(model)
    backend = CpuBackend()
    offloaded = start(model, backend, **settings, **STAGE)
    check(model, reference, rank)
    for loads in (False, True):
        offloaded.offload_resident_layers()
        if loads:
            offloaded.load_resident_layers()
        check(model, reference, rank)
    state = offloaded.state_dict()
    assert state is not None
    for name, value in reference.state_dict().items():
        assert torch.equal(torch.as_tensor(state[name]), value), name
    if settings["resident_placement"] == "leading":
        offloaded.offload_resident_layers()
    offloaded.disable()
    assert_restored(model, before)


SOME: list[tuple[int, str, int, bool]] = [
    (2, "spread", 2, True),
    (3, "leading", 0, True),
    (N, "spread", 2, True),
    (2, "leading", 2, False),
]
ALL = list(itertools.product((1, 2, 3, N), ("spread", "leading"), (0, 2), (True, False)))


@pytest.mark.parametrize(
    ("size", "which"),
    [
        (1, SOME),
        (2, SOME),
        *(pytest.param(size, ALL, marks=pytest.mark.slow) for size in (1, 2, 3, 4)),
    ],
)
def test_the_bits_are_those_of_the_resident_run(
    size: int, which: list[tuple[int, str, int, bool]]
) -> None:
    def job(rank: int) -> bool:
        for num, placement, stages, gathers in which:
            check_cycles(
                rank,
                lambda: make_mixed_toy(N),
                resident_layers=num,
                resident_placement=placement,
                stages=stages,
                use_allgather=gathers,
            )
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_permanent_residents_stay(size: int) -> None:
    def job(rank: int) -> bool:
        model = make_mixed_toy(N)
        reference, before = twin(model), snapshot(model)
        with start(model, resident_layers=2) as offloaded:
            check(model, reference, rank)
            offloaded.load_resident_layers()
            with pytest.raises(dlo.ConfigError, match="needs resident_scope='stage'"):
                offloaded.offload_resident_layers()
            check(model, reference, rank)
        assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_may_run_other_blocks_and_stop_early(size: int) -> None:
    """Also in the pass that loads them again, and in an idle one."""
    programs = [[(), (0, 1, 2, 3, 4), (1, 2)], [(1,), (), (0, 4)]]

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        offloaded = start(model, resident_layers=2, **STAGE)
        with torch.inference_mode():
            for number, skip in enumerate(programs[rank] * 2):
                x = inputs(number)
                assert torch.equal(model(x, skip=skip), reference(x, skip=skip))
                if number == 2:
                    offloaded.offload_resident_layers()
                    if rank == 0:
                        with offloaded.run_pass():
                            pass
                    else:
                        check(model, reference, passes=0)
                        model(x)
        offloaded.shutdown()
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_engines_that_call_blocks_and_not_the_root(size: int) -> None:
    """The first call of a block is that of a resident one, and it begins the pass."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        offloaded = start(model, resident_layers=2, resident_placement="leading", **STAGE)
        with torch.inference_mode():
            for seed in range(6):
                assert torch.equal(by_blocks(model, inputs(seed)), reference(inputs(seed)))
                if seed % 2:
                    offloaded.offload_resident_layers()
        offloaded.shutdown()
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_models_that_share_the_slots_have_their_own_residents(size: int) -> None:
    """One of them has no other block: nothing of it streams."""

    def job(rank: int) -> bool:
        models = [make_toy(N), make_mixed_toy(2, seed=7), make_toy(4, seed=3)]
        references, before = [twin(m) for m in models], [snapshot(m) for m in models]
        backend = CpuBackend()
        offloaded = start([*models], backend, resident_layers=2, **STAGE)
        states = [block.state for block in offloaded.stats().blocks]
        assert states.count(BlockState.RESIDENT) == 6
        for turn in range(4):
            for model, reference in zip(models, references, strict=True):
                check(model, reference, rank, passes=1)
            if turn == 1:
                offloaded.offload_resident_layers()
        offloaded.offload_resident_layers()
        check(models[0], references[0], rank, passes=1)
        # The pass of one model loads what is its own.
        states = [block.state for block in offloaded.stats().blocks if block.resident]
        assert states == [BlockState.RESIDENT] * 2 + [BlockState.WAITING] * 4
        offloaded.disable()
        for model, snap in zip(models, before, strict=True):
            assert_restored(model, snap)
        return True

    assert all(everywhere(job, size))


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_an_update_reaches_residents_that_are_there_and_those_that_are_not(size: int) -> None:
    def job(rank: int) -> bool:
        model = make_toy(N)
        weights = [make_toy(N, seed=seed) for seed in range(4)]
        offloaded = start(model, resident_layers=3, **STAGE)
        for number, new in enumerate(weights[1:]):
            if number == 1:
                offloaded.offload_resident_layers()
            given = new.state_dict()
            offloaded.update_weights(iter(given.items()) if number == 2 else given)
            check(model, new, rank)
        # One block of those that stay, and no other.
        mixed = twin(weights[3])
        part = {k: v for k, v in weights[0].state_dict().items() if k.startswith("blocks.2.")}
        mixed.load_state_dict(part, strict=False)
        offloaded.update_weights(part)
        check(model, mixed, rank)
        offloaded.disable()
        got = model.state_dict()
        assert all(torch.equal(got[k], v) for k, v in mixed.state_dict().items())
        return True

    assert all(everywhere(job, size))


def test_an_update_reaches_a_packed_block_that_was_the_last_to_be_decoded() -> None:
    """It alone computes, so its old values still lie decoded when the next pass begins."""
    model, new = make_toy(1), make_toy(1, seed=1)
    offloaded = start(model, resident_layers=1, packed=True)
    check(model, make_toy(1))
    offloaded.update_weights(new.state_dict())
    check(model, new)
    offloaded.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_values_are_read_while_residents_are_dropped(size: int, tmp_path: Path) -> None:
    def job(rank: int) -> bool:
        model = make_mixed_toy(N)
        expected = twin(model).state_dict()
        offloaded = start(model, resident_layers=3, **STAGE)
        offloaded.offload_resident_layers()
        path = offloaded.save(tmp_path / "saved.safetensors")
        offloaded.offload_resident_layers()
        got = dict(offloaded.named_tensors())
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        offloaded.shutdown()
        return path.exists()

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("host", [None, "mapped"])
def test_with_a_checkpoint(host: str | None, size: int, tmp_path: Path) -> None:
    """Restored from it, whether they are there or not; read anew for each load when mapped."""
    path = tmp_path / "toy.safetensors"
    save_file(make_toy(N).state_dict(), path)

    def job(rank: int) -> bool:
        for drops in (False, True):
            model = make_toy(N)
            reference, before = twin(model), snapshot(model)
            settings = {"checkpoint": str(path), "host": host, "resident_layers": 3, **STAGE}
            offloaded = start(model, **settings)
            check(model, reference, rank)
            offloaded.offload_resident_layers()
            if not drops:
                check(model, reference, rank)
            offloaded.disable()
            assert_restored(model, before)
        return True

    assert all(everywhere(job, size))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_device_bytes_are_as_predicted_in_both_states(size: int) -> None:
    """What is dropped is free for whoever comes next: the same bytes, at no cost."""

    def job(rank: int) -> bool:
        model = make_toy(8)
        backend = CpuBackend()
        before = backend.memory().allocated
        offloaded = start(model, backend, resident_layers=4, **STAGE)
        predicted = offloaded.footprint
        assert predicted.residents_nbytes == 2 * predicted.slots_nbytes > 0
        for _ in range(2):
            assert backend.memory().allocated - before == predicted.device_nbytes
            stats = offloaded.stats()
            assert stats.device_bytes == predicted.device_nbytes
            assert stats.resident_bytes == predicted.residents_nbytes
            offloaded.offload_resident_layers()
            stats = offloaded.stats()
            left = predicted.device_nbytes - predicted.residents_nbytes
            assert backend.memory().allocated - before == stats.device_bytes == left
            assert stats.resident_bytes == 0
            check(model, twin(make_toy(8)), rank, passes=1)
        offloaded.shutdown()
        # A fill that was under way keeps its slot until it is done.
        assert eventually(lambda: backend.memory().allocated == before)
        return True

    assert all(everywhere(job, size))


@pytest.mark.parametrize("size", [1, 2])
def test_a_budget_is_filled_and_kept(size: int) -> None:
    def job(rank: int) -> bool:
        models = [make_toy(8), make_toy(4, seed=1)]
        references = [twin(model) for model in models]
        backend = CpuBackend()
        before = backend.memory().allocated
        with start([*models], backend) as plain:
            none, block = plain.footprint.device_nbytes, plain.footprint.slots_nbytes // 2
        for more in (0, 3, 6, 12):
            budget = none + more * block
            settings = {"resident_layers": "auto", "device_budget_bytes": budget}
            with start([*models], backend, **settings) as offloaded:
                assert backend.memory().allocated - before <= budget
                stay = offloaded.footprint.residents_nbytes // block
                # A whole round of the slots may be missing in each model.
                assert min(12, more) - 2 <= stay <= 12
                for model, reference in zip(models, references, strict=True):
                    check(model, reference, rank, passes=1)
        with pytest.raises(dlo.ConfigError, match=f"{none:,} bytes on the device.*raise it by 1,"):
            start([*models], backend, resident_layers="auto", device_budget_bytes=none - 1)
        return True

    assert all(everywhere(job, size))


def test_the_engine_chooses_what_the_planner_simulates() -> None:
    model = make_toy(8)
    with start(model, resident_layers=3) as offloaded:
        stay = [n for n, block in enumerate(offloaded.stats().blocks) if block.resident]
        sizes = [block.nbytes for block in offloaded.stats().blocks]
    assert set(stay) == resident_positions(8, 3)
    by_count, by_place = (simulate(sizes, 1.0, 1.0, residents=r) for r in (3, set(stay)))
    assert by_count == by_place


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
def test_only_the_others_are_filled(size: int) -> None:
    def job(rank: int) -> bool:
        model = make_toy(8)
        reference = twin(model)
        offloaded = start(model, resident_layers=4)
        with torch.inference_mode():
            model(inputs())
            first = offloaded.stats()
            for _ in range(3):
                assert torch.equal(model(inputs()), reference(inputs()))
        last = offloaded.stats()
        assert last.fills - first.fills == 3 * 4
        shard = offloaded.footprint.host_nbytes // 8
        assert last.copied_bytes - first.copied_bytes == 3 * 4 * shard
        offloaded.shutdown()
        return True

    assert all(everywhere(job, size))


def test_where_all_stay_nothing_moves_any_more() -> None:
    model = make_toy(N)
    reference = twin(model)
    with start(model, resident_layers=N) as offloaded:
        assert offloaded.footprint.slots_nbytes == offloaded.footprint.stages_nbytes == 0
        copied = offloaded.stats().copied_bytes
        check(model, reference)
        stats = offloaded.stats()
        assert (stats.passes, stats.fills, stats.copied_bytes) == (4, 0, copied)
        assert (stats.exposed_ms, stats.transfer_ms, stats.overlap) == (0.0, 0.0, None)


def test_a_load_by_a_forward_is_exposed_and_shown_once() -> None:
    model = make_toy(N)
    names = ("blocks.0", "blocks.1")
    with start(model, resident_layers=2, resident_placement="leading", **STAGE) as offloaded:

        def state(name: str) -> tuple[BlockState, bool, bool]:
            (block,) = [b for b in offloaded.stats().blocks if b.name == name]
            return block.state, block.resident, block.transfer_ms > 0

        def lanes() -> set[tuple[str, str]]:
            return {(span.lane, span.block) for span in dlo.trace.spans(offloaded)}

        assert state("blocks.0") == (BlockState.RESIDENT, True, False)
        assert state("blocks.4")[1] is False
        with torch.inference_mode():
            model(inputs())
            assert state("blocks.0") == (BlockState.RESIDENT, True, False)
            assert not {("copy", name) for name in names} & lanes()
            assert {("compute", name) for name in names} <= lanes()
            offloaded.offload_resident_layers()
            assert state("blocks.0") == (BlockState.WAITING, True, False)
            model(inputs())
            assert state("blocks.0") == (BlockState.RESIDENT, True, True)
            assert {(lane, name) for lane in ("copy", "wait") for name in names} <= lanes()
            blocks = offloaded.stats().blocks
            assert offloaded.stats().exposed_ms >= sum(b.exposed_ms for b in blocks[:2]) > 0
            model(inputs())
            assert state("blocks.0") == (BlockState.RESIDENT, True, False)


# --- errors ---------------------------------------------------------------------------------------


def test_ranks_that_differ_are_told() -> None:
    def job(rank: int) -> bool:
        for settings in (
            {"resident_layers": rank},
            {"resident_scope": ("stage", "permanent")[rank]},
        ):
            model = make_toy(N)
            before = snapshot(model)
            with pytest.raises(dlo.AgreementError, match="differ in resident_"):
                start(model, **settings)
            assert_restored(model, before)
        model = make_toy(N)
        offloaded = start(model, resident_layers=2, **STAGE)
        call = (offloaded.offload_resident_layers, offloaded.load_resident_layers)[rank]
        with pytest.raises(dlo.AgreementError, match="differ in call"):
            call()
        check(model, make_toy(N), rank)
        offloaded.shutdown()
        return True

    assert all(run_ranks(job, 2))


def test_ranks_at_different_places_are_told() -> None:
    """One has begun a pass by a block, so loads would come between other fills there."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        offloaded = start(model, resident_layers=2, **STAGE)
        x = inputs()
        with torch.inference_mode():
            if rank == 0:
                model.blocks[0](x)
            for call in (offloaded.offload_resident_layers, offloaded.load_resident_layers):
                with pytest.raises(dlo.AgreementError, match="differ in open pass of model 0"):
                    call()
            if rank == 1:
                model.blocks[0](x)
        offloaded.offload_resident_layers()
        check(model, reference, rank)
        offloaded.shutdown()
        return True

    assert all(run_ranks(job, 2))


@pytest.mark.parametrize("size", [1, 2])
def test_device_memory_that_cannot_be_had_is_an_error_on_every_rank(size: int) -> None:
    """Nothing was loaded, and once there is memory everything goes on."""

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference = twin(model)
        backend = CpuBackend()
        offloaded = start(model, backend, resident_layers=2, **STAGE)
        offloaded.offload_resident_layers()
        left = backend.memory().allocated
        if rank == size - 1:
            backend.empty = out_of_memory  # type: ignore[method-assign]
        for call in (offloaded.load_resident_layers, lambda: model(inputs())):
            with (
                torch.no_grad(),
                pytest.raises(dlo.UseError, match="resident layers need") as error,
            ):
                call()
            assert f"rank {size - 1}: RuntimeError: out of memory" in str(error.value)
            assert backend.memory().allocated == left
        vars(backend).pop("empty", None)
        check(model, reference, rank)
        offloaded.shutdown()
        return True

    assert all(everywhere(job, size))


def out_of_memory(nbytes: int) -> torch.Tensor:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("size", [1, 2])
def test_a_load_that_fails_at_the_start_leaves_every_model_as_it_was(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def job(rank: int) -> bool:
        model = make_toy(N)
        before = snapshot(model)
        backend = CpuBackend()
        allocated = backend.memory().allocated
        if rank == size - 1:
            monkeypatch.setattr(Transfer, "load", lambda *_: 1 / 0)
        with pytest.raises(dlo.DloError) as error:
            start(model, backend, resident_layers=2, timeout_s=1.5, load_timeout_s=10.0)
        if rank == size - 1:
            assert "block 'blocks.1' could not be loaded" in str(error.value)
            assert "division by zero" in str(error.value)
        assert_restored(model, before)
        del error
        gc.collect()
        # What gloo had begun to gather is let go when gloo's own time is over.
        limit = time.monotonic() + 5
        while backend.memory().allocated != allocated:
            assert time.monotonic() < limit
            time.sleep(0.02)
            gc.collect()
        return True

    assert all(everywhere(job, size))


def test_a_load_that_fails_gives_host_memory_back_behind_copies_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page must not be unlocked, nor its memory go, while a device reads it."""
    said: list[str] = []
    goes_on = threading.Event()
    copy, synchronize, load = CpuBackend.copy, CpuStream.synchronize, Transfer.load
    release = PrivateStore.release

    def slow_copy(self: CpuBackend, dst: torch.Tensor, src: torch.Tensor) -> None:
        copy(self, dst, src)
        stream = self.current_stream()
        if isinstance(stream, CpuStream):
            stream.run(lambda: said.append("copied") if goes_on.wait(20) else None)

    def waited_for(self: CpuStream) -> None:
        goes_on.set()
        synchronize(self)

    def load_one(self: Transfer, slot: Any, block: int) -> None:
        if block != 1:
            raise ArithmeticError("the second load fails")
        load(self, slot, block)

    def noted(self: PrivateStore) -> None:
        said.append("given back")
        release(self)

    monkeypatch.setattr(CpuBackend, "copy", slow_copy)
    monkeypatch.setattr(CpuStream, "synchronize", waited_for)
    monkeypatch.setattr(Transfer, "load", load_one)
    monkeypatch.setattr(PrivateStore, "release", noted)
    with pytest.raises(dlo.FillError, match="the second load fails"):
        start(make_toy(N), resident_layers=2)
    goes_on.set()
    assert said == ["copied", "given back"]


@pytest.mark.parametrize("by", ["the call", "a forward"])
def test_an_interrupted_load_closes_the_offload(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much of it is queued is unknown, and the other ranks have queued all."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    model = make_toy(N)
    offloaded = start(model, resident_layers=2, **STAGE)
    offloaded.offload_resident_layers()
    call = offloaded.load_resident_layers if by == "the call" else partial(model, inputs())
    monkeypatch.setattr(Transfer, "load", interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        call()
    assert offloaded.failed
    with torch.no_grad(), pytest.raises(dlo.UseError, match="failed earlier and is closed"):
        model(inputs())
    offloaded.shutdown()


def test_neither_call_is_for_the_middle_of_a_pass() -> None:
    model = make_toy(N)
    with start(model, resident_layers=2, **STAGE) as offloaded:
        for call in (offloaded.load_resident_layers, offloaded.offload_resident_layers):
            for block in (model.blocks[1], model.blocks[2]):
                handle = block.register_forward_pre_hook(lambda *_, call=call: call())
                with torch.no_grad(), pytest.raises(dlo.UseError, match="busy"):
                    model(inputs())
                handle.remove()
        check(model, make_toy(N))
    for call in (offloaded.load_resident_layers, offloaded.offload_resident_layers):
        with pytest.raises(dlo.UseError, match=r"not enabled|shut down"):
            call()


def test_a_model_called_from_inside_of_a_resident_block_is_refused() -> None:
    model = make_toy(N)
    with start(model, resident_layers=N):
        handle = model.blocks[0].register_forward_pre_hook(lambda *_: model(inputs()))
        with torch.no_grad(), pytest.raises(dlo.UseError, match="busy"):
            model(inputs())
        handle.remove()


def test_residents_count_as_computed_also_where_no_times_are_kept() -> None:
    """Else the watch takes a device that computes them for one that stands still."""

    def job(rank: int) -> int:
        model = make_toy(N)
        offloaded = start(model, resident_layers=3, time_every=0)
        check(model, make_toy(N), rank)
        assert offloaded.engine is not None
        num_computed = offloaded.engine.transfer.num_computed()
        offloaded.shutdown()
        return num_computed

    assert everywhere(job, 2) == [N, N]


# --- order ----------------------------------------------------------------------------------------


def run_dropping(mode: str, world: World) -> list[torch.Tensor]:
    """Drop the residents between passes, let a forward load them, and return what is wrong."""
    model: nn.Module = Program(N)
    reference = twin(model)
    backend = SimBackend(world, host_ahead=True)
    offloaded = dlo.offload(
        model,
        device=backend,
        group=None if mode == MODES[0] else GlooAgreement(backend),
        stages=0 if mode == MODES[2] else 2,
        resident_layers=2,
        timeout_s=10.0,
        **STAGE,
    )
    wrong = []
    with torch.no_grad():
        for _ in range(3):
            with backend.compute():
                got = run_passes([model], [None, (1, 2, 3), None])
            wanted = run_passes([reference], [None, (1, 2, 3), None])
            wrong += [a for a, b in zip(got, wanted, strict=True) if not torch.equal(a, b)]
            offloaded.offload_resident_layers()
    offloaded.shutdown()
    return wrong


def run_reusing(world: World) -> list[torch.Tensor]:
    """Load into memory that queued computation still reads, as an allocator hands it out again."""
    model: nn.Module = Program(N)
    reference = twin(model)
    backend = SimBackend(world, host_ahead=True)
    offloaded = dlo.offload(model, device=backend, resident_layers=1, **STAGE)
    offloaded.offload_resident_layers()
    backend.synchronize()
    freed = backend.empty(offloaded.footprint.residents_nbytes)
    freed.fill_(1)
    with torch.no_grad():
        with backend.compute():
            kept = freed.clone()
            backend.empty = lambda nbytes: freed  # type: ignore[method-assign]
            got = run_passes([model], [None])
        wanted = run_passes([reference], [None])
    offloaded.shutdown()
    wrong = [a for a, b in zip(got, wanted, strict=True) if not torch.equal(a, b)]
    return wrong + ([] if bool((kept == 1).all()) else [kept])


def test_memory_is_let_go_behind_the_computation_that_reads_it() -> None:
    """Which is queued, and has not run when they are dropped; whoever comes next writes at once."""
    model = Program(N)
    reference = twin(model)
    backend = SimBackend(host_ahead=True)
    offloaded = dlo.offload(model, device=backend, resident_layers=2, **STAGE)
    assert offloaded.engine is not None
    buffers = [slot.buffer for slot in offloaded.engine.pool.residents.values()]
    with torch.no_grad():
        with Compute(backend):
            out = model(inputs())
        offloaded.offload_resident_layers()
        for buffer in buffers:
            buffer.fill_(255)
        backend.synchronize()
        assert torch.equal(out, reference(inputs()))
    offloaded.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_right_however_late_or_early_streams_run(mode: str) -> None:
    some = [World(), World(early=(COPY,)), World(mode="random"), World(mode="eager")]
    assert count_wrong(mode, [partial(run_dropping, mode, world) for world in some]) == 0


def plant(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (number,) = [site.number for site in sites() if str(site) == name]
    module = mutant(number)
    for kind in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer"):
        monkeypatch.setattr(engine_module, kind, getattr(module, kind))


@pytest.mark.parametrize("mode", MODES)
def test_bits_are_wrong_without_the_wait_for_a_load(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, WAIT_ON_RESIDENT)
    assert count_wrong(mode, [partial(run_dropping, mode, World())]) > 0


def test_bits_are_wrong_without_the_record_before_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_reusing(World(early=(COPY,))) == []
    plant(monkeypatch, REUSED_MEMORY)
    assert run_reusing(World(early=(COPY,))) != []


def test_a_resident_block_is_waited_for_once_a_load() -> None:
    """Each later pass goes without, so that it could be captured."""
    waits: list[str] = []

    model: nn.Module = Program(N)
    backend = SimBackend(host_ahead=True)
    offloaded = dlo.offload(model, device=backend, resident_layers=N, **STAGE)
    stream = type(backend.current_stream())
    wait = stream.wait_event

    def counting(self: Any, event: Any) -> None:
        waits.append(self.name)
        wait(self, event)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), backend.compute():
        patch.setattr(stream, "wait_event", counting)
        run_passes([model], [None])
        assert waits.count("compute") == N
        run_passes([model], [None, None])
        assert waits.count("compute") == N
    offloaded.shutdown()
