"""The testing kit finds planted faults on the real engine, and none where there is none."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mutations import REUSED_MEMORY, mutant, sites
from torch import nn
from toys import TOYS, AwkwardBlock, OrderedToy, Toy, WideBlock, inputs, make_toy, twin

import dlo_core as dlo
from dlo_core import engine as engine_module
from dlo_core.errors import UseError
from dlo_core.gather_transfer import StagedTransfer
from dlo_core.tape import Tape
from dlo_core.testing import (
    MODES,
    Deadlock,
    RankFailed,
    Recorder,
    SimAgreement,
    SimBackend,
    World,
)

if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Sequence

    from kernels import InnerCalls

    from dlo_core.slots import Slot

# What one rank does: passes, each with the blocks that it skips; ranks differ.
SKIPS: list[list[Sequence[int]]] = [
    [(), (1, 3), (), (0, 1, 2, 3, 4), (), ()],
    [(2,), (), (), (), (4,), ()],
]


# The last block is held and called again, on another stream, before its slot is filled anew.
REBINDS: list[Sequence[int]] = [(), (0, 1), (), (0, 1), ()]


WAIT_ON_FILLED = "Transfer.acquire: stream.wait_event(slot.filled)"


class Run:
    """A run of one model on simulated ranks, with a recorder on each."""

    def __init__(
        self,
        *,
        ranks: int = 1,
        stages: int = 2,
        mode: str = "late",
        seed: int = 0,
        depth: int = 2,
        build: Callable[[], nn.Module] = lambda: make_toy(5),
        several_streams: bool = False,
        residents: int = 0,
        packed: bool | str = False,
        timed: bool = False,
    ) -> None:
        """Prepare; most passes of a real run keep no times, so these keep none by default."""
        self._several_streams = several_streams
        self.world = World(ranks, mode, seed)
        self.recorders = [Recorder() for _ in range(ranks)]
        self.host_syncs: list[list[str]] = []
        self._settings: dict[str, Any] = {"stages": stages, "depth": depth, "packed": packed}
        self._settings["time_every"] = 1 if timed or packed == "auto" else 0
        if residents:
            self._settings |= {"resident_layers": residents, "resident_scope": "stage"}
        self._build = build

    def __call__(self) -> Run:
        """Run, comparing bits; raise what goes wrong."""
        self.host_syncs = self.world.run_ranks(self._rank)
        return self

    def _rank(self, rank: int) -> list[str]:
        recorder = self.recorders[rank]
        backend = SimBackend(self.world, rank, recorder=recorder)
        model = self._build()
        resident = twin(model)
        group = SimAgreement(self.world, rank) if self.world.size > 1 else None
        offloaded = dlo.offload(model, device=backend, group=group, **self._settings)
        recorder.watch(offloaded)
        backend.host_syncs.clear()
        with torch.inference_mode(), backend.compute():
            for number, skip in enumerate(REBINDS if self._several_streams else SKIPS[rank % 2]):
                x = inputs(10 * rank + number)
                stream = backend.current_stream()
                if self._several_streams:
                    stream = backend.new_compute_stream(f"compute {number}")
                with backend.stream(stream):
                    got = model(x, skip=skip)
                assert torch.equal(got, resident(x, skip=skip)), number
                if number == 1 and "resident_layers" in self._settings:
                    offloaded.offload_resident_layers()
        syncs = list(backend.host_syncs)
        offloaded.shutdown()
        return syncs

    @property
    def races(self) -> list[str]:
        """What all recorders found."""
        return [str(race) for recorder in self.recorders for race in recorder.races]


CASES = list(itertools.product((1, 2, 3), (2, 0), MODES))


@pytest.mark.parametrize(("ranks", "stages", "mode"), CASES)
def test_the_engine_as_it_is_has_no_race_and_no_host_sync(
    ranks: int, stages: int, mode: str
) -> None:
    for depth in (2, 3) if ranks < 3 else (2,):
        run = Run(ranks=ranks, stages=stages, mode=mode, depth=depth, timed=depth == 2)()
        assert run.races == []
        assert run.host_syncs == [[]] * ranks
        assert all(recorder.num_accesses > 100 for recorder in run.recorders)
        # Skips differ from rank to rank, the collectives do not.
        assert all(order == run.world.collectives[0] for order in run.world.collectives)


@pytest.mark.parametrize(("ranks", "stages"), [(1, 2), (2, 2), (2, 0)])
@pytest.mark.parametrize("mode", MODES)
def test_blocks_that_stay_and_are_dropped_have_no_race(mode: str, ranks: int, stages: int) -> None:
    for timed in (False, True):
        run = Run(ranks=ranks, stages=stages, mode=mode, residents=2, timed=timed)()
        assert run.races == []
    names = {access.buffer for access in run.recorders[0].log}
    assert {"resident 1", "resident 3"} <= names


def test_forwards_on_several_compute_streams_have_no_race() -> None:
    for mode in MODES:
        run = Run(build=lambda: make_toy(3), several_streams=True, mode=mode)()
        assert run.races == []


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 60))]
)
@pytest.mark.parametrize("stages", [2, 0])
def test_no_random_schedule_changes_a_bit(seed: int, stages: int) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = [AwkwardBlock(seed=n) if n % 2 else WideBlock() for n in range(5)]
        return OrderedToy(blocks, [2, 0, 4, 1, 3]).requires_grad_(False)

    run = Run(ranks=2, stages=stages, mode="random", seed=seed, build=build)()
    assert run.races == []


def test_a_seed_replays_a_random_schedule() -> None:
    def order(seed: int) -> list[tuple[str, str, str]]:
        run = Run(ranks=2, mode="random", seed=seed)()
        return [(a.op, a.timeline, a.buffer) for a in run.recorders[0].log]

    steps = [Run(ranks=2, mode="random", seed=7)().world.num_steps for _ in range(2)]
    assert steps[0] == steps[1]
    assert order(3) == order(3)


def plant(monkeypatch: pytest.MonkeyPatch, module: types.ModuleType) -> None:
    for name in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer"):
        monkeypatch.setattr(engine_module, name, getattr(module, name))


def runs_for(owner: str) -> list[Run]:
    """Return the runs that go through a class of ``MODULES``."""
    ways = {"LocalTransfer": (1, 2), "StagedTransfer": (2, 2), "GatheringTransfer": (2, 0)}
    ranks, stages = ways.get(owner.partition(".")[0], (1, 2))
    runs = [Run(ranks=ranks, stages=stages, mode=mode) for mode in MODES]
    runs.append(Run(ranks=ranks, stages=stages, residents=2))
    return [*runs, Run(build=lambda: make_toy(3), several_streams=True)]


def caught_by(runs: Sequence[Run | InnerCalls]) -> set[str]:
    """Return how faults showed: as a race, as wrong bits, as a deadlock."""
    found = set()
    for run in runs:
        try:
            run()
        except RankFailed as failed:
            kinds = {type(error) for error in failed.errors.values()}
            found.add("deadlock" if kinds == {Deadlock} else "bits")
        if run.races:
            found.add("race")
    return found


ORDERING = [
    site
    for site in sites()
    if not (site.timing_only or site.of_graphs) and str(site) != REUSED_MEMORY
]


@pytest.mark.parametrize("site", ORDERING, ids=str)
def test_each_wait_and_record_is_missed_by_the_recorder_when_it_is_gone(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, mutant(site.number))
    assert "race" in caught_by(runs_for(site.owner))


@pytest.mark.parametrize(
    ("site", "event"),
    [
        ("LocalTransfer._fill_copy: self._copy_stream.wait_event(slot.drained)", "slot.drained"),
        ("Transfer.release: stream.record_event(slot.drained)", "slot.drained"),
        ("Transfer.acquire: stream.wait_event(slot.filled)", "slot.filled"),
        ("StagedTransfer.fill: self._comm_stream.wait_event(stage.filled)", "stage.filled"),
    ],
)
def test_a_race_names_the_block_the_fill_and_the_missing_event(
    site: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (number,) = [s.number for s in sites() if str(s) == site]
    plant(monkeypatch, mutant(number))
    races: list[str] = []
    for run in runs_for(site):
        caught_by([run])
        races += run.races
    named = [race for race in races if race.endswith(f"missing: {event}")]
    assert named
    assert any("fill " in race and "blocks." in race for race in named) or "stage" in event


def test_filled_recorded_on_the_wrong_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongStream(StagedTransfer):
        """Records slot.filled where the copy is done, and not the gather."""

        def fill(self, slot: Slot, block: int, fill: int) -> None:
            """Fill, then record the event anew on the copy stream."""
            super().fill(slot, block, fill)
            self._copy_stream.record_event(slot.filled)

    monkeypatch.setattr(engine_module, "StagedTransfer", WrongStream)
    runs = [Run(ranks=2, mode=mode) for mode in MODES]
    assert caught_by(runs) >= {"race", "bits"}


def test_a_slot_chosen_by_block_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class SlotByBlock(Tape):
        """Takes the slot from the block's number."""

        def slot(self, fill: int) -> Slot:
            """Return the wrong slot where blocks are no multiple of slots."""
            slot: Slot = self._pool.slots[self.block(fill) % self.depth]
            return slot

    monkeypatch.setattr(engine_module, "Tape", SlotByBlock)
    with pytest.raises(RankFailed) as caught:
        Run()()
    assert isinstance(caught.value.errors[0], UseError | AssertionError)


