"""Chaos: seeded faults over gloo ranks, and what became of every rank.

``python tests/chaos.py --seeds 300 --jobs 2`` runs them and prints the table of docs/failures.md;
``--write`` puts it there. It fails when a rank hung past the deadline, computed a wrong number,
left a thread, a process or shared memory behind, or raised an error that neither names a rank nor
says why it cannot. One seed again: ``python tests/chaos.py --first 17 --seeds 1 --verbose``.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from chaos_plan import FAULTS, LASTS, Plan
from chaos_rank import Told, run_rank, write_checkpoints
from torch._C._distributed_c10d import TCPStore

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Outcome", "problems_of", "run_plan", "table"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "failures.md"
_BEGIN, _END = "<!-- chaos: begin -->", "<!-- chaos: end -->"
# From the deadline to the error: a beat, a look, and other work on the machine.
_SPARE_S = 3.0
_PR_SET_PDEATHSIG = 1
_LOG = 6000


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one plan.

    Attributes:
        plan: The plan.
        told: What each rank said; None: nothing.
        codes: Exit codes; None: the rank had to be killed.
        logs: Ends of what the ranks wrote.
    """

    plan: Plan
    told: tuple[Told | None, ...]
    codes: tuple[int | None, ...]
    logs: tuple[str, ...] = ()


def run_plan(plan: Plan) -> Outcome:
    """Run one plan in processes of its own; none of them is left."""
    with tempfile.TemporaryDirectory(prefix="dlo-chaos-") as name:
        folder = Path(name)
        if plan.from_checkpoint:
            write_checkpoints(folder, plan)
        address, keeper = _address(plan, folder)
        pids = [_fork(plan, rank, folder, address) for rank in range(plan.size)]
        try:
            codes = _wait(plan, pids)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
            if keeper:
                os.kill(keeper, signal.SIGKILL)
                os.waitpid(keeper, 0)
        told = tuple(_read(folder / f"told-{rank}") for rank in range(plan.size))
        logs = [(folder / f"log-{rank}").read_text("utf-8", "replace") for rank in range(plan.size)]
    return Outcome(plan, told, tuple(codes), tuple(log[-_LOG:] for log in logs))


def _address(plan: Plan, folder: Path) -> tuple[str, int]:
    """Return where the ranks meet, and the process that keeps the store, if it is none of them."""
    if plan.store == "file":
        return f"file://{folder}/store", 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    keeper = _fork_keeper(port) if plan.store == "launcher" else 0
    return f"tcp://127.0.0.1:{port}", keeper


def _fork_keeper(port: int) -> int:
    """Start a process that keeps the store of the job, as a launcher does."""
    ready, done = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            kept = TCPStore(
                "127.0.0.1", port, None, True, timedelta(seconds=30), wait_for_workers=False
            )
            os.write(done, b"1")
            time.sleep(600)
            del kept
        finally:
            os._exit(1)
    os.close(done)
    os.read(ready, 1)
    os.close(ready)
    return pid


