"""The order of packed weights: no race, no host wait, and no wait that is not needed."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernels import InnerCalls
from mutations import mutant, packed_sites
from test_kit import Run, caught_by
from toys import Block, Toy, inputs, make_toy, same_bits, twin

import dlo_core as dlo
from dlo_core import engine as engine_module
from dlo_core.errors import UseError
from dlo_core.packed_choice import PackedChoice
from dlo_core.packed_figures import Figures
from dlo_core.testing import MODES, Recorder, SimBackend
from dlo_core.transfer import Transfer

if TYPE_CHECKING:
    from dlo_core.streamer import Streamer


class HeavyBlock(Block):
    """A block that gets smaller when it is packed."""

    def __init__(self, ballast: int) -> None:
        super().__init__()
        self.ballast = torch.nn.Parameter(torch.randn(ballast).bfloat16())

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Return what the last of the ballast changes."""
        return super().forward(x, scale) + self.ballast[-x.shape[-1] :].float()


def heavy_toy(ranks: int) -> Toy:
    """Return a toy of which each rank's part gets smaller."""
    torch.manual_seed(0)
    return Toy([HeavyBlock(30000 + 40000 * (ranks - 1)) for _ in range(5)]).requires_grad_(False)


SITES = [site for site in packed_sites() if not site.timing_only]


@pytest.mark.parametrize(
    ("ranks", "stages", "mode"),
    [
        (1, 2, "late"),
        (1, 2, "eager"),
        (2, 2, "late"),
        (2, 0, "random"),
        *(
            pytest.param(ranks, stages, mode, marks=pytest.mark.slow)
            for ranks in (1, 2, 3)
            for stages in (2, 0)
            for mode in MODES
        ),
    ],
)
def test_packed_weights_have_no_race_and_no_host_sync(ranks: int, stages: int, mode: str) -> None:
    for residents in (0, 2):
        run = Run(ranks=ranks, stages=stages, mode=mode, packed=True, residents=residents)()
        assert run.races == []
        if not residents:
            assert run.host_syncs == [[]] * ranks
        touched = {access.buffer for access in run.recorders[0].log}
        assert "home of all blocks" in touched


