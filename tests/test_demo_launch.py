"""The launch of the demo's ranks: results, failures, deaths, hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import demo_targets
import pytest

from dlo_core.demo import launch
from dlo_core.demo.job import Job
from dlo_core.demo.launch import RankError, run_ranks

if TYPE_CHECKING:
    from dlo_core.demo.result import Step


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 2.0)


def ignore(step: Step) -> None:
    """Take no note of ``step``."""


def test_results_come_by_rank_and_steps_are_told() -> None:
    steps: list[Step] = []
    job = Job(ranks=3)
    results = run_ranks(job, limit_s=50, on_step=steps.append, target=demo_targets.answers)
    assert [result.rank for result in results] == [0, 1, 2]
    assert sorted(step.rank for step in steps) == [0, 1, 2]


def test_a_failed_rank_is_named_with_its_traceback_and_the_others_are_killed() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(Job(), limit_s=50, on_step=ignore, target=demo_targets.fails_on_rank_1)
    assert str(caught.value).splitlines() == [
        "rank 1 failed (gather): ValueError: made to fail",
        "rank 0 was still running (gather) and was killed",
    ]
    assert caught.value.tracebacks == ("Traceback of rank 1",)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed \(rank-local\).*exit code 7"):
        run_ranks(Job(), limit_s=50, on_step=ignore, target=demo_targets.dies_on_rank_0)


def test_a_crash_after_the_result_is_a_failure() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed .*after its result, exit code 9"):
        run_ranks(Job(), limit_s=50, on_step=ignore, target=demo_targets.crashes_at_exit)


def test_ranks_that_hang_are_killed_when_time_is_up() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match="did not end within 1 s") as caught:
        run_ranks(Job(), limit_s=1, on_step=ignore, target=demo_targets.hangs)
    assert "rank 1 was still running" in str(caught.value)
    assert time.monotonic() - start < 20
