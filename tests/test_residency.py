"""Residency: which blocks stay, how many a budget holds, and what the others stream through."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from dlo_core.config import OffloadConfig
from dlo_core.errors import ConfigError
from dlo_core.residency import Budget, choose_residents, resident_positions, ring_of


@dataclass(frozen=True)
class Cut:
    nbytes: int
    padded_nbytes: int


def cuts(*sizes: int) -> list[Cut]:
    return [Cut(size // 2, size) for size in sizes]


def choose(
    models: list[list[Cut]],
    wanted: int | str = "auto",
    *,
    budget: int | None = None,
    placement: str = "spread",
    depth: int = 2,
    stages: int = 0,
    fixed: int = 0,
) -> tuple[frozenset[int], ...]:
    return choose_residents(
        models,
        wanted,  # type: ignore[arg-type]
        placement=placement,
        depth=depth,
        stages=stages,
        budget=Budget(budget, fixed),
    )


def needed(models: list[list[Cut]], chosen: tuple[frozenset[int], ...], stages: int = 0) -> int:
    """Return the bytes of a choice, by the definition."""
    ring = ring_of(models, chosen, depth=2, stages=stages)
    stay = [m[n].padded_nbytes for m, stay in zip(models, chosen, strict=True) for n in stay]
    return ring.nbytes + sum(stay)


def test_a_number_is_meant_for_every_model() -> None:
    models = [cuts(*[10] * 8), cuts(*[10] * 4)]
    assert choose(models, 2) == (frozenset({2, 6}), frozenset({1, 3}))
    assert choose(models, 2, placement="leading") == (frozenset({0, 1}),) * 2
    assert choose(models, 0) == (frozenset(),) * 2


def test_the_ring_has_what_streams_and_no_more() -> None:
    models = [cuts(100, 10, 20), cuts(30)]
    ring = ring_of(models, [frozenset({0}), frozenset()], depth=3, stages=2)
    assert (ring.num_slots, ring.slot_nbytes, ring.num_stages, ring.stage_nbytes) == (2, 30, 2, 15)
    assert ring.nbytes == 90
    assert ring_of(models, [frozenset({0, 1, 2}), frozenset({0})], depth=3, stages=2).nbytes == 0


@pytest.mark.parametrize("stages", [0, 2])
@pytest.mark.parametrize("placement", ["spread", "leading"])
def test_a_budget_is_filled_and_never_exceeded(placement: str, stages: int) -> None:
    """With one block more than was chosen it would not hold, but for whole rounds of the slots."""
    models = [cuts(*[10] * 9)]
    least = needed(models, (frozenset(),), stages)
    seen = set()
    for budget in range(least, 120):
        (stay,) = choose(models, budget=budget, placement=placement, stages=stages)
        assert needed(models, (stay,), stages) <= budget
        seen.add(len(stay))
        # Nine blocks and two slots: an odd number stays, so that the rest is a multiple of two.
        streamed = 9 - len(stay)
        assert streamed % 2 == 0 or streamed < 2 or not stay
        for more in (1, 2):
            if len(stay) + more <= 9 and (streamed - more) % 2 == 0:
                other = resident_positions(9, len(stay) + more, placement)
                assert needed(models, (other,), stages) > budget
    # Nine blocks take no more than seven and the slots.
    assert seen == {0, 1, 3, 5, 9}


def test_several_models_get_the_same_part_each() -> None:
    models = [cuts(*[10] * 30), cuts(*[10] * 10)]
    for budget in range(20, 420, 10):
        chosen = choose(models, budget=budget)
        assert needed(models, chosen) <= budget
        large, small = map(len, chosen)
        assert abs(large / 30 - small / 10) <= 0.2, budget
    assert choose(models, budget=400) == (frozenset(range(30)), frozenset(range(10)))


def test_what_is_fixed_counts_too() -> None:
    models = [cuts(*[10] * 4)]
    assert len(choose(models, budget=41, fixed=1)[0]) == 4
    # One block and two slots would fit, but three blocks would change their addresses.
    assert len(choose(models, budget=41, fixed=2)[0]) == 0


@pytest.mark.parametrize(
    ("wanted", "budget", "words"),
    [
        (
            "auto",
            19,
            r"even without a resident block.*20 bytes.*device_budget_bytes=19; raise .* 1,",
        ),
        (2, 39, r"resident_layers=2 need 40 bytes"),
        (5, None, r"resident_layers=5, but model 0 has 4 blocks; give at most 3"),
        (4, None, r"model 1 has 3 blocks"),
    ],
)
def test_what_cannot_be_had_is_named(wanted: int | str, budget: int | None, words: str) -> None:
    models = [cuts(*[10] * 4), cuts(*[1] * 3)] if budget is None else [cuts(*[10] * 4)]
    with pytest.raises(ConfigError, match=words):
        choose(models, wanted, budget=budget)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"resident_layers": -1}, "resident_layers must be a whole number"),
        ({"resident_layers": True}, "resident_layers must be"),
        ({"resident_layers": "all"}, "or 'auto'; got 'all'"),
        ({"resident_layers": 1.5}, "resident_layers must be"),
        ({"resident_layers": "auto"}, "give device_budget_bytes="),
        ({"device_budget_bytes": -1}, "device_budget_bytes must be"),
        ({"resident_placement": "middle"}, "'spread' or 'leading'; got 'middle'"),
        ({"resident_scope": "pass"}, "'permanent' or 'stage'; got 'pass'"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OffloadConfig.of(settings)


def test_every_choice_leaves_a_ring() -> None:
    """Whatever is asked, the slots hold the largest block that streams."""
    models = [cuts(7, 90, 3, 40, 40), cuts(60, 5)]
    for wanted, placement in itertools.product((0, 1, 2), ("spread", "leading")):
        chosen = choose(models, wanted, placement=placement, stages=2)
        ring = ring_of(models, chosen, depth=2, stages=2)
        rest = [
            model[n].padded_nbytes
            for model, stay in zip(models, chosen, strict=True)
            for n in range(len(model))
            if n not in stay
        ]
        assert ring.slot_nbytes == max(rest)
