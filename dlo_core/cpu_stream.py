"""Streams and events of the CPU backend: a worker thread is a side stream, the host is compute.

[Note: a threaded device]
The compute stream is the calling thread itself: recording on it happens now, waiting on it blocks.
A side stream is a worker thread with a queue; what is queued inside one ``with stream`` context is
handed over as one item, because a hand-over costs more than the work of an event. An exception
in a worker ends that stream: its later work is dropped, and whoever waits for an event of it
gets the error. Workers are daemons, joined at exit; a forked child finds its inherited streams
dead and is told so.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dlo_core.errors import BackendError
from dlo_core.exiting import JoinedAtExit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CpuEvent", "CpuStream", "HostStream", "current_stream", "stream_context"]

_SLICE_S = 0.1
_at_exit = JoinedAtExit(2.0)


class StreamError(RuntimeError):
    """Raised to whoever waits for work that failed in a stream; the cause is what happened."""


class _Ticket:
    """One recording of an event: reached or not, when, and with what error."""

    __slots__ = ("_reached", "error", "time_s")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None
        self.time_s = 0.0

    def reach(self, error: BaseException | None = None) -> None:
        self.error = error
        self.time_s = time.perf_counter()
        self._reached.set()

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def wait(self, stream: Any) -> None:
        """Wait in slices, so that an interrupt gets in and a dead worker is noticed."""
        while not self._reached.wait(_SLICE_S):
            if not stream.alive:
                raise BackendError(
                    "a CPU stream's worker thread is gone (the process was forked after offload, "
                    "or the interpreter is exiting); offload again in this process"
                )
        if self.error is not None:
            # A new one each time: a stored exception would keep the frames of all who waited.
            raise StreamError(f"{type(self.error).__name__}: {self.error}") from self.error


class CpuEvent:
    """An event of the CPU backend; ``record`` starts it anew each time."""

    def __init__(self) -> None:
        """Make an event that was never recorded, which counts as reached."""
        self._ticket: _Ticket | None = None
        self._stream: CpuStream | HostStream | None = None

    def record(self, stream: Any = None) -> None:
        """Mark the work that ``stream`` (default: the current one) holds so far."""
        (stream or current_stream()).record_event(self)

    def query(self) -> bool:
        """Return whether the marked work is done."""
        return self._ticket is None or self._ticket.reached

    def synchronize(self) -> None:
        """Block until the marked work is done; raise what stopped its stream."""
        if self._ticket is not None:
            self._ticket.wait(self._stream)

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Return the milliseconds from this event to ``end_event``; both must be reached."""
        start, end = self._ticket, end_event._ticket
        if start is None or end is None or not (start.reached and end.reached):
            raise ValueError("elapsed_time() needs two events that were recorded and reached")
        return (end.time_s - start.time_s) * 1e3

    def __repr__(self) -> str:
        """Show whether the event is reached."""
        state = "unrecorded" if self._ticket is None else "reached" if self.query() else "pending"
        return f"CpuEvent({state})"


