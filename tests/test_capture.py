"""A captured pass: one graph holds all copies and all compute, and takes turns with passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernels import Program
from mutations import mutant
from test_order import COPY, IN_GRAPHS, LATE, ordering
from torch import nn
from toys import twin

import dlo_core as dlo
import dlo_core.engine
from dlo_core.testing import SimBackend, World

# A second compute stream, and the copy stream of a capture behind it.
SECOND, GRAPHS_COPY = "stream 1", "stream 2"
EARLY: tuple[tuple[str, ...], ...] = (
    LATE,
    (COPY,),
    (SECOND,),
    (COPY, SECOND, GRAPHS_COPY),
    ("compute", COPY, GRAPHS_COPY),
)


def batch(number: int) -> torch.Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(number))


class Job:
    """An offloaded program on a simulated device, and its resident twin."""

    def __init__(self, n: int = 4, world: World | None = None, **settings: Any) -> None:
        self.model = Program(n)
        self.resident = twin(self.model)
        self.backend = SimBackend(world or World(), host_ahead=True)
        self.offloaded = dlo.offload(self.model, device=self.backend, **settings)

    def compare(self, runs: list[tuple[str, int]], streams: int = 1) -> int:
        """Capture, then pass and replay in turn, on ``streams`` streams; count what is wrong.

        Args:
            runs: ``"pass"``, ``"replay"`` or ``"new weights"``, and the number of the input.
            streams: Compute streams that take turns.
        """
        second = self.backend.new_stream()
        outputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad(), self.backend.compute():
            captured = self.offloaded.capture(self.model, batch(0))
            self.backend.host_syncs.clear()
            read = self.backend.new_event()
            for turn, (kind, number) in enumerate(runs):
                stream = (self.backend.current_stream(), second)[turn % streams]
                with self.backend.stream(stream):
                    if kind == "replay":
                        # The next replay writes over the output, perhaps on another stream.
                        stream.wait_event(read)
                        got = captured(batch(number)).clone()
                        stream.record_event(read)
                    else:
                        got = self.model(batch(number))
                outputs.append((got, self.resident(batch(number))))
            assert not self.backend.host_syncs
        self.backend.synchronize()
        return sum(not torch.equal(got, expected) for got, expected in outputs)


TURNS = [
    *[("replay", 1), ("replay", 2), ("pass", 3), ("replay", 4), ("pass", 5), ("pass", 6)],
    *[("replay", 7), ("replay", 8)],
]


@torch.no_grad()
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("early", EARLY)
def test_replays_and_passes_take_turns_with_right_bits(
    early: tuple[str, ...], streams: int
) -> None:
    job = Job(world=World(early=early))
    assert job.compare(TURNS, streams) == 0
    stats = job.offloaded.stats()
    # Two to warm up.
    assert stats.passes == 2 + len(TURNS)
    assert stats.fills == 4 * stats.passes + 1
    assert stats.copied_bytes == stats.fills * job.offloaded.footprint.host_nbytes // 4


@torch.no_grad()
@pytest.mark.parametrize("streams", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"resident_layers": 2}])
def test_packed_weights_are_decoded_in_the_graph(settings: dict[str, Any], streams: int) -> None:
    for early in EARLY:
        job = Job(world=World(early=early), packed=True, **settings)
        assert job.compare(TURNS, streams) == 0


def test_weights_that_may_change_their_form_are_not_captured() -> None:
    job = Job(packed="auto")
    with pytest.raises(dlo.ConfigError, match="packed='auto' may change"), job.backend.compute():
        job.offloaded.capture(job.model, batch(0))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_replays_are_right_in_random_orders(seed: int) -> None:
    for n, depth in ((4, 2), (6, 3), (2, 2), (3, 4), (1, 2)):
        job = Job(n, World(mode="random", seed=seed), depth=depth)
        assert job.compare(TURNS, streams=2) == 0


@pytest.mark.parametrize(("n", "depth"), [(6, 3), (2, 2), (3, 4), (1, 2)])
def test_other_depths_and_models_that_fit_into_the_slots(n: int, depth: int) -> None:
    job = Job(n, depth=depth)
    assert job.compare(TURNS, streams=2) == 0


def test_new_weights_are_in_the_next_replay() -> None:
    job = Job()
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        captured(batch(1))
        new = torch.randn(8, 8)
        named = {f"blocks.{number}.weight": new for number in (0, 3)}
        job.resident.load_state_dict(named, strict=False)
        job.offloaded.update_weights(named.items())
        got = [captured(batch(2)).clone(), captured().clone(), job.model(batch(2))]
    expected = job.resident(batch(2))
    assert all(torch.equal(one, expected) for one in got)


@pytest.mark.parametrize(("n", "stay"), [(6, 2), (5, 1), (3, 3)])
def test_blocks_that_stay_are_read_where_they_are(n: int, stay: int) -> None:
    job = Job(n, resident_layers=stay)
    assert job.compare(TURNS, streams=2) == 0


@pytest.mark.parametrize("stay", [2, 4])
def test_new_weights_of_blocks_that_stay_are_in_the_next_replay(stay: int) -> None:
    """It waits for their loads, of which nothing else would run before it here."""
    job = Job(resident_layers=stay)
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        for seed in range(2):
            new = {k: v * 0.5 + seed for k, v in job.resident.state_dict().items()}
            job.resident.load_state_dict(new)
            job.offloaded.update_weights(new)
            got = [captured(batch(2)).clone(), job.model(batch(2)), captured().clone()]
            job.backend.synchronize()
            expected = job.resident(batch(2))
            assert all(torch.equal(one, expected) for one in got), seed


def test_a_replay_after_blocks_that_stay_were_dropped_is_refused() -> None:
    job = Job(resident_layers=2, resident_scope="stage")
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        job.offloaded.offload_resident_layers()
        with pytest.raises(dlo.UseError, match=r"dropped since the pass was captured.*capture\(\)"):
            captured(batch(1))
        again = job.offloaded.capture(job.model, batch(0))
        with pytest.raises(dlo.UseError, match="dropped since"):
            captured(batch(1))
        got = [again(batch(1)).clone(), job.model(batch(1))]
    assert all(torch.equal(one, job.resident(batch(1))) for one in got)


def test_two_models_in_the_same_slots_each_have_their_graph() -> None:
    models = [Program(4, seed=seed) for seed in (1, 2)]
    resident = [twin(model) for model in models]
    backend = SimBackend(host_ahead=True)
    offloaded = dlo.offload(models, device=backend)
    with torch.no_grad(), backend.compute():
        captured = [offloaded.capture(model, batch(0)) for model in models]
        got = [captured[turn % 2](batch(turn)).clone() for turn in range(5)]
        got.append(models[1](batch(5)))
        with pytest.raises(dlo.ConfigError, match=r"by giving capture\(\) the model itself"):
            offloaded.capture(lambda: None)
    assert all(torch.equal(one, resident[turn % 2](batch(turn))) for turn, one in enumerate(got))


# --- what a graph is recorded with ----------------------------------------------------------------


def test_the_arguments_given_at_the_capture_stay_the_callers() -> None:
    job = Job()
    mine = batch(0)
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, mine)
        captured(batch(1))
        got = captured(mine).clone()
    assert torch.equal(mine, batch(0))
    assert torch.equal(got, job.resident(mine))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.zeros(3, 8),), r"takes a tensor \(2, 8\) .* got a tensor \(3, 8\)"),
        ((torch.zeros(2, 8).double(),), r"got a tensor \(2, 8\) of torch.float64"),
        ((torch.zeros(2, 8), None), "another number or other names"),
        ((7,), "got 7"),
    ],
)
def test_other_arguments_are_refused_before_anything_is_written(
    arguments: tuple[Any, ...], text: str
) -> None:
    job = Job()
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        with pytest.raises(dlo.UseError, match=text):
            captured(*arguments)
        assert torch.equal(captured().clone(), job.resident(batch(0)))


# --- what cannot be captured ----------------------------------------------------------------------


def test_a_backend_without_graphs_says_so() -> None:
    model = Program(4)
    offloaded = dlo.offload(model, device=SimBackend())
    with torch.no_grad(), pytest.raises(dlo.ConfigError, match="captures no graphs"):
        offloaded.capture(model, batch(0))
    with pytest.raises(dlo.BackendError), offloaded.backend.capture():
        pass


def test_a_count_that_does_not_divide_names_depths_that_do() -> None:
    job = Job(9, depth=2)
    with torch.no_grad(), job.backend.compute():
        with pytest.raises(dlo.ConfigError, match=r"9 blocks .* 2 slots.*use depth=3 or 9"):
            job.offloaded.capture(job.model, batch(0))
        assert torch.equal(job.model(batch(1)).clone(), job.resident(batch(1)))


@pytest.mark.parametrize("count", [0, 2])
def test_a_call_that_is_no_pass_is_refused(count: int) -> None:
    job = Job()

    def call(x: torch.Tensor) -> torch.Tensor:
        for _ in range(count):
            x = job.model(x)
        return x

    with torch.no_grad(), job.backend.compute():
        with pytest.raises(dlo.UseError, match=f"ran the model {count} times"):
            job.offloaded.capture(call, batch(0))
        assert torch.equal(job.model(batch(1)).clone(), job.resident(batch(1)))


class Waiting(nn.Module):
    """A model that makes the host wait for a value."""

    dlo_blocks = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Program(4).blocks
        self.requires_grad_(False)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
            if self.fail:
                raise ArithmeticError("the model says so")
        return x


def test_a_failure_while_it_is_recorded_is_local() -> None:
    model = Waiting()
    resident = twin(model)
    backend = SimBackend(host_ahead=True)
    offloaded = dlo.offload(model, device=backend)
    calls = 0

    def call(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        model.fail = calls == 3
        return model(x)  # type: ignore[no-any-return]

    with torch.no_grad(), backend.compute():
        with pytest.raises(dlo.UseError, match="could not be captured: the model says so"):
            offloaded.capture(call, batch(0))
        model.fail = False
        captured = offloaded.capture(model, batch(1))
        got = [captured().clone(), model(batch(1))]
    assert all(torch.equal(one, resident(batch(1))) for one in got)


def test_blocks_that_are_skipped_at_the_end_leave_no_graph() -> None:
    job = Job()

    def call(x: torch.Tensor) -> torch.Tensor:
        return job.model(x, (0, 1, 2, 3, 0))  # type: ignore[no-any-return]

    with torch.no_grad(), job.backend.compute():
        with pytest.raises((dlo.UseError, dlo.ConfigError)):
            job.offloaded.capture(call, batch(0))
        assert torch.equal(job.model(batch(1)).clone(), job.resident(batch(1)))


@pytest.mark.parametrize("end", ["disable", "shutdown"])
def test_after_the_end_a_replay_is_refused(end: str) -> None:
    job = Job()
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        other = job.backend.new_compute_stream("compute 1")
        with job.backend.stream(other):
            captured()
            done = other.record_event()
        getattr(job.offloaded, end)()
        # The host's memory of the weights is gone, so the graph has read it.
        assert done.query()
        with pytest.raises(dlo.UseError):
            captured()


def test_a_forward_in_somebody_elses_graph_is_refused_and_harms_nothing() -> None:
    job = Job()
    with torch.no_grad(), job.backend.compute():
        captured = job.offloaded.capture(job.model, batch(0))
        x = batch(1)
        for call in (job.model, captured):
            with job.backend.capture(), pytest.raises(dlo.UseError, match=r"offloaded\.capture"):
                call(x)
        got = [job.model(batch(2)), captured(batch(2)).clone()]
    assert all(torch.equal(one, job.resident(batch(2))) for one in got)


# --- no superfluous wait --------------------------------------------------------------------------

NEEDED: dict[str, tuple[tuple[str, ...], int, list[tuple[str, int]]]] = {
    "Transfer.fork: current.record_event(self._edge)": (LATE, 1, TURNS),
    "Transfer.fork: side.wait_event(self._edge)": (LATE, 1, TURNS),
    "Transfer.join: side.record_event(self._edge)": (LATE, 1, TURNS),
    "Transfer.join: current.wait_event(self._edge)": (LATE, 1, TURNS),
    "Transfer.before_graph: stream.wait_event(slot.filled)": (LATE, 1, TURNS),
    "Transfer.before_graph: stream.wait_event(slot.drained)": (
        (COPY, SECOND, GRAPHS_COPY),
        2,
        TURNS,
    ),
    "Transfer.after_graph: stream.record_event(slot.drained)": ((COPY,), 2, TURNS),
}


def test_every_wait_around_a_graph_has_its_case() -> None:
    assert sorted(NEEDED) == sorted(IN_GRAPHS)


@pytest.mark.parametrize("call", NEEDED)
def test_bits_are_wrong_or_it_is_refused_without(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mutant(ordering()[call].number)
    monkeypatch.setattr(dlo_core.engine, "LocalTransfer", vars(module)["LocalTransfer"])
    early, streams, runs = NEEDED[call]
    job = Job(world=World(early=early))
    if "graph" in call:
        assert job.compare(runs, streams) > 0
    else:
        # The device itself refuses such a graph.
        with pytest.raises((dlo.UseError, dlo.FillError), match="graph"):
            job.compare(runs, streams)
