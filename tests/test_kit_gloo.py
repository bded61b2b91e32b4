"""The testing kit over gloo: real forked ranks, each of them late, early or in a random order."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from mutations import RESIDENTS, mutant, sites
from toys import TOYS, inputs, make_toy, twin

import dlo_core as dlo
from dlo_core import engine as engine_module
from dlo_core.cpu_stream import StreamError
from dlo_core.errors import BackendError, DloError
from dlo_core.gather_transfer import StagedTransfer
from dlo_core.tape import Tape
from dlo_core.testing import GlooAgreement, Recorder, SimBackend, World, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from dlo_core.slots import Slot

STAGED, IN_PLACE = 2, 0
# What each rank does: passes, each with the blocks that it skips. The ranks differ, from the first
# pass on, in which they learn the order.
SKIPS: list[list[Sequence[int]]] = [
    [(), (1, 3), (), (0, 1, 2, 3, 4), ()],
    [(2,), (), (), (), (4,)],
    [(0, 1, 2, 3, 4), (4,), (), (0,), ()],
]


@dataclass(slots=True)
class Outcome:
    """How a run went on one rank."""

    races: list[str] = field(default_factory=list)
    wrong: list[int] = field(default_factory=list)
    outputs: list[bytes] = field(default_factory=list)
    host_syncs: list[str] = field(default_factory=list)
    schedule: list[str] = field(default_factory=list)
    num_accesses: int = 0
    error: str = ""

    @property
    def found(self) -> set[str]:
        """How a fault showed."""
        kinds = {"race": self.races, "bits": self.wrong or self.error}
        return {kind for kind, shown in kinds.items() if shown}


def run_once(
    rank: int,
    mode: str,
    seed: int = 0,
    *,
    stages: int = STAGED,
    depth: int = 2,
    early: Sequence[str] = (),
    host_ahead: bool = True,
    build: Callable[[], nn.Module] = lambda: make_toy(5),
    skips: list[list[Sequence[int]]] = SKIPS,
) -> Outcome:
    """Run the real engine on this rank of a gloo job."""
    recorder, outcome = Recorder(), Outcome()
    world = World(mode=mode, seed=seed, early=early)
    backend = SimBackend(world, recorder=recorder, host_ahead=host_ahead)
    agreement = GlooAgreement(backend)
    model = build()
    resident = twin(model)
    settings: dict[str, Any] = {"stages": stages, "depth": depth, "timeout_s": 10.0}
    offloaded = dlo.offload(model, device=backend, group=agreement, **settings)
    recorder.watch(offloaded)
    backend.host_syncs.clear()
    batches = [inputs(10 * rank + number) for number in range(len(skips[rank]))]
    try:
        with torch.inference_mode():
            with backend.compute():
                pairs = zip(batches, skips[rank], strict=True)
                outs = [model(x, skip=skip) for x, skip in pairs]
                outcome.host_syncs = list(backend.host_syncs)
            for number, (x, skip, out) in enumerate(zip(batches, skips[rank], outs, strict=True)):
                outcome.outputs.append(out.numpy().tobytes())
                if not torch.equal(out, resident(x, skip=skip)):
                    outcome.wrong.append(number)
    # A fault that the engine itself notices, here or on the other rank.
    except (DloError, StreamError) as error:
        outcome.error = str(error)
        offloaded.shutdown()
    agreement.barrier()
    outcome.races = [str(race) for race in recorder.races]
    outcome.num_accesses = recorder.num_accesses
    outcome.schedule = world.schedule
    offloaded.shutdown()
    return outcome


def run_all(runs: Sequence[Callable[[int], Outcome]], size: int = 2) -> list[list[Outcome]]:
    """Return the outcomes of each run, by rank; one job for all of them."""
    by_rank = run_ranks(lambda rank: [run(rank) for run in runs], size)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def modes(*, seeds: int = 2, **settings: Any) -> list[Callable[[int], Outcome]]:
    """Return runs in every mode, the random one with some seeds."""
    which = [("late", 0), ("eager", 0), *(("random", seed) for seed in range(seeds))]
    return [partial(run_once, mode=mode, seed=seed, **settings) for mode, seed in which]


@pytest.mark.parametrize(
    ("size", "stages", "seeds"),
    [
        (2, STAGED, 1),
        (3, IN_PLACE, 1),
        *(
            pytest.param(size, stages, 20, marks=pytest.mark.slow)
            for size, stages in itertools.product((2, 3), (STAGED, IN_PLACE))
        ),
    ],
)
def test_the_engine_as_it_is_has_no_race_and_right_bits(size: int, stages: int, seeds: int) -> None:
    runs = modes(stages=stages, seeds=seeds)
    runs += modes(stages=stages, depth=3, seeds=seeds, host_ahead=False)[-2:]
    for outcome in itertools.chain(*run_all(runs, size)):
        assert outcome.found == set()
        assert outcome.host_syncs == []
        assert outcome.num_accesses > 100


SLOW_KINDS = ("plain", "portable", "one block", "called twice at once")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=pytest.mark.slow) if k in SLOW_KINDS else k for k in TOYS],
)
def test_awkward_models_have_no_race_and_right_bits(kind: str) -> None:
    whole: list[list[Sequence[int]]] = [[()] * 3, [()] * 3]
    runs = modes(seeds=1, build=TOYS[kind], skips=whole)
    assert [outcome.found for outcome in itertools.chain(*run_all(runs))] == [set()] * 6


# --- planted faults -------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, site: str) -> None:
    """Take one wait or record out of the engine."""
    (number,) = [s.number for s in sites() if str(s) == site]
    module = mutant(number)
    for name in ("LocalTransfer", "StagedTransfer", "InPlaceTransfer"):
        monkeypatch.setattr(engine_module, name, getattr(module, name))


class WrongStream(StagedTransfer):
    """Records slot.filled where the copy is done, and not the gather."""

    def fill(self, slot: Slot, block: int, fill: int) -> None:
        """Fill, then record the event anew on the copy stream."""
        super().fill(slot, block, fill)
        self._copy_stream.record_event(slot.filled)


class SlotByBlock(Tape):
    """Takes the slot from the block's number."""

    def slot(self, fill: int) -> Slot:
        """Return the wrong slot where blocks are no multiple of slots."""
        return self._pool.slots[self.block(fill) % self.depth]