def test_a_rank_that_makes_one_pass_more_is_a_deadlock_that_names_the_waits() -> None:
    world = World(2)

    def rank_fn(rank: int) -> None:
        model = make_toy(5)
        dlo.offload(model, device=SimBackend(world, rank), group=SimAgreement(world, rank))
        with torch.inference_mode():
            for _ in range(2 + rank):
                model(inputs())

    with pytest.raises(RankFailed, match="nothing can move") as caught:
        world.run_ranks(rank_fn)
    assert isinstance(caught.value.errors[1].__cause__, Deadlock)


class CopyingBlock(nn.Module):
    """Reads its weight only in operations that say they give a view, and copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the weight, turned."""
        return x + self.weight.t().reshape(8)


def test_a_copy_in_the_guise_of_a_view_is_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    (number,) = [s.number for s in sites() if str(s) == WAIT_ON_FILLED]
    plant(monkeypatch, mutant(number))
    model = Toy([CopyingBlock() for _ in range(3)]).requires_grad_(False)
    recorder = Recorder()
    backend = SimBackend(recorder=recorder)
    recorder.watch(dlo.offload(model, device=backend))
    with torch.inference_mode(), backend.compute():
        model(inputs())
    with pytest.raises(AssertionError, match=r"compute.*missing: slot\.filled"):
        recorder.check()


