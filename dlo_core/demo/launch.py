"""The launch: starts the ranks, listens to them, and kills them when one fails or time is up."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from dlo_core.demo.rank import run_rank
from dlo_core.demo.result import Failed, RankResult, Step
from dlo_core.errors import DloError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.context import BaseContext
    from multiprocessing.process import BaseProcess

    from dlo_core.demo.job import Job

__all__ = ["RankError", "run_ranks"]

# Once one rank failed, its peers have so long to say what they saw of it; and once all results are
# there, the ranks have so long to exit.
GRACE_S = 5.0


class RankError(DloError, RuntimeError):
    """Raised when a rank of the demo failed, died or did not end in time; names each.

    Attributes:
        tracebacks: The traceback of each rank that sent one.
    """

    def __init__(self, message: str, *, tracebacks: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.tracebacks = tracebacks


def run_ranks(
    job: Job,
    *,
    limit_s: float,
    on_step: Callable[[Step], None],
    target: Callable[[Job, int, str, Connection], None] = run_rank,
) -> tuple[RankResult, ...]:
    """Run every rank of ``job`` in a process of its own and return their results, by rank.

    Args:
        job: What to do.
        limit_s: After so many seconds all ranks are killed.
        on_step: Called for every step of every rank.
        target: What a rank runs; importable by name.

    Raises:
        RankError: A rank failed, died, or time is up.
    """
    with tempfile.TemporaryDirectory(prefix="dlo-demo-") as folder:
        ranks = Ranks(job, Path(folder, "store"), target)
        try:
            return ranks.listen(limit_s=limit_s, on_step=on_step)
        finally:
            ranks.kill()


class Ranks:
    """The processes of one demo and what they said so far."""

    def __init__(
        self, job: Job, store: Path, target: Callable[[Job, int, str, Connection], None]
    ) -> None:
        context = start_context()
        self._processes: list[BaseProcess] = []
        self._pipes: dict[Connection, int] = {}
        self._results: dict[int, RankResult] = {}
        self._failures: dict[int, Failed] = {}
        self._steps: dict[int, Step] = {}
        for rank in range(job.ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(  # type: ignore[attr-defined]
                target=target,
                args=(job, rank, str(store), theirs),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            # The pipe ends when the child does, which holds the only other end.
            theirs.close()
            self._processes.append(process)
            self._pipes[ours] = rank

    def listen(self, *, limit_s: float, on_step: Callable[[Step], None]) -> tuple[RankResult, ...]:
        """Return all results once the last rank has ended."""
        deadline = time.monotonic() + limit_s
        while self._pipes:
            ready = wait(list(self._pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise self._error(limit_s)
            for pipe in ready:
                self._receive(pipe, on_step)  # type: ignore[arg-type]
            if self._failures or len(self._results) == len(self._processes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if self._failures:
            raise self._error(limit_s)
        return tuple(result for _, result in sorted(self._results.items()))

    def kill(self) -> None:
        """End every process that still runs."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()

    def _receive(self, pipe: Connection, on_step: Callable[[Step], None]) -> None:
        rank = self._pipes[pipe]
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            self._close(pipe, rank)
            return
        if isinstance(message, Step):
            self._steps[rank] = message
            on_step(message)
        elif isinstance(message, RankResult):
            self._results[rank] = message
        elif isinstance(message, Failed):
            self._failures[rank] = message

    def _close(self, pipe: Connection, rank: int) -> None:
        del self._pipes[pipe]
        pipe.close()
        self._processes[rank].join(GRACE_S)
        code = self._processes[rank].exitcode
        if rank not in self._failures and (code != 0 or rank not in self._results):
            when = "after its result" if rank in self._results else "without a result"
            reason = f"the process ended {when}, exit code {code}"
            self._failures[rank] = Failed(rank, self._mode(rank), reason, "")

    def _mode(self, rank: int) -> str:
        return self._steps[rank].mode if rank in self._steps else "start"

    def _error(self, limit_s: float) -> RankError:
        lines = [
            f"rank {rank} failed ({failure.mode}): {failure.reason}"
            for rank, failure in sorted(self._failures.items())
        ]
        lines += [
            f"rank {rank} was still running ({self._mode(rank)}) and was killed"
            for rank in sorted(self._pipes.values())
            if rank not in self._failures
        ]
        if not self._failures:
            lines.insert(0, f"the demo did not end within {limit_s:.0f} s")
        tracebacks = tuple(
            failure.traceback for _, failure in sorted(self._failures.items()) if failure.traceback
        )
        return RankError("\n".join(lines), tracebacks=tracebacks)


def start_context() -> BaseContext:
    """Return how processes are started.

    Never a plain fork: the caller may have threads and a used OpenMP pool, and then the child
    hangs at its first parallel operator. The fork server is a fresh process that has imported
    torch and computed nothing, so each further rank costs milliseconds; where there is none,
    each rank imports torch itself.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([run_rank.__module__])
    return context