def _fork(plan: Plan, rank: int, folder: Path, address: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        log = os.open(folder / f"log-{rank}", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if plan.store == "launcher":
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        faulthandler.dump_traceback_later(_limit_s(plan) - 1.0)
        run_rank(plan, rank, folder, address)
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        (folder / f"told-{rank}").write_text(
            json.dumps({"error": "crash", "text": traceback.format_exc()}), encoding="utf-8"
        )
    finally:
        os._exit(code)


def _limit_s(plan: Plan) -> float:
    """Return how long a run may take: the start, a stall, the way out, the new offload."""
    return 4 * plan.timeout_s + 4 * _SPARE_S


def _wait(plan: Plan, pids: Sequence[int]) -> list[int | None]:
    """Wait for the ranks; who is stopped goes on when all the others are done."""
    codes: list[int | None] = [None] * len(pids)
    left = set(range(len(pids)))
    deadline = time.monotonic() + _limit_s(plan)
    while left and time.monotonic() < deadline:
        for rank in sorted(left):
            pid, status = os.waitpid(pids[rank], os.WNOHANG)
            if pid:
                codes[rank] = os.waitstatus_to_exitcode(status)
                left.discard(rank)
        if left == {plan.victim} and plan.fault.startswith("stop"):
            os.kill(pids[plan.victim], signal.SIGCONT)
        time.sleep(0.01)
    for rank in left:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    return codes


def _read(path: Path) -> Told | None:
    if not path.exists():
        return None
    return Told(**json.loads(path.read_text(encoding="utf-8")))


def problems_of(outcome: Outcome) -> list[str]:
    """Return what must not be; nothing is as it should be."""
    plan, found = outcome.plan, []
    for rank, (told, code) in enumerate(zip(outcome.told, outcome.codes, strict=True)):
        dies = rank == plan.victim and plan.fault.startswith("kill")
        leaves = rank == plan.victim and plan.fault == "exception, exit"
        if code is None:
            found.append(f"rank {rank} hung")
        elif code != (-signal.SIGKILL if dies else 3 if leaves else 0):
            found.append(f"rank {rank} ended with {code}: {told and told.text}")
        if told is not None:
            victim = rank == plan.victim
            texts = _problems(told, plan, victim=victim)
            found += [f"rank {rank} {text}" for text in texts]
    return found


def _problems(told: Told, plan: Plan, *, victim: bool) -> list[str]:
    found = []
    if told.wrong:
        found.append(f"computed {told.wrong} wrong numbers")
    if told.left:
        found.append(f"left behind {told.left}")
    # A victim that stood still could not raise before.
    if told.error and told.took_s > plan.timeout_s + _SPARE_S and not victim:
        found.append(f"raised after {told.took_s:.1f} s")
    if told.closing_s > _SPARE_S:
        found.append(f"closed in {told.closing_s:.1f} s")
    if told.error and not (victim and told.right == 0) and not _names(told):
        found.append(f"names nobody: {told.text}")
    if told.again == "nothing":
        found.append("computed after it had failed")
    if told.recovered not in (-1, 3):
        found.append(f"recovered {told.recovered} of 3 passes")
    return found


def _names(told: Told) -> bool:
    """Return whether an error names a rank, or says why it does not."""
    if told.culprit >= 0:
        return True
    why = ("no rank is known", "is not known here", "was shut down")
    named = re.search(r"\brank \d+ \(|rank \d+ has |failed on rank \d+", told.text)
    return bool(named) or any(text in told.text for text in why)


def _blames(told: Told, victim: int) -> bool:
    pattern = rf"rank {victim} has |failed on rank {victim}\b"
    return told.culprit == victim or re.search(pattern, told.text) is not None


def table(outcomes: Sequence[Outcome], timeout_s: float) -> str:
    """Return the table of docs/failures.md."""
    lines = [
        f"{len(outcomes)} seeds, a deadline of {timeout_s:g} s, 2 to 4 gloo ranks on one machine; "
        "the store of the job in a file, with the launcher, or with rank 0. Each run counts once "
        "in a row; `wrong` and `left behind` count ranks.",
        "",
        "| fault | runs | nobody failed | closed | all others name the rank | else "
        "| slowest error | went on with `reuse=` | hung | wrong | left behind |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for fault, words in FAULTS.items():
        rows = [outcome for outcome in outcomes if outcome.plan.fault == fault]
        if rows:
            lines.append(_line(words, fault, rows))
    lines.append(_line("**all**", "", outcomes))
    return "\n".join(lines)


def _others(row: Outcome) -> list[Told]:
    everyone = enumerate(row.told)
    return [t for rank, t in everyone if t is not None and t.error and rank != row.plan.victim]


def _line(words: str, fault: str, rows: Sequence[Outcome]) -> str:
    told = [[each for each in row.told if each is not None] for row in rows]
    closed = [row for row in rows if any(t is not None and t.error for t in row.told)]
    # What the victim itself says is another matter: to a rank that slept, the others are gone.
    others = [(row, _others(row)) for row in closed]
    named = sum(all(_blames(t, row.plan.victim) for t in ts) for row, ts in others if ts)
    late = [t.took_s for _, ts in others for t in ts if t.right]
    again = sum(any(t.recovered == 3 for t in ts) for ts in told)
    cells = (
        words,
        len(rows),
        len(rows) - len(closed),
        len(closed),
        named,
        len(closed) - named,
        f"{max(late):.1f} s" if late else "–",
        again if fault in LASTS or not fault else "–",
        sum(code is None for row in rows for code in row.codes),
        sum(bool(t.wrong) for ts in told for t in ts),
        sum(bool(t.left) for ts in told for t in ts),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _job(seed: int, timeout_s: float) -> tuple[Outcome, list[str]]:
    torch.set_num_threads(1)
    outcome = run_plan(Plan.of(seed, timeout_s))
    return outcome, problems_of(outcome)


def _write(text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(_BEGIN)
    after = rest.split(_END)[1]
    PAGE.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")


def main() -> int:
    """Run the seeds and print the table; return how many went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=len(FAULTS))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=2.0)
    parser.add_argument("--write", action="store_true", help="put the table into docs/failures.md")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(options.first, options.first + options.seeds)
    outcomes, bad = [], 0
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=20) as pool:
        jobs = [pool.apply_async(_job, (seed, options.timeout_s)) for seed in seeds]
        for job in jobs:
            outcome, problems = job.get()
            outcomes.append(outcome)
            bad += bool(problems)
            if problems or options.verbose:
                print(outcome.plan, *outcome.told, *problems, sep="\n  ", flush=True)
                print(*(outcome.logs if problems else ()), sep="\n  ", flush=True)
    text = table(outcomes, options.timeout_s)
    print(text)
    if options.write and not bad:
        _write(text)
    return bad


if __name__ == "__main__":
    sys.exit(main())
