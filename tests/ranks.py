"""Ranks: forked processes of one gloo job, whose errors are collected and whose time is limited."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

__all__ = ["RanksError", "run_ranks"]


class RanksError(AssertionError):
    """Raised when a rank raised, died or did not end in time; holds what every rank said."""


def run_ranks(
    fn: Callable[..., Any], size: int, *args: Any, limit_s: float = 40.0, timeout_s: float = 20.0
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``size`` ranks of a gloo job and return their results, by rank.

    Args:
        fn: Runs in a forked child, so it may be a closure; its result must pickle.
        size: Number of ranks.
        *args: Given to every rank.
        limit_s: After so many seconds all ranks are killed.
        timeout_s: Of the default group.

    Raises:
        RanksError: Names every rank that failed, with its traceback.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="dlo-test-") as folder:
        ranks = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(fn, rank, size, str(Path(folder) / "store"), timeout_s, theirs, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        deadline = time.monotonic() + limit_s
        answers = [_answer(ours, deadline) for _, ours in ranks]
        for process, _ in ranks:
            process.join(max(0.0, min(5.0, deadline - time.monotonic())))
            hung = process.is_alive()
            process.kill()
            process.join()
            if hung:
                answers.append((False, "a rank did not exit after its result"))
            elif process.exitcode:
                answers.append((False, f"a rank ended with exit code {process.exitcode}"))
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
    if failed:
        raise RanksError("\n".join(failed))
    return [value for _, value in answers]


def _answer(pipe: Connection, deadline: float) -> tuple[bool, Any]:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return False, "did not end in time"
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        return False, "died without a result"


def _child(
    fn: Callable[..., Any],
    rank: int,
    size: int,
    store: str,
    timeout_s: float,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        pipe.send((True, fn(rank, *args)))
    # The parent must hear of everything.
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    # Not sys.exit: pytest's own exit handlers belong to the parent.
    os._exit(0)
