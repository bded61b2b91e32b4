"""The board: where each rank of an offload says what it is doing, for all the others to read.

It lies in the store of the job and not on any group of ranks, so it works when the weights'
collective does not. One row a rank, written now and then and never by the thread that computes.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlo_core.process_state import ProcessName, this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._C._distributed_c10d import Store

    from dlo_core.store_line import StoreLine

__all__ = ["Board", "Heard", "Position", "Row"]


@dataclass(frozen=True, slots=True)
class Position:
    """What one rank is doing.

    Attributes:
        state: ``"outside"`` of a pass, ``"between"`` two blocks, ``"waiting"`` for a block's fill,
            ``"computing"`` a block; or for good: ``"failed"``, ``"closed"``, ``"exited"``.
        passes: How many it has begun.
        made: Fills that it has queued since the start; every rank makes the same.
        block: Dotted name of the block that it waits for or computes.
        fill: Number of that fill, or of the last one queued.
        raised: What the last pass ended with, if an exception of the caller's ended it.
        failure: Why it failed or closed.
        culprit: Rank that is to blame for the failure; -1: nobody is known.
    """

    state: str = "outside"
    passes: int = 0
    made: int = 0
    block: str = ""
    fill: int = 0
    raised: str = ""
    failure: str = ""
    culprit: int = -1


@dataclass(frozen=True, slots=True)
class Row:
    """What one rank wrote.

    Attributes:
        rank: Its rank in the group.
        beat: Grows with each writing.
        since_s: For how long it has been at this position, by its own clock.
        position: What it is doing.
        process: Who it is.
    """

    rank: int
    beat: int
    since_s: float
    position: Position
    process: ProcessName

    def to_json(self) -> str:
        """Return the row as text."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Row:
        """Return the row of a text."""
        told = json.loads(text)
        told["position"] = Position(**told["position"])
        told["process"] = ProcessName(**told["process"])
        return cls(**told)


@dataclass(frozen=True, slots=True)
class Heard:
    """A row as it was read, and how old it is by this rank's clock.

    Attributes:
        row: The row; None: the rank has not written yet.
        age_s: Since its beat grew.
    """

    row: Row | None
    age_s: float


class Board:
    """This rank's row, and what the others wrote."""

    def __init__(self, line: StoreLine, name: str, rank: int, size: int) -> None:
        """Take the place of ``name`` in the store; nothing is written yet.

        Args:
            line: To the store.
            name: The same on all ranks of the group, and of no other board.
            rank: In the group.
            size: Of the group.
        """
        self.name, self.rank, self.size = name, rank, size
        self.me = this_process()
        self._line = line
        self._keys = [f"dlo/{name}/board/{each}" for each in range(size)]
        self._beat = 0
        self._position = Position()
        self._since = self._heard_at = time.monotonic()
        self._rows: dict[int, tuple[Row, float]] = {}
        self._done: Callable[[], bool] | None = None
        self._lock = threading.Lock()
        self._news = threading.Condition()
        self._rounds = 0

    @property
    def silent_s(self) -> float:
        """Seconds since the store answered last."""
        return time.monotonic() - self._heard_at

    @property
    def rounds(self) -> int:
        """How often the others' rows were read."""
        return self._rounds

    def post(self, position: Position, *, always: bool = False) -> None:
        """Write this rank's row and read the others', soon; skipped while the last time goes on.

        Args:
            position: What this rank is doing.
            always: Also while the last one goes on.
        """
        with self._lock:
            if not always and self._done is not None and not self._done():
                return
            now = time.monotonic()
            if position != self._position:
                self._position, self._since = position, now
            self._beat += 1
            text = Row(self.rank, self._beat, now - self._since, position, self.me).to_json()
            self._done = self._line.post(lambda store: self._exchange(store, text))

    def heard(self) -> list[Heard]:
        """Return what is known of every rank, by rank."""
        now = time.monotonic()
        rows = dict(self._rows)
        return [
            Heard(rows[rank][0], now - rows[rank][1]) if rank in rows else Heard(None, 0.0)
            for rank in range(self.size)
        ]

    def wait_for_news(self, timeout_s: float) -> None:
        """Block until the others' rows were read once more, for ``timeout_s`` at most."""
        with self._news:
            rounds = self._rounds
            self._news.wait_for(lambda: self._rounds > rounds, timeout_s)

    def _exchange(self, store: Store, text: str) -> None:
        store.set(self._keys[self.rank], text)
        self._note(_read(store, self._keys, self._rows))

    def _note(self, texts: Sequence[bytes | None]) -> None:
        now = time.monotonic()
        for rank, text in enumerate(texts):
            if text is None:
                continue
            row = Row.from_json(text.decode())
            known = self._rows.get(rank)
            if known is None or known[0].beat != row.beat:
                self._rows[rank] = (row, now)
        self._heard_at = now
        with self._news:
            self._rounds += 1
            self._news.notify_all()

    def __repr__(self) -> str:
        """Show the rank and who has written."""
        return f"Board(rank={self.rank}, size={self.size}, heard={sorted(self._rows)})"


def _read(
    store: Any, keys: Sequence[str], known: dict[int, tuple[Row, float]]
) -> list[bytes | None]:
    """Return the text under every key, None where there is none; never waits for one."""
    there = [rank for rank, key in enumerate(keys) if rank in known or store.check([key])]
    found: list[bytes | None] = [None] * len(keys)
    wanted = [keys[rank] for rank in there]
    many = store.has_extended_api()
    texts = store.multi_get(wanted) if many else [store.get(key) for key in wanted]
    for rank, text in zip(there, texts, strict=True):
        found[rank] = text
    return found
