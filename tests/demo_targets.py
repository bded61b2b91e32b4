"""What the ranks of a demo run in the tests of the launch: importable, so processes find it."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np

from dlo_core.demo.result import Failed, RankResult, Step, StreamedRun

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from dlo_core.demo.job import Job


def made_result(job: Job, rank: int) -> RankResult:
    """Return a result in which all modes drew the same."""
    images = np.linspace(-1, 1, job.num_images * 64, dtype=np.float32).reshape(-1, 8, 8) + rank
    return RankResult(
        rank=rank,
        model_nbytes=1_940_000,
        resident_images=images,
        resident_pass_ms=11.0,
        streamed=tuple(
            StreamedRun(
                mode=mode,
                images=images.copy(),
                pass_ms=12.0 + rank,
                predicted_device_nbytes=650_000,
                measured_device_nbytes=650_000,
                host_nbytes=1_900_000 // (job.ranks if mode == "gather" else 1),
                passes=48,
                fills=672,
                copied_nbytes=1,
                gathered_nbytes=2,
                exposed_ms=0.5,
                overlap=0.9,
                spans=(),
            )
            for mode in job.streamed_modes
        ),
    )


def answers(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """Do all that is asked."""
    pipe.send(Step(rank, "resident"))
    pipe.send(made_result(job, rank))


def fails_on_rank_1(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """Fail on rank 1 while the others wait for it."""
    pipe.send(Step(rank, "gather"))
    if rank == 1:
        pipe.send(Failed(rank, "gather", "ValueError: made to fail", "Traceback of rank 1"))
        raise SystemExit(1)
    time.sleep(60)


def dies_on_rank_0(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """End rank 0 without a word."""
    pipe.send(Step(rank, "rank-local"))
    if rank == 0:
        os._exit(7)
    pipe.send(made_result(job, rank))


def crashes_at_exit(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """Give the result, then end badly."""
    pipe.send(made_result(job, rank))
    os._exit(9)


def hangs(job: Job, rank: int, store: str, pipe: Connection) -> None:
    """Never end."""
    pipe.send(Step(rank, "resident"))
    time.sleep(60)
