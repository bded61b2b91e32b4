"""The diagnosis: which rank is to blame, from rows that are made up."""

from __future__ import annotations

import ctypes
import errno
from dataclasses import replace
from typing import Any

import pytest

from dlo_core.board import Heard, Position, Row
from dlo_core.diagnosis import Diagnosis, Evidence, diagnose, where
from dlo_core.process_state import ProcessName, state_of, this_process

MINE = Position("waiting", passes=3, made=20, block="blocks.1", fill=19)


def heard(
    rank: int, position: Position = MINE, *, age_s: float = 0.1, since_s: float = 0.0
) -> Heard:
    process = ProcessName(100 + rank, "node", "1")
    return Heard(Row(rank, 5, since_s, position, process), age_s)


def found(*peers: Heard, systems: tuple[str, ...] = (), **more: Any) -> Diagnosis:
    """Return what rank 0 makes of its peers."""
    rows = [heard(0), *peers]
    evidence = Evidence(
        rank=0,
        members=tuple(10 * rank for rank in range(len(rows))),
        mine=MINE,
        heard=rows,
        systems=("running", *systems, *("running",) * (len(peers) - len(systems))),
        silent_s=0.1,
        late_s=2.0,
    )
    return diagnose(replace(evidence, **more))


def at(**changes: Any) -> Position:
    return replace(MINE, **changes)


FAILED = at(state="failed", failure="the disk burns", culprit=1)
CASES: dict[str, tuple[Diagnosis, str, int, str]] = {
    "gone": (
        found(heard(1), heard(2, at(made=3)), systems=("gone", "running")),
        *("gone", 1, "rank 1 (global rank 10, process 101) is gone"),
    ),
    "gone after it said why": (found(heard(1, FAILED), systems=("gone",)), "failed", 1, "burns"),
    "stopped": (
        found(heard(1), heard(2, FAILED), systems=("running", "stopped")),
        *("stopped", 2, "is stopped (by a signal or a debugger), last seen failed (fill 19"),
    ),
    "failed by itself": (
        found(
            heard(1, at(state="failed", failure="told", culprit=2)),
            heard(2, replace(FAILED, culprit=-1)),
        ),
        *("failed", 2, "failed: the disk burns"),
    ),
    "failed for another": (
        found(heard(1, at(state="failed", failure="rank 2 is gone", culprit=2)), heard(2)),
        *("told", 2, "rank 1 (global rank 10, process 101) closed its offload: rank 2 is gone"),
    ),
    "no sign of life": (
        found(heard(1), heard(2, age_s=3.0)),
        *("silent", 2, "has shown no sign of life for 3.0 s"),
    ),
    "the store is silent": (
        found(heard(1, age_s=9.0), silent_s=9.0),
        *("store", -1, "is not known here, because the store of the job has not answered for 9.0"),
    ),
    "shut down": (
        found(heard(1, at(state="closed", failure="it was shut down", passes=2))),
        *("ended", 1, "closed its offload after pass 2: it was shut down"),
    ),
    "left, having raised": (
        found(heard(1, at(state="exited", raised="ValueError: x in block 'b'"))),
        *("ended", 1, "left the job after pass 3 (its last pass had raised ValueError: x in"),
    ),
    "computes": (
        found(heard(1, at(state="computing", made=18, block="blocks.0"), since_s=4.0)),
        *("behind", 1, "for 4.1 s it has been computing block 'blocks.0' (fill 19, pass 3)"),
    ),
    "one pass less": (
        found(heard(1, at(state="outside", made=18, passes=2, block=""))),
        *("behind", 1, "while this rank is in pass 3: every rank must call the model equally"),
    ),
    "another order": (
        found(heard(1, at(state="outside", made=18, block=""))),
        *("behind", 1, "it made 18 fills and this rank 20 in as many passes"),
    ),
    "raised": (
        found(heard(1, at(state="outside", made=18, raised="ValueError: x"))),
        *("raised", 1, "its last pass raised ValueError: x"),
    ),
    "the slowest of several": (
        found(
            heard(1, at(made=15)), heard(2, at(made=12, state="computing")), heard(3, at(made=19))
        ),
        *("behind", 2, "rank 2"),
    ),
    "never wrote": (found(Heard(None, 0.0)), "behind", 1, "rank 1 (global rank 10) has not said"),
    "nobody": (found(heard(1), heard(2, at(made=25))), "nobody", -1, "all 3 are alive"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_best_evidence_names_the_rank(case: str) -> None:
    """Facts go before reports, and reports before guesses."""
    diagnosis, kind, culprit, text = CASES[case]
    assert (diagnosis.kind, diagnosis.culprit) == (kind, culprit)
    assert text in diagnosis.text


def test_what_a_third_rank_is_told_does_not_nest() -> None:
    told = found(heard(1, at(state="failed", failure="rank 2 is gone", culprit=2)), heard(2))
    assert told.reason == "rank 2 is gone"
    assert told.certain


def test_every_state_has_words() -> None:
    for state in ("outside", "between", "waiting", "computing", "failed", "closed"):
        assert "pass 3" in where(at(state=state))
        assert "fill 19" in where(at(state=state))


def test_a_row_travels_as_text() -> None:
    row = heard(1, at(raised='a "quoted" text', failure="é")).row
    assert row is not None
    assert Row.from_json(row.to_json()) == row


def test_the_system_knows_processes_of_this_node_only() -> None:
    me = this_process()
    assert state_of(me, me) == "running"
    assert state_of(replace(me, started="0"), me) == "gone"
    assert state_of(replace(me, node="elsewhere"), me) == ""


def test_a_process_that_cannot_be_asked_about_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when this process has no more files to open."""

    def refuse(path: object) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    me = this_process()
    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    assert state_of(me, me) == ""
    monkeypatch.undo()
    assert state_of(replace(me, pid=2**22 + 1), me) == "gone"


def test_the_name_of_a_process_may_be_any_bytes() -> None:
    """The system cuts a name after 15 bytes, which may be within a character."""
    set_name, get_name = 15, 16
    libc, before = ctypes.CDLL(None), ctypes.create_string_buffer(16)
    libc.prctl(get_name, before, 0, 0, 0)
    libc.prctl(set_name, b"rank) S \xc3", 0, 0, 0)
    try:
        me = this_process()
        assert me.started
        assert state_of(me, me) == "running"
    finally:
        libc.prctl(set_name, before, 0, 0, 0)
