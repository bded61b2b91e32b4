"""Ranks: processes of one gloo job, whose errors are collected and whose time is limited.

[Note: fork and one thread]
A forked rank starts in 0.05 s, a spawned one in seconds, because torch is imported already; and
what it runs may be a closure. The price: the child of a process that used torch's thread pool
hangs at its first parallel operator, since the pool's threads are not there. So the parent keeps
to one thread (``torch.set_num_threads(1)`` before anything is computed; the pytest plug-in does
it), which also keeps bits comparable, for CPU kernels split work by the number of threads. A
parent that used an accelerator cannot fork ranks that use it too: those are spawned.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

__all__ = ["RanksError", "run_ranks"]

_EXIT_S = 5.0
_PR_SET_PDEATHSIG = 1


class RanksError(AssertionError):
    """Raised when a rank raised, died or did not end in time; holds what every rank said.

    Attributes:
        errors: What went wrong, by rank: a traceback, or how the process ended.
    """

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in errors.items()))
        self.errors = errors


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    value: Any = None
    error: str | None = None


def run_ranks(
    fn: Callable[..., Any],
    size: int,
    *args: Any,
    limit_s: float = 40.0,
    timeout_s: float = 20.0,
    start_method: str = "fork",
) -> list[Any]:
    """Run ``fn(rank, *args)`` on ``size`` ranks of a gloo job and return their results, by rank.

    However it ends, no process is left: a rank, and whatever it started, is killed.

    Args:
        fn: Runs in a child, so its result must pickle; forked, it may be a closure.
        size: Number of ranks.
        *args: Given to every rank.
        limit_s: After so many seconds all ranks are killed.
        timeout_s: Of the default group.
        start_method: ``"fork"``, or ``"spawn"`` for ranks that use an accelerator.

    Raises:
        RanksError: Names every rank that failed, with its traceback.
        RuntimeError: This process cannot fork ranks that would work.
    """
    if start_method == "fork":
        _check_can_fork()
    with tempfile.TemporaryDirectory(prefix="dlo-ranks-") as folder:
        job = (size, str(Path(folder) / "store"), timeout_s)
        ranks: list[_Rank] = []
        try:
            for rank in range(size):
                ranks.append(_start(start_method, fn, rank, job, args))
            deadline = time.monotonic() + limit_s
            for each in ranks:
                _hear(each, deadline, limit_s)
            for each in ranks:
                _join(each, deadline)
        finally:
            for each in ranks:
                _kill(each)
    errors = {number: each.error for number, each in enumerate(ranks) if each.error is not None}
    if errors:
        raise RanksError(errors)
    return [each.value for each in ranks]


def _check_can_fork() -> None:
    """Refuse where a forked rank would hang. See [Note: fork and one thread]."""
    threads = torch.get_num_threads()
    if threads > 1:
        raise RuntimeError(
            f"run_ranks() forks, and torch has {threads} threads here; a forked child hangs at its "
            "first parallel operator. Call torch.set_num_threads(1) before anything is computed, "
            "or load the plug-in: pytest -p dlo_core.testing.pytest_plugin"
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "run_ranks() starts a job of its own, and torch.distributed is initialised in this "
            "process; call it outside, or destroy_process_group() first"
        )


def _start(
    method: str, fn: Callable[..., Any], rank: int, job: tuple[Any, ...], args: tuple[Any, ...]
) -> _Rank:
    context: Any = multiprocessing.get_context(method)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(fn, rank, job, theirs, args), daemon=False)
    with warnings.catch_warnings():
        # Since Python 3.12, when another thread is there, such as a test's timer.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Rank(process, ours)


def _hear(rank: _Rank, deadline: float, limit_s: float) -> None:
    """Take the rank's answer, or say that there is none."""
    if not rank.pipe.poll(max(0.0, deadline - time.monotonic())):
        rank.error = f"did not end in time ({limit_s:g} s)"
        return
    try:
        ok, answer = pickle.loads(rank.pipe.recv_bytes())
    except EOFError:
        rank.process.join(_EXIT_S)
        rank.error = f"died without a result (exit code {rank.process.exitcode})"
        return
    if ok:
        rank.value = answer
    else:
        rank.error = answer


def _join(rank: _Rank, deadline: float) -> None:
    """Let the rank end by itself; a result does not excuse a bad end."""
    rank.process.join(max(0.0, min(_EXIT_S, deadline - time.monotonic())))
    if rank.error is None and rank.process.is_alive():
        rank.error = "did not exit after its result"
    elif rank.error is None and rank.process.exitcode:
        rank.error = f"ended with exit code {rank.process.exitcode} after its result"


def _kill(rank: _Rank) -> None:
    """Kill the rank and all that is in its process group: what it started, too."""
    pid = rank.process.pid
    if pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    rank.process.kill()
    rank.process.join()
    rank.pipe.close()


def _child(
    fn: Callable[..., Any],
    rank: int,
    job: tuple[int, str, float],
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
    size, store, timeout_s = job
    _found_family()
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        # A rank that is done at once would close connections that a peer is still making.
        dist.barrier()
        result = fn(rank, *args)
        pipe.send_bytes(pickle.dumps((True, result)))
    # The parent must hear of everything.
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        pipe.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    # Not sys.exit: pytest's own exit handlers belong to the parent.
    os._exit(0)


def _found_family() -> None:
    """Lead a process group of our own, so that all of it can be killed, and die with the parent."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