# Each fault of the six, staged and in place where these differ.
MISSING = {
    "no wait on drained, staged": (
        STAGED,
        "StagedTransfer.fill: self._comm_stream.wait_event(slot.drained)",
    ),
    "no wait on drained, in place": (
        IN_PLACE,
        "GatheringTransfer._part_copy: self._copy_stream.wait_event(slot.drained)",
    ),
    "drained not recorded": (STAGED, "Transfer.release: stream.record_event(slot.drained)"),
    "no wait on filled": (STAGED, "Transfer.acquire: stream.wait_event(slot.filled)"),
    "no wait on the copy, staged": (
        STAGED,
        "StagedTransfer.fill: self._comm_stream.wait_event(stage.filled)",
    ),
    "no wait on the copy, in place": (
        IN_PLACE,
        "GatheringTransfer._bring: self._comm_stream.wait_event(slot.copied)",
    ),
}
# All blocks, so that no rank waits in vain for one whose fault was noticed.
WHOLE: list[list[Sequence[int]]] = [[()] * 3, [()] * 3]


def assert_found(stages: int) -> None:
    """Check that late and random runs show a race, each of them, and some run wrong bits."""
    runs = [partial(run_once, mode="late", stages=stages, skips=WHOLE)]
    runs += [partial(run_once, mode="random", seed=s, stages=stages, skips=WHOLE) for s in range(2)]
    outcomes = run_all(runs)
    assert all("race" in rank.found for ranks in outcomes for rank in ranks)
    assert any("bits" in rank.found for ranks in outcomes for rank in ranks)


@pytest.mark.parametrize("fault", MISSING)
def test_a_missing_wait_or_record_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stages, site = MISSING[fault]
    plant(monkeypatch, site)
    assert_found(stages)


# This one orders several compute streams; nothing of the others is for a lone rank only.
SEVERAL_COMPUTE_STREAMS = "Transfer._wait_for_reader: stream.wait_event(slot.drained)"
GATHERING = [
    str(site)
    for site in sites()
    if not (site.timing_only or site.of_graphs)
    and not site.owner.startswith("LocalTransfer")
    and str(site) not in (SEVERAL_COMPUTE_STREAMS, *RESIDENTS)
]


@pytest.mark.slow
@pytest.mark.parametrize("site", GATHERING)
def test_no_wait_or_record_is_gone_without_a_race(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, site)
    stages = IN_PLACE if site.startswith("GatheringTransfer") else STAGED
    skips: list[list[Sequence[int]]] = [[(), (0, 1, 2, 3, 4), ()], [()] * 3]
    runs = modes(stages=stages, skips=skips)
    assert any("race" in rank.found for rank in itertools.chain(*run_all(runs)))


def test_filled_recorded_on_the_wrong_stream_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "StagedTransfer", WrongStream)
    assert_found(STAGED)


def test_a_slot_chosen_by_block_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "Tape", SlotByBlock)
    for outcome in itertools.chain(*run_all(modes(skips=WHOLE))):
        assert outcome.found, "nobody noticed"


def test_a_plain_group_is_refused_on_every_rank() -> None:
    def child(rank: int) -> None:
        with pytest.raises(BackendError, match=r"group=GlooAgreement\(backend\)"):
            dlo.offload(make_toy(), device=SimBackend(), group=torch.distributed.group.WORLD)

    run_ranks(child, 2)


# --- replay ---------------------------------------------------------------------------------------


def test_a_seed_replays_its_schedule() -> None:
    build = TOYS["run order of its own"]
    runs = [partial(run_once, mode="random", seed=s, build=build) for s in (0, 1, 0, 1)]
    first, other, *again = [[rank.schedule for rank in ranks] for ranks in run_all(runs)]
    assert [first, other] == again
    assert first[0] != other[0]


def test_a_failing_seed_replays_its_wrong_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, MISSING["no wait on filled"][1])
    runs = [partial(run_once, mode="random", seed=s, skips=WHOLE) for s in range(2)]
    first, again = run_all(runs), run_all(runs)
    assert any(rank.wrong for ranks in first for rank in ranks)
    assert [[rank.outputs for rank in ranks] for ranks in first] == [
        [rank.outputs for rank in ranks] for ranks in again
    ]
