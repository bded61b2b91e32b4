"""The launch: runs a measurement on every rank, each in a process of its own, within a time limit.

A process of its own keeps what one measurement leaves behind (reserved memory, pinned pages, a
used process group) out of the next one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dlo_core.errors import DloError
from dlo_core.registry import device_type, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from dlo_core.interface import Backend

__all__ = ["Member", "RankError", "rank_device", "run_ranks"]

_EXIT_S = 10.0


class RankError(DloError, RuntimeError):
    """Raised when a rank of a measurement failed, died or did not end in time; names each."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """What a rank's measurement is given.

    Attributes:
        rank: Who it is.
        size: How many there are.
        backend: Of this rank's device.
        tell: Tells the caller what is done, for a progress bar.
    """

    rank: int
    size: int
    backend: Backend
    tell: Callable[[str], None]

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self.size > 1:
            dist.barrier()


@dataclass(slots=True)
class _Rank:
    process: BaseProcess
    pipe: Connection
    answer: list[Any] = field(default_factory=list)
    error: str = ""


def rank_device(device: str, rank: int) -> str:
    """Return the device of ``rank``: one each where the kind has several and none was named."""
    if ":" in device or device_type(device) == "cpu":
        return device
    return f"{device}:{rank % max(torch.accelerator.device_count(), 1)}"


def run_ranks(
    measure: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    device: str,
    ranks: int = 1,
    limit_s: float = 600.0,
    on_tell: Callable[[int, str], None] = lambda rank, what: None,
    environment: Callable[[int], Mapping[str, str]] = lambda rank: {},
) -> list[Any]:
    """Run ``measure(member, *arguments)`` on every rank and return the answers, by rank.

    Args:
        measure: A function that can be imported by name; its answer must pickle.
        arguments: The same for every rank; must pickle.
        device: Kind of device, or one device for all ranks.
        ranks: Number of processes.
        limit_s: After so many seconds all are killed.
        on_tell: Called with the rank and with what it told.
        environment: Variables of a rank, set before anything is loaded there.

    Raises:
        RankError: A rank failed, died, or time is up; no process is left.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dlo-bench-") as folder:
        job = (ranks, device, str(Path(folder, "store")))
        started: list[_Rank] = []
        try:
            for rank in range(ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run,
                    args=(rank, job, (measure, tuple(arguments)), dict(environment(rank)), theirs),
                    name=f"rank {rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                started.append(_Rank(process, ours))
            _listen(started, limit_s, on_tell)
        finally:
            for each in started:
                _end(each)
    return [each.answer[0] for each in started]


def _listen(ranks: list[_Rank], limit_s: float, on_tell: Callable[[int, str], None]) -> None:
    deadline = time.monotonic() + limit_s
    open_ = {each.pipe: number for number, each in enumerate(ranks)}
    while open_:
        ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            for number in open_.values():
                ranks[number].error = ranks[number].error or f"still running after {limit_s:.0f} s"
            break
        for pipe in ready:
            number = open_[pipe]  # type: ignore[index]
            each = ranks[number]
            try:
                kind, value = each.pipe.recv()
            except (EOFError, OSError):
                del open_[each.pipe]
                each.process.join(_EXIT_S)
                if not each.answer and not each.error:
                    each.error = f"ended without an answer, exit code {each.process.exitcode}"
                    deadline = min(deadline, time.monotonic() + _EXIT_S)
                continue
            if kind == "tell":
                on_tell(number, value)
            elif kind == "answer":
                each.answer.append(value)
            else:
                each.error = value
                # The others wait for this one; they may still say what they saw.
                deadline = min(deadline, time.monotonic() + _EXIT_S)
    errors = [f"rank {n} failed: {each.error}" for n, each in enumerate(ranks) if each.error]
    if errors:
        raise RankError("\n".join(errors))


def _end(rank: _Rank) -> None:
    if rank.answer and not rank.error:
        rank.process.join(_EXIT_S)
    rank.process.kill()
    rank.process.join()
    rank.pipe.close()


def _run(
    rank: int,
    job: tuple[int, str, str],
    work: tuple[Callable[..., Any], tuple[Any, ...]],
    environment: dict[str, str],
    pipe: Connection,
) -> None:
    """Do one rank's work in its process."""
    # Ctrl-C reaches every process of the terminal; the parent alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment)
    (size, device, store), (measure, arguments) = job, work
    try:
        # Resident and streamed runs must split their work alike, and ranks must not crowd.
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
        backend = get_backend(rank_device(device, rank))
        if backend.device.type != "cpu" and size > 1:
            torch.accelerator.set_device_index(backend.device.index or 0)
        if size > 1:
            _use_loopback()
            dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
        member = Member(rank, size, backend, lambda what: pipe.send(("tell", what)))
        pipe.send(("answer", measure(member, *arguments)))
        if size > 1:
            dist.barrier()
            dist.destroy_process_group()
    except BaseException as error:
        text = "" if isinstance(error, DloError) else f"\n{traceback.format_exc()}"
        pipe.send(("error", f"{type(error).__name__}: {error}{text}"))
        raise SystemExit(1) from None


def _use_loopback() -> None:
    """Let gloo talk over the loopback device, unless the user named another one."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in sorted(names & {"lo", "lo0"}):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