@pytest.mark.parametrize(
    ("ranks", "residents", "spared"),
    [
        (1, 3, 0.2),
        (2, 2, 0.0),
        *(
            pytest.param(ranks, residents, spared, marks=pytest.mark.slow)
            for ranks in (1, 2, 3)
            for residents, spared in ((0, 0.0), (2, 0.0), (3, 0.2))
        ),
    ],
)
def test_a_change_to_packed_weights_has_no_race(
    ranks: int, residents: int, spared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    faster = Figures(0.0, 200.0, 1.0, 0.7, 1.0, spared)
    monkeypatch.setattr(PackedChoice, "figures", lambda *_: faster)
    # More blocks come to stay, or those that do stay raw; ranks skip other blocks.
    for mode in MODES if ranks == 1 and not residents else ("late", "random"):
        run = Run(
            build=partial(heavy_toy, ranks),
            ranks=ranks,
            mode=mode,
            packed="auto",
            residents=residents,
        )
        # Verifying waits for the device, which would hide that the change does not.
        run._settings["verify_packed"] = False
        run()
        assert run.races == []
        touched = {access.buffer for access in run.recorders[0].log}
        assert "home of all blocks" in touched
        assert all(order == run.world.collectives[0] for order in run.world.collectives)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_no_random_changes_of_the_form_have_a_race_or_change_a_bit(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other blocks are skipped on each rank and in each pass, and the form changes at any."""
    chance = random.Random(seed)
    told = [chance.choice([(0.0, 0.0), (0.0, 0.3), (300.0, 0.0)]) for _ in range(13)]

    def figures(_: PackedChoice, streamer: Streamer) -> Figures:
        compute, spared = told[streamer.tape.num_passes]
        return Figures(compute, 200.0, 1.0, 0.7, 1.0, spared)

    monkeypatch.setattr(PackedChoice, "figures", figures)
    for name, number in (("_TIMES", 1), ("_EVERY", 1), ("_MOST_SWITCHES", 99)):
        monkeypatch.setattr(f"dlo_core.packed_choice.{name}", number)
    skips = [
        [tuple(n for n in range(5) if chance.random() < 0.3) for _ in range(12)] for _ in range(2)
    ]
    monkeypatch.setattr("test_kit.SKIPS", skips)
    ranks = chance.choice([1, 2, 3])
    run = Run(
        build=partial(heavy_toy, ranks),
        ranks=ranks,
        stages=chance.choice([0, 2]),
        mode="random",
        seed=seed,
        packed="auto",
        residents=chance.choice([0, 2, 3]),
        depth=chance.choice([2, 3]),
    )
    run._settings["verify_packed"] = False
    run()
    assert run.races == []
    assert all(order == run.world.collectives[0] for order in run.world.collectives)


class Reading(Run):
    """A run in which the weights are read and written between its passes, over borrowed slots."""

    def _rank(self, rank: int) -> list[str]:
        recorder = self.recorders[rank]
        backend = SimBackend(self.world, rank, recorder=recorder)
        model = heavy_toy(1)
        resident = twin(model)
        offloaded = dlo.offload(model, device=backend, **self._settings)
        recorder.watch(offloaded)
        with torch.inference_mode(), backend.compute():
            for number in range(6):
                x = inputs(number)
                # The reading is on another stream than the passes.
                with backend.stream(backend.new_compute_stream(f"compute {number}")):
                    got = model(x)
                if number % 2:
                    state = model.state_dict()
                    assert all(same_bits(state[k], v) for k, v in resident.state_dict().items())
                if number == 2:
                    offloaded.update_weights(resident.state_dict())
                assert torch.equal(got, resident(x)), number
        offloaded.shutdown()
        return []


@pytest.mark.parametrize(
    "mode", [MODES[0], *(pytest.param(mode, marks=pytest.mark.slow) for mode in MODES[1:])]
)
def test_reading_packed_weights_over_borrowed_slots_has_no_race(mode: str) -> None:
    run = Reading(mode=mode, packed=True)()
    assert run.races == []
    log = run.recorders[0].log
    assert {"slot 0", "home of all blocks"} <= {each.buffer for each in log if each.op == "decode"}


def test_borrowing_slots_without_the_wait_for_compute_is_a_race(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Transfer, "stand_still", lambda transfer: None)
    assert any("race" in caught_by([Reading(mode=mode, packed=True)]) for mode in MODES)


def test_forwards_on_several_compute_streams_have_no_race() -> None:
    for mode in MODES:
        build = lambda: make_toy(3)  # noqa: E731 - the run builds one on each rank
        assert Run(build=build, several_streams=True, mode=mode, packed=True)().races == []


@pytest.mark.parametrize("site", SITES, ids=str)
def test_without_any_one_wait_or_record_there_is_a_race(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mutant(site.number)
    for name in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer", "DecodedHome"):
        monkeypatch.setattr(engine_module, name, getattr(module, name))
    runs: list[Run | InnerCalls] = [Run(mode=mode, packed=True) for mode in MODES]
    runs.append(Run(build=lambda: make_toy(3), several_streams=True, packed=True))
    runs += [InnerCalls(packed=True), InnerCalls(inner=2, packed=True)]
    assert "race" in caught_by(runs)


def test_every_wait_and_record_of_packed_weights_is_listed() -> None:
    assert len(SITES) == 5


@pytest.mark.parametrize("mode", MODES)
def test_a_block_inside_of_another_one_on_another_stream_has_no_race(mode: str) -> None:
    for inner in (1, 2):
        assert InnerCalls(mode, inner=inner, packed=True)().races == []


def test_a_block_that_could_not_be_bound_leaves_its_home_in_order() -> None:
    """The decoding of a call that failed comes before the one on another stream."""
    recorder = Recorder()
    backend = SimBackend(recorder=recorder)
    model = make_toy(3)
    offloaded = dlo.offload(model, device=backend, packed=True)
    recorder.watch(offloaded)
    block = model.get_submodule("blocks.0.norm")
    name = next(iter(block._parameters))
    held = block._parameters[name]
    with torch.inference_mode(), backend.compute():
        block._parameters[name] = torch.nn.Parameter(torch.zeros(1))
        with backend.stream(backend.new_compute_stream("one")), pytest.raises(UseError):
            model(inputs(0))
        block._parameters[name] = held
        with backend.stream(backend.new_compute_stream("two")):
            model(inputs(0))
    offloaded.shutdown()
    recorder.check()