class HostStream:
    """The compute stream of the CPU backend: the calling thread itself."""

    alive = True

    def wait_event(self, event: CpuEvent) -> None:
        """Block until ``event`` is reached."""
        event.synchronize()

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Reach ``event`` now: all earlier work of this thread is done."""
        event = event or CpuEvent()
        ticket = _Ticket()
        ticket.reach()
        event._ticket, event._stream = ticket, self
        return event

    def run(self, work: Callable[[], object]) -> None:
        """Do ``work`` now."""
        work()

    def synchronize(self) -> None:
        """Do nothing: the host is never behind itself."""

    def __repr__(self) -> str:
        """Say which stream this is."""
        return "HostStream()"


class CpuStream:
    """A side stream: one worker thread that runs queued work in order."""

    def __init__(self, name: str) -> None:
        """Start the worker.

        Args:
            name: Name of the thread, for debuggers.
        """
        self._name = name
        self._batch: list[Callable[[], object]] | None = None
        self._worker = _Worker(name)
        weakref.finalize(self, self._worker.stop)

    @property
    def alive(self) -> bool:
        """Whether the worker thread can still do work."""
        return self._worker.thread.is_alive()

    def wait_event(self, event: CpuEvent) -> None:
        """Let work that is queued from now on wait for ``event`` as it is recorded now."""
        ticket, source = event._ticket, event._stream
        if ticket is not None and not (ticket.reached and ticket.error is None):
            self.run(lambda: ticket.wait(source))

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Reach ``event`` when all work that is queued so far is done."""
        event = event or CpuEvent()
        ticket = _Ticket()
        event._ticket, event._stream = ticket, self
        self._worker.owe(ticket)
        self.run(ticket.reach)
        return event

    def run(self, work: Callable[[], object]) -> None:
        """Queue ``work``; inside ``stream_context`` it is handed over when the context ends."""
        if self._batch is None:
            self._worker.put([work])
        else:
            self._batch.append(work)

    def synchronize(self) -> None:
        """Block until all queued work is done."""
        self.record_event().synchronize()

    def give_up(self, error: BaseException) -> None:
        """Raise ``error`` to all who wait for work of this stream, and do none of it any more."""
        self._worker.give_up(error)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Collect what is queued inside and hand it over as one item."""
        if self._batch is not None:
            yield
            return
        self._batch = []
        try:
            yield
        finally:
            work, self._batch = self._batch, None
            self._worker.put(work)

    def __repr__(self) -> str:
        """Show the name and whether the worker lives."""
        return f"CpuStream({self._name!r}, {'alive' if self.alive else 'dead'})"


class _Worker:
    """The thread behind a side stream; it never holds the stream, so that can be collected."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[list[Callable[[], object]] | None] = queue.SimpleQueue()
        self._owed: list[_Ticket] = []
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._loop, name=f"dlo-{name}", daemon=True)
        _at_exit.start(self)

    def put(self, work: list[Callable[[], object]]) -> None:
        if not self.thread.is_alive():
            raise BackendError(
                "a CPU stream got work after its worker thread ended (forked process or "
                "interpreter exit); offload again in this process"
            )
        self._queue.put(work)

    def owe(self, ticket: _Ticket) -> None:
        """Note a ticket that must be reached, with an error if need be."""
        with self._lock:
            if len(self._owed) > 64:
                self._owed = [owed for owed in self._owed if not owed.reached]
            self._owed.append(ticket)
            error = self._error
        if error is not None:
            ticket.reach(error)

    def give_up(self, error: BaseException) -> None:
        """Reach all that is owed with ``error``, though the thread may sit in its present work."""
        with self._lock:
            self._error = self._error or error.with_traceback(None)
            owed, self._owed = self._owed, []
        for ticket in owed:
            if not ticket.reached:
                ticket.reach(self._error)

    def stop(self) -> None:
        """Drop the queue and end the thread after its present piece of work."""
        self._stopping = True
        self._queue.put(None)

    def _loop(self) -> None:
        # Grad and inference modes are thread-local.
        with torch.inference_mode(False), torch.no_grad():
            while (batch := self._queue.get()) is not None and not self._stopping:
                self._run(batch)
                del batch

    def _run(self, batch: list[Callable[[], object]]) -> None:
        try:
            batch.reverse()
            # Popped, so that what a piece of work held is let go before a later one reaches its
            # event.
            while batch and self._error is None:
                batch.pop()()
        # Whatever happens in a worker must reach the host that waits.
        except BaseException as error:
            # Its frames hold what the work held.
            self.give_up(error)
        if self._error is not None:
            self.give_up(self._error)


_current = threading.local()
_host = HostStream()


def current_stream() -> CpuStream | HostStream:
    """Return the stream on which this thread queues work."""
    return getattr(_current, "stream", _host)


@contextmanager
def stream_context(stream: CpuStream | HostStream) -> Iterator[None]:
    """Make ``stream`` current in this thread; a side stream gets the work when it ends."""
    before = current_stream()
    _current.stream = stream
    try:
        if isinstance(stream, CpuStream):
            with stream.batch():
                yield
        else:
            yield
    finally:
        _current.stream = before
