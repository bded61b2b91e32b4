"""Chaos: whatever happens to a rank, nobody hangs, computes a wrong number, or leaves anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chaos import problems_of, run_plan, table
from chaos_plan import FAULTS, Plan

# Quick ones: nobody waits for a deadline.
QUICK = ("kill in a block", "exception", "exception, exit", "group destroyed", "shutdown")


def plan_of(fault: str, seed: int, timeout_s: float) -> Plan:
    """Return the plan of a seed with one fault only."""
    return Plan.of(seed, timeout_s, (fault,))


@pytest.mark.parametrize("fault", QUICK)
def test_a_fault_is_an_error_with_a_name(fault: str) -> None:
    outcome = run_plan(plan_of(fault, seed=4, timeout_s=3.0))
    assert not problems_of(outcome), outcome


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, 3 * len(FAULTS), len(FAULTS)))
def test_every_fault_from_some_seeds(first: int) -> None:
    """The table in docs/failures.md is made from 300 and more."""
    outcomes = [run_plan(Plan.of(seed, 2.0)) for seed in range(first, first + len(FAULTS))]
    problems = {outcome.plan: found for outcome in outcomes if (found := problems_of(outcome))}
    assert not problems
    assert table(outcomes, 2.0).count("\n") == len(FAULTS) + 4


def test_what_must_not_be_is_seen() -> None:
    """The witness of these tests: a rank that says nothing, or something wrong."""
    plan = plan_of("kill", seed=4, timeout_s=3.0)
    good = run_plan(plan)
    assert not problems_of(good)
    told = next(told for told in good.told if told is not None)
    for change, text in (
        ({"wrong": 1}, "wrong numbers"),
        ({"left": "a thread"}, "left behind"),
        ({"text": "something failed", "culprit": -1}, "names nobody"),
        ({"again": "nothing"}, "computed after"),
        ({"took_s": 99.0}, "raised after"),
    ):
        bad = replace(good, told=tuple(t and replace(told, **change) for t in good.told))
        assert any(text in found for found in problems_of(bad)), change
    assert "hung" in problems_of(replace(good, codes=(None,) * plan.size))[0]
