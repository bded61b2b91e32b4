"""Random programs with residents: drops, loads, updates and readings between passes that differ."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from kernels import Program
from toys import twin

import dlo_core as dlo
from dlo_core.testing import MODES, Recorder, SimAgreement, SimBackend, World

# What all ranks do alike between passes; a pass may differ from rank to rank.
STEPS = ("pass", "pass", "pass", "idle", "drop", "load", "update", "read", "idle on one")


class Plan:
    """What a seed says."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.ranks = draw.choice((1, 2, 2, 3))
        self.sizes = [draw.randint(1, 6) for _ in range(draw.choice((1, 1, 2)))]
        self.world = World(self.ranks, draw.choice(MODES), seed)
        self.settings: dict[str, Any] = {
            "stages": draw.choice((0, 2)),
            "depth": draw.choice((2, 3)),
            "resident_layers": draw.randint(0, min(self.sizes)),
            "resident_placement": draw.choice(("spread", "leading")),
            "resident_scope": "stage",
            "timeout_s": 10.0,
        }
        self.steps = [self.step(draw) for _ in range(12)]

    def step(self, draw: random.Random) -> tuple[str, int, list[list[int]]]:
        """Return what is done, to which model, and the blocks that each rank runs."""
        model = draw.randrange(len(self.sizes))
        calls = []
        for _ in range(self.ranks):
            blocks = [b for b in range(self.sizes[model]) if draw.random() < 0.8]
            if draw.random() < 0.15:
                blocks.insert(draw.randint(0, len(blocks)), -1)
            if blocks and draw.random() < 0.2:
                place = draw.randrange(len(blocks))
                blocks.insert(place, blocks[place])
            calls.append(blocks)
        return draw.choice(STEPS), model, calls

    def run(self) -> list[str]:
        """Run it on every rank and return the races."""
        races = self.world.run_ranks(self._rank)
        return [race for found in races for race in found]

    def _rank(self, rank: int) -> list[str]:
        recorder = Recorder()
        backend = SimBackend(self.world, rank, recorder=recorder)
        models = [Program(size, seed=number) for number, size in enumerate(self.sizes)]
        twins = [twin(model) for model in models]
        group = SimAgreement(self.world, rank) if self.ranks > 1 else None
        offloaded = dlo.offload(models, device=backend, group=group, **self.settings)
        recorder.watch(offloaded)
        with torch.no_grad(), backend.compute():
            for number, (what, at, calls) in enumerate(self.steps):
                model, other = models[at], twins[at]
                if what == "drop":
                    offloaded.offload_resident_layers()
                elif what == "load":
                    offloaded.load_resident_layers()
                elif what == "update":
                    new = {k: v * 0.9 for k, v in other.state_dict().items()}
                    other.load_state_dict(new)
                    offloaded.update_weights(new, model=model)
                elif what == "read":
                    got, wanted = offloaded.state_dict(model), other.state_dict()
                    assert got is not None
                    assert all(torch.equal(got[k], v) for k, v in wanted.items()), number
                elif what == "idle" or (what == "idle on one" and rank == 0):
                    with offloaded.run_pass(model):
                        pass
                else:
                    self._pass(model, other, number, calls[rank])
        offloaded.shutdown()
        return [str(race) for race in recorder.races]

    @staticmethod
    def _pass(
        model: torch.nn.Module, other: torch.nn.Module, number: int, calls: list[int]
    ) -> None:
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
        if -1 in calls:
            with pytest.raises(ArithmeticError):
                model(x, calls)
        else:
            assert torch.equal(model(x, calls), other(x, calls)), number


def explore(seeds: range) -> None:
    for seed in seeds:
        plan = Plan(seed)
        try:
            races = plan.run()
        except BaseException as error:
            error.add_note(f"seed {seed}: {plan.sizes}, {plan.settings}, {plan.steps}")
            raise
        assert races == [], seed


def test_bits_are_right_and_nothing_races_in_random_programs() -> None:
    explore(range(12))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_bits_are_right_and_nothing_races_in_200_random_programs() -> None:
    explore(range(1000, 1200))
