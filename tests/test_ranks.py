"""Ranks of the testing kit: results, errors of every rank, limits that kill, no process left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
import torch
import torch.distributed as dist

from dlo_core.testing.ranks import RanksError, run_ranks

if TYPE_CHECKING:
    from pathlib import Path


def rank_times(rank: int, factor: int) -> int:
    """Return something that only this rank can know."""
    assert dist.get_rank() == rank
    return rank * factor


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_results_come_back_by_rank(start_method: str) -> None:
    assert run_ranks(rank_times, 2, 10, start_method=start_method) == [0, 10]


def test_ranks_talk_over_gloo_with_one_thread_each() -> None:
    def work(rank: int) -> tuple[float, int]:
        mine = torch.tensor([float(rank + 1)])
        dist.all_reduce(mine)
        return mine.item(), torch.get_num_threads()

    assert run_ranks(work, 3) == [(6.0, 1)] * 3


def test_a_large_result_comes_back() -> None:
    results = run_ranks(lambda rank: bytes(3 << 20), 2)
    assert [len(result) for result in results] == [3 << 20] * 2


def test_tensors_come_back_though_their_rank_is_gone() -> None:
    """``Connection.send`` would share their memory, which its rank must then still be there for."""
    for _ in range(3):
        results = run_ranks(lambda rank: torch.full((1000,), rank), 2)
        assert [result.sum().item() for result in results] == [0, 1000]


def test_errors_of_every_rank_are_collected() -> None:
    def work(rank: int) -> None:
        if rank != 1:
            raise ValueError(f"trouble on {rank}")

    with pytest.raises(RanksError) as caught:
        run_ranks(work, 3)
    assert set(caught.value.errors) == {0, 2}
    assert "ValueError: trouble on 0" in caught.value.errors[0]
    assert "rank 2: " in str(caught.value)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksError, match=r"rank 1: died without a result \(exit code 7\)"):
        run_ranks(lambda rank: os._exit(7) if rank else None, 2)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RanksError, match="pickle"):
        run_ranks(lambda rank: lambda: None, 1)


def test_a_limit_kills_the_ranks_and_what_they_started(tmp_path: Path) -> None:
    def work(rank: int) -> None:
        script = "import time; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", script])
        (tmp_path / str(rank)).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(RanksError, match="did not end in time") as caught:
        run_ranks(work, 2, limit_s=4.0)
    assert set(caught.value.errors) == {0, 1}
    assert time.monotonic() - began < 20
    for rank in range(2):
        for pid in map(int, (tmp_path / str(rank)).read_text().split()):
            assert gone(pid), f"process {pid} of rank {rank} is still there"


def test_what_a_rank_leaves_behind_is_killed(tmp_path: Path) -> None:
    def work(rank: int) -> int:
        return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid

    (pid,) = run_ranks(work, 1)
    assert gone(pid)


def gone(pid: int) -> bool:
    """Return whether a process ends within a moment, or is a zombie that nobody reads."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def test_ranks_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
import os, time, torch
from pathlib import Path
from dlo_core.testing.ranks import run_ranks
torch.set_num_threads(1)
def work(rank):
    path = Path({str(tmp_path)!r}, str(rank))
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
    time.sleep(60)
run_ranks(work, 2)
"""
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 30
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.1)
    finally:
        parent.kill()
        parent.wait()
    assert all(gone(int((tmp_path / str(rank)).read_text())) for rank in range(2))


def test_several_threads_in_the_parent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(RuntimeError, match=r"has 4 threads here.*set_num_threads"):
        run_ranks(partial(rank_times, 0), 1)


def test_a_job_inside_a_job_is_refused() -> None:
    with pytest.raises(RanksError, match=r"torch\.distributed is initialised in this process"):
        run_ranks(lambda rank: run_ranks(rank_times, 1, 1), 1)
