"""The watch: a thread of each offload that notices when a fill will never come, and says why.

[Note: how a failure closes]
The host that computes never asks whether its peers live: it may sit in the caller's own wait for
the device, where nobody can reach it. So a thread looks at what is queued and not done, writes this
rank's position on the board and reads the others'. When a peer can never make its next fill, or
nothing has moved for ``timeout_s``, the watch marks the pool as failed with the diagnosis, writes
that on the board, and gives up this rank's gathers (``Collective.abort``). Then whoever waits
for them gets the error, every later call too, and the other ranks read it within a beat.

A failure that this rank meets first (a comm library that raises, say) goes the same way: the
diagnosis is asked for, the error names the culprit, and the watch tells the others.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

from dlo_core.board import Position
from dlo_core.diagnosis import Diagnosis, Evidence, diagnose, late
from dlo_core.errors import DloError, text_of
from dlo_core.process_state import state_of
from dlo_core.transfer import reached

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.board import Board, Heard
    from dlo_core.interface import Collective
    from dlo_core.slots import Pool, Slot
    from dlo_core.streamer import Streamer
    from dlo_core.transfer import Transfer

__all__ = ["Watch"]

_logger = logging.getLogger("dlo")
# Of the time that the host waits for a diagnosis, when it meets a failure first.
_LONGEST_LOOK_S = 2.0
_POLL_S = 0.05
_SILENT_S = 0.3


def _beat_of(timeout_s: float) -> float:
    """Return how often to look, in seconds."""
    return min(1.0, max(0.05, timeout_s / 8))


class Watch:
    """Watches one offload of a group of ranks that gather."""

    def __init__(
        self,
        board: Board,
        pool: Pool,
        streamers: Sequence[Streamer],
        collective: Collective,
        transfer: Transfer,
        *,
        members: tuple[int, ...],
        timeout_s: float,
        host_blocks: bool,
    ) -> None:
        """Write the first row and start the thread.

        Args:
            board: Of the group.
            pool: The slots.
            streamers: One a model.
            collective: Given up when the offload fails.
            transfer: Says how far the device is.
            members: Global ranks, for messages.
            timeout_s: Seconds in which a fill that was queued must come.
            host_blocks: Whether a wait on the compute stream blocks the host; if not, it may
                compute with bytes that never came, once the gathers are given up.
        """
        self._board = board
        self._pool = pool
        self._streamers = tuple(streamers)
        self._collective = collective
        self._transfer = transfer
        self._members = members
        self._timeout_s = timeout_s
        self._host_blocks = host_blocks
        self._beat_s = _beat_of(timeout_s)
        self._lock = threading.Lock()
        self._closed = False
        self._told = False
        self._moved = self._ticked = time.monotonic()
        self._signature: object = None
        self._doubts = 0
        self.trouble: Diagnosis | None = None
        self._others: tuple[tuple[Board, tuple[int, ...]], ...] = ()
        self._gone_at: dict[tuple[str, int], int] = {}
        pool.explain = self.explain
        stop = threading.Event()
        board.post(self._position())
        self._finalizer = weakref.finalize(self, stop.set)
        self._finalizer.atexit = False
        self._thread = threading.Thread(
            target=_run,
            args=(weakref.ref(self), stop, self._beat_s),
            name="dlo-watch",
            daemon=True,
        )
        self._thread.start()
        _watches.add(self)

    # --- the thread -------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look once."""
        with self._lock:
            if self._closed:
                return
            now = time.monotonic()
            paused_s, self._ticked = now - self._ticked, now
            if self._pool.failure is not None:
                self._tell(self._pool.failure)
                return
            self._post()
            if paused_s > self._beat_s + self._timeout_s / 2:
                # This process itself was stopped: what it knows is old.
                self._moved = now
                return
            self._judge(now)

    def _judge(self, now: float) -> None:
        waiting = self._outstanding()
        signature = (self._signature_of(), len(waiting)) if waiting else None
        if signature != self._signature or not waiting:
            self._signature, self._moved = signature, now
        found = diagnose(self._evidence(self._board, self._members))
        self.trouble = self._trouble(found)
        late_s = now - self._moved
        if waiting and late_s > self._timeout_s:
            self._fail(found, waiting, f"nothing has come for {late_s:.1f} s", late=True)
        elif found.certain and (waiting or not self._inside()):
            # Once more: what was under way when the peer ended may still come.
            self._doubts += 1
            if self._doubts > 1:
                self._fail(found, waiting, "")
        elif waiting and found.kind == "ended" and self._never(found.culprit, waiting):
            self._doubts += 1
            if self._doubts > 1:
                self._fail(found, waiting, "")
        else:
            self._doubts = 0

    def _trouble(self, found: Diagnosis) -> Diagnosis | None:
        """Return what a host that waits for the others need not wait for any more."""
        for board, members in ((self._board, self._members), *self._others):
            if board is not self._board:
                found = diagnose(self._evidence(board, members))
            quiet = found.kind in ("stopped", "silent")
            if found.certain or (quiet and board.heard()[found.culprit].age_s > self._timeout_s):
                # The ranks of another board have other numbers; the text has the global ones.
                return found if board is self._board else replace(found, culprit=-1)
        return None

    def _post(self, *, always: bool = False) -> None:
        """Write on all boards."""
        position = self._position()
        self._board.post(position, always=always)
        for board, _ in self._others:
            board.post(position, always=always)

    def add(self, board: Board, members: tuple[int, ...]) -> None:
        """Also write on ``board``, and heed the ranks on it that will never come back."""
        with self._lock:
            self._others += ((board, members),)
            board.post(self._position())

    def drop(self, board: Board) -> None:
        """Undo ``add``, and say there that this rank is gone."""
        with self._lock:
            self._others = tuple(other for other in self._others if other[0] is not board)
            last = self._position()
            if last.state != "failed":
                last = replace(last, state="closed")
            board.post(last, always=True)

    def _never(self, rank: int, waiting: Sequence[Slot]) -> bool:
        """Return whether a rank ended before it made the first fill that is waited for."""
        row = self._board.heard()[rank].row
        count = sum(slot.tape is not None for slot in waiting)
        return row is not None and _made(self._streamers) - count >= row.position.made

    def _outstanding(self) -> list[Slot]:
        """Return the slots whose bytes have not come, the earliest fill first."""
        slots = [slot for slot in self._pool.slots if slot.tape is not None]
        slots += self._pool.residents.values()
        return sorted(
            (slot for slot in slots if not reached(slot.filled)), key=lambda slot: slot.fill
        )

    def _signature_of(self) -> object:
        """Return what changes when the device or the host gets on."""
        return (
            tuple((slot.fill, slot.bound, reached(slot.drained)) for slot in self._pool.slots),
            self._transfer.num_computed(),
            tuple((each.tape.pos, each.tape.num_passes) for each in self._streamers),
        )

    def _inside(self) -> bool:
        return any(streamer.tape.open for streamer in self._streamers)

    def _fail(
        self, found: Diagnosis, waiting: Sequence[Slot], what: str, *, late: bool = False
    ) -> None:
        slot = waiting[0] if waiting else None
        streamer, block, fill = self._place(slot)
        text = f"{what}: {found.text}" if what else found.text
        error = streamer.failure_of(text, block, fill, late=late, found=found)
        if self._pool.fail(error) is error:
            _logger.error("%s", str(error), extra={"rank": self._board.rank})
        self._tell(error)

    def _place(self, slot: Slot | None) -> tuple[Streamer, int, int]:
        """Return the streamer, block and fill of a slot; -1 where there is none."""
        staying = next((n for n, each in self._pool.residents.items() if each is slot), -1)
        for streamer in self._streamers:
            if slot is not None and slot.tape is streamer.tape:
                return streamer, streamer.tape.block(slot.fill) - streamer.first_block, slot.fill
            if 0 <= staying - streamer.first_block < len(streamer.names):
                return streamer, staying - streamer.first_block, -1
        return self._streamers[0], -1, -1

    def _tell(self, error: BaseException) -> None:
        """Write on the board that this rank failed, then give up its gathers; once."""
        if self._told:
            self._post()
            return
        self._told = True
        self._post(always=True)
        if not self._host_blocks:
            self._pool.spoiled = True
        self._transfer.give_up()
        # A new one: what the host raises gets its frames, which streams must not keep alive.
        ours = isinstance(error, DloError)
        self._collective.abort(RuntimeError(str(error) if ours else text_of(error)))

    # --- what it knows ----------------------------------------------------------------------------

    def _position(self) -> Position:
        """Return what this rank is doing; read without a lock, so it may be a moment old."""
        failure = self._pool.failure
        streamer = next((s for s in self._streamers if s.tape.open), self._streamers[0])
        passes = sum(s.tape.num_passes + s.tape.open for s in self._streamers)
        raised = next((s.raised for s in self._streamers if s.raised), "")
        state, block, fill = streamer.place()
        culprit = -1
        text = ""
        if failure is not None:
            state, text = "failed", text_of(failure)
        # Only of dlo's own: another error's attributes may have the same names.
        if isinstance(failure, DloError):
            text = getattr(failure, "reason", "") or str(failure)
            culprit = getattr(failure, "culprit", next(iter(getattr(failure, "missing", ())), -1))
        return Position(state, passes, _made(self._streamers), block, fill, raised, text, culprit)

    def _evidence(self, board: Board, members: tuple[int, ...]) -> Evidence:
        heard = board.heard()
        return Evidence(
            board.rank,
            members,
            self._position(),
            heard,
            [self._system(board, rank, each) for rank, each in enumerate(heard)],
            board.silent_s,
            self._timeout_s / 2 + 2 * self._beat_s,
        )

    def _system(self, board: Board, rank: int, heard: Heard) -> str:
        """Return what the system says of a rank's process.

        It is gone once its last row must have been read, for that says how it ended.
        """
        state = "" if heard.row is None else state_of(heard.row.process, board.me)
        if state == "gone":
            first = self._gone_at.setdefault((board.name, rank), board.rounds)
            # The round that was under way may have read before that row was written.
            if board.rounds < first + 2 and board.silent_s < 2 * self._beat_s + _SILENT_S:
                return ""
        return state

    def explain(self, missing: Sequence[int] = ()) -> Diagnosis:
        """Return who is to blame, for a failure that the host has met; takes a moment.

        What a peer says of itself comes a beat later than the comm library's error.

        Args:
            missing: Ranks that did not come to where they were awaited.
        """
        limit = time.monotonic() + self._look_s
        while True:
            self._board.post(self._position())
            self._board.wait_for_news(_POLL_S)
            evidence = self._evidence(self._board, self._members)
            found = diagnose(evidence)
            if found.certain:
                return found
            if time.monotonic() > limit:
                return late(evidence, missing[0]) if missing else found
            time.sleep(_POLL_S / 5)

    @property
    def _look_s(self) -> float:
        usual_s = max(self._timeout_s / 4, 3 * self._beat_s)
        # A peer that is gone counts a few beats later; see _system().
        return min(_LONGEST_LOOK_S, usual_s + 3 * self._beat_s + _SILENT_S)

    def look_well(self) -> None:
        """Do what ``look`` does, for a host whose wait for the others has failed; takes a moment.

        Raises:
            DloError: The offload has failed, or a peer will never come back.
        """
        limit = time.monotonic() + self._look_s
        while time.monotonic() < limit and self._pool.failure is None and self.trouble is None:
            time.sleep(_POLL_S / 5)
        self.look()

    def look(self) -> None:
        """Close the offload if a peer will never come back; for a host that waits for the others.

        Raises:
            DloError: The offload has failed, or a peer will not come back.
        """
        failure = self._pool.failure
        if failure is None and (found := self.trouble) is not None:
            with self._lock:
                self._fail(found, self._outstanding(), "")
            failure = self._pool.failure
        if failure is not None:
            raise failure

    # --- the end ----------------------------------------------------------------------------------

    def close(self, state: str, why: str) -> None:
        """Write the last row and end the thread. Idempotent.

        Args:
            state: ``"closed"`` or ``"exited"``.
            why: The reason.
        """
        # It may be held for long: by a comm library that is being given up, or in another process.
        locked = self._lock.acquire(timeout=1.0)
        try:
            if self._closed:
                return
            self._closed = True
            last = self._position()
            if last.state != "failed":
                last = replace(last, state=state, failure=why)
            for board, _ in ((self._board, ()), *self._others):
                board.post(last, always=True)
        finally:
            if locked:
                self._lock.release()
        self._finalizer()
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def __repr__(self) -> str:
        """Show what is known."""
        state = "closed" if self._closed else "failed" if self._told else "watching"
        return f"Watch(rank={self._board.rank}, {state}, trouble={self.trouble})"


def _made(streamers: Sequence[Streamer]) -> int:
    return sum(each.tape.num_fills + each.tape.num_skipped for each in streamers)


def _run(watch: weakref.ref[Watch], stop: threading.Event, beat_s: float) -> None:
    """Tick until the watch is gone; between ticks nothing of it is held."""
    while not stop.wait(beat_s):
        present = watch()
        if present is None:
            return
        try:
            present.tick()
        except Exception:
            _logger.exception("the watch of an offload could not look")
        del present


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    """Tell the others that this process ends; the line to the store is closed after this."""
    for watch in list(_watches):
        watch.close("exited", "")


os.register_at_fork(after_in_child=_watches.clear)
