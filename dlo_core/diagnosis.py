"""The diagnosis: from what the ranks wrote on the board to a sentence that names who is to blame.

Pure: rows in, a sentence out. Facts go before reports, and reports before guesses: a process that
the system knows to be gone, then one that is stopped, then a rank that says itself why it failed,
then what others say of a third, then whoever has queued the fewest fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.board import Heard, Position

__all__ = ["Diagnosis", "Evidence", "diagnose", "late", "where"]

_ENDED = ("closed", "exited")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one rank knows when something went wrong.

    Attributes:
        rank: Of whom knows it.
        members: Global rank of each rank of the group, where they are known.
        mine: What this rank is doing.
        heard: The board, by rank.
        systems: What the system says of each rank's process: "gone", "stopped", "running" or "".
        silent_s: Since the store answered last.
        late_s: A row, or the store, that is older than this is a sign of trouble.
    """

    rank: int
    members: tuple[int, ...]
    mine: Position
    heard: Sequence[Heard]
    systems: Sequence[str]
    silent_s: float
    late_s: float

    @property
    def peers(self) -> list[int]:
        """The other ranks."""
        return [rank for rank in range(len(self.heard)) if rank != self.rank]

    def name(self, rank: int) -> str:
        """Return how to name a rank."""
        row = self.heard[rank].row
        parts = [f"global rank {self.members[rank]}"] if self.members else []
        parts += [] if row is None else [f"process {row.process.pid}"]
        mine = ", this rank" if rank == self.rank else ""
        return f"rank {rank} ({', '.join(parts)}{mine})" if parts else f"rank {rank}{mine}"

    def last(self, rank: int) -> str:
        """Return where a rank was seen last."""
        heard = self.heard[rank]
        if heard.row is None:
            return "it never wrote where it is"
        raised = heard.row.position.raised
        told = f"; before, it raised {raised}" if raised else ""
        return f"last seen {where(heard.row.position)}, {heard.age_s:.1f} s ago{told}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Who is to blame.

    Attributes:
        kind: In a word: ``"gone"``, ``"stopped"``, ``"failed"``, ``"told"``, ``"silent"``,
            ``"ended"``, ``"raised"``, ``"behind"``, ``"store"`` or ``"nobody"``.
        culprit: The rank; -1: it cannot be named, and the text says why.
        text: The sentence.
        reason: The part of it that is worth telling a third rank; empty: all of it.
    """

    kind: str
    culprit: int
    text: str
    reason: str = ""

    @property
    def certain(self) -> bool:
        """Whether the culprit will never make another fill."""
        return self.kind in ("gone", "failed", "told")


def diagnose(evidence: Evidence) -> Diagnosis:
    """Return who is to blame, by the best evidence that there is."""
    for look in (_gone, _stopped, _failed, _told, _silent, _store, _ended, _behind):
        found = look(evidence)
        if found is not None:
            return found
    count = len(evidence.heard)
    return Diagnosis(
        "nobody",
        -1,
        f"no rank is known to be at fault: all {count} are alive and have queued the fills that "
        "this one has, so look at the comm library and the network between them",
    )


def late(evidence: Evidence, rank: int) -> Diagnosis:
    """Return that a rank did not come where it was awaited, unless more is known of it."""
    found = diagnose(evidence)
    if found.culprit == rank and found.kind != "behind":
        return found
    row = evidence.heard[rank].row
    if row is None:
        return Diagnosis("behind", rank, f"{evidence.name(rank)} did not come")
    since_s = evidence.heard[rank].age_s + row.since_s
    text = f"for {since_s:.1f} s it has been {where(row.position)}"
    return Diagnosis("behind", rank, f"{evidence.name(rank)} did not come: {text}")


def where(position: Position) -> str:
    """Return in words where a rank is."""
    at = f"fill {position.fill}, pass {position.passes}"
    return {
        "outside": f"outside of the model after pass {position.passes} (fill {position.fill})",
        "between": f"between two blocks ({at})",
        "waiting": f"waiting for block {position.block!r} ({at})",
        "computing": f"computing block {position.block!r} ({at})",
    }.get(position.state, f"{position.state} ({at})")


def _gone(evidence: Evidence) -> Diagnosis | None:
    for rank in evidence.peers:
        if evidence.systems[rank] == "gone":
            row = evidence.heard[rank].row
            if row is not None and row.position.state in (*_ENDED, "failed"):
                # It ended by itself, and says how.
                continue
            return Diagnosis(
                "gone",
                rank,
                f"{evidence.name(rank)} is gone: its process ended without closing its offload, "
                f"{evidence.last(rank)}",
            )
    return None


def _stopped(evidence: Evidence) -> Diagnosis | None:
    for rank in evidence.peers:
        if evidence.systems[rank] == "stopped":
            text = f"{evidence.name(rank)} is stopped (by a signal or a debugger)"
            return Diagnosis("stopped", rank, f"{text}, {evidence.last(rank)}")
    return None


def _failed(evidence: Evidence) -> Diagnosis | None:
    """Find a rank that failed by itself."""
    for rank in evidence.peers:
        position = _position(evidence, rank)
        if position is not None and position.state == "failed" and position.culprit in (-1, rank):
            return Diagnosis("failed", rank, f"{evidence.name(rank)} failed: {position.failure}")
    return None


def _told(evidence: Evidence) -> Diagnosis | None:
    """Find a rank that failed because of another one."""
    for rank in evidence.peers:
        position = _position(evidence, rank)
        if position is not None and position.state == "failed":
            text = f"{evidence.name(rank)} closed its offload: {position.failure}"
            return Diagnosis("told", position.culprit, text, position.failure)
    return None


def _silent(evidence: Evidence) -> Diagnosis | None:
    if evidence.silent_s > evidence.late_s:
        return None
    for rank in evidence.peers:
        heard = evidence.heard[rank]
        ended = heard.row is not None and heard.row.position.state in (*_ENDED, "failed")
        if heard.age_s > evidence.late_s and not ended:
            text = f"{evidence.name(rank)} has shown no sign of life for {heard.age_s:.1f} s: it"
            return Diagnosis(
                "silent",
                rank,
                f"{text} died, was stopped, or its node cannot be reached; {evidence.last(rank)}",
            )
    return None


def _store(evidence: Evidence) -> Diagnosis | None:
    if evidence.silent_s <= evidence.late_s:
        return None
    known = "; ".join(f"{evidence.name(rank)}: {evidence.last(rank)}" for rank in evidence.peers)
    return Diagnosis(
        "store",
        -1,
        "which rank is to blame is not known here, because the store of the job has not answered "
        f"for {evidence.silent_s:.1f} s: the process that keeps it (the launcher, or global rank "
        f"0) died, was stopped, or cannot be reached ({known})",
    )


def _ended(evidence: Evidence) -> Diagnosis | None:
    """Find a rank that closed its offload while this one goes on."""
    for rank in evidence.peers:
        position = _position(evidence, rank)
        if position is not None and position.state in _ENDED:
            how = "left the job" if position.state == "exited" else "closed its offload"
            why = f": {position.failure}" if position.failure else ""
            raised = f" (its last pass had raised {position.raised})" if position.raised else ""
            return Diagnosis(
                "ended",
                rank,
                f"{evidence.name(rank)} {how} after pass {position.passes}{raised}{why}, and this "
                f"rank is {where(evidence.mine)}",
            )
    return None


def _behind(evidence: Evidence) -> Diagnosis | None:
    """Find the rank that has queued the fewest fills, if fewer than this one."""
    known = [(_position(evidence, rank), rank) for rank in evidence.peers]
    rows = [(position.made, rank, position) for position, rank in known if position is not None]
    for position, rank in known:
        if position is None:
            text = f"{evidence.name(rank)} has not said yet where it is"
            return Diagnosis("behind", rank, text)
    made, rank, position = min(rows, key=lambda row: row[:2])
    mine = evidence.mine
    if made >= mine.made:
        return None
    row = evidence.heard[rank].row
    since_s = evidence.heard[rank].age_s + (0.0 if row is None else row.since_s)
    name = f"{evidence.name(rank)} is behind: for {since_s:.1f} s it has been {where(position)}"
    if position.raised:
        text = f"{name}; its last pass raised {position.raised}"
        return Diagnosis("raised", rank, text)
    if position.state == "outside" and position.passes < mine.passes:
        name += (
            f", while this rank is in pass {mine.passes}: every rank must call the model equally "
            "often, or make idle passes with run_pass()"
        )
    elif position.state in ("outside", "waiting") and position.passes == mine.passes:
        name += (
            f"; it made {made} fills and this rank {mine.made} in as many passes, so they ran "
            "their blocks in different orders, or one of them ran some more often"
        )
    return Diagnosis("behind", rank, name)


def _position(evidence: Evidence, rank: int) -> Position | None:
    row = evidence.heard[rank].row
    return None if row is None else row.position