@pytest.mark.parametrize("kind", TOYS)
def test_a_host_that_runs_ahead_gets_the_bits_of_any_model(kind: str) -> None:
    model = TOYS[kind]()
    resident = twin(model)
    backend = SimBackend(World(mode="random", seed=1), host_ahead=True)
    offloaded = dlo.offload(model, device=backend)
    before = inputs()
    with torch.inference_mode():
        with backend.compute():
            outs = [model(before, skip=skip) for skip in ((), (1,), ())]
        for skip, out in zip(((), (1,), ()), outs, strict=True):
            assert torch.equal(out, resident(before, skip=skip))
    offloaded.disable()


def test_what_needs_values_makes_a_host_that_runs_ahead_wait() -> None:
    backend = SimBackend(host_ahead=True)
    device = backend.empty(16).fill_(3)
    with backend.compute():
        doubled = device * 2
        assert torch.equal(torch.full((16,), 6, dtype=torch.uint8), doubled)
        assert doubled.sum().item() == 96
        assert doubled[doubled > 1].numel() == 16
        device.add_(1)
        out = torch.add(device, device, out=torch.empty(16, dtype=torch.uint8))
    assert set(out.tolist()) == {8}


def test_a_host_that_runs_ahead_sees_no_values_before_it_waits() -> None:
    backend = SimBackend(host_ahead=True)
    device = backend.empty(32).fill_(0)
    with backend.compute():
        out = device.view(torch.float32) + 1
        early = out.tolist()
    assert all(math.isnan(value) for value in early)
    assert out.tolist() == [1.0] * 8


def test_a_bad_setting_of_the_simulation_is_an_error() -> None:
    with pytest.raises(ValueError, match="mode must be one of"):
        World(mode="soon")
    with pytest.raises(ValueError, match="early= is for mode 'late'"):
        World(mode="random", early=("stream 0",))
    with pytest.raises(ValueError, match="rank 1 is not in a world of 1"):
        SimBackend(World(), 1)


def test_fresh_memory_is_poison() -> None:
    assert set(SimBackend().empty(16).tolist()) == {0xFF}


def test_two_models_in_one_pool_have_no_race() -> None:
    world = World(2, "late")

    def rank_fn(rank: int) -> None:
        recorder = Recorder()
        backend = SimBackend(world, rank, recorder=recorder)
        torch.manual_seed(0)
        models = [make_toy(3, seed=1), Toy([WideBlock() for _ in range(4)])]
        for model in models:
            model.requires_grad_(False)
        resident = [twin(model) for model in models]
        offloaded = dlo.offload(models, device=backend, group=SimAgreement(world, rank))
        recorder.watch(offloaded)
        with torch.inference_mode(), backend.compute():
            for number in range(6):
                which = number % 2
                x = inputs(number + rank)
                assert torch.equal(models[which](x), resident[which](x))
        recorder.check()

    world.run_ranks(rank_fn)
