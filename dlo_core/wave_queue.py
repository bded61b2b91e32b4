"""A queue of requests from many clients, out of which waves are formed."""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlo_core.errors import ConfigError, UseError
from dlo_core.wave_request import CompatibilityKey, WaveRequest, compatibility_key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlo_core.waves import WaveResult

__all__ = ["WaveQueue", "WaveTicket"]


@dataclass(slots=True, eq=False)
class WaveTicket:
    """A request that waits, runs or is done.

    Attributes:
        request: The request.
        future: Its outcome; ``future.cancel()`` takes it back while it waits.
    """

    request: WaveRequest
    future: Future[Any] = field(default_factory=Future)


class WaveQueue:
    """Takes requests from any thread; gives them out in waves whose members can run together.

    A wave begins with the oldest request and takes later ones that go with it. It is given out
    when it is full, or when the admission window of its oldest request has passed.
    """

    def __init__(
        self,
        size: int,
        *,
        window_s: float = 0.05,
        max_waiting: int = 1024,
        key: CompatibilityKey | None = compatibility_key,
    ) -> None:
        """Start empty.

        Args:
            size: Requests in a full wave: the number of data-parallel replicas.
            window_s: Seconds that a request waits for others, at most.
            max_waiting: Requests that may wait; more are refused, so that memory is bounded.
            key: Gives what must be equal in a wave; None: anything goes together (ragged waves,
                rank-local mode).

        Raises:
            ConfigError: A setting is out of range.
        """
        if size < 1 or max_waiting < 1 or window_s < 0:
            raise ConfigError(
                "a WaveQueue needs size >= 1, max_waiting >= 1 and window_s >= 0; got "
                f"{size}, {max_waiting}, {window_s}"
            )
        self._size = size
        self._window_s = window_s
        self._max_waiting = max_waiting
        self._key = key
        self._waiting: deque[tuple[float, WaveTicket]] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, request: WaveRequest) -> WaveTicket:
        """Put a request in and return its ticket.

        Raises:
            UseError: The queue is full or closed.
        """
        ticket = WaveTicket(request)
        with self._changed:
            if self._closed:
                raise UseError("this WaveQueue is closed and takes no requests")
            self._drop_cancelled()
            if len(self._waiting) >= self._max_waiting:
                raise UseError(
                    f"{len(self._waiting)} requests wait already, the most that max_waiting "
                    "allows; try again later"
                )
            self._waiting.append((time.monotonic(), ticket))
            self._changed.notify_all()
        return ticket

    def take(self, timeout_s: float | None = None) -> list[WaveTicket]:
        """Wait for a wave and return its tickets, which run from now on.

        Args:
            timeout_s: How long to wait for the first request; None: without end.

        Returns:
            At most ``size`` tickets; none when the time is over or the queue was closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._drop_cancelled()
                now = time.monotonic()
                if self._waiting:
                    members = self._members()
                    due = self._waiting[0][0] + self._window_s
                    if len(members) == self._size or now >= due or self._closed:
                        wave = self._give_out(members)
                        if wave:
                            return wave
                        continue
                    self._changed.wait(due - now)
                elif self._closed or (deadline is not None and now >= deadline):
                    return []
                else:
                    self._changed.wait(None if deadline is None else deadline - now)

    def close(self) -> None:
        """Take no more requests; those that wait are still given out. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __len__(self) -> int:
        """Return how many wait."""
        with self._changed:
            self._drop_cancelled()
            return len(self._waiting)

    @staticmethod
    def settle(wave: Sequence[WaveTicket], results: Sequence[WaveResult]) -> None:
        """Give every ticket its result, or its error."""
        for ticket, result in zip(wave, results, strict=True):
            try:
                ticket.future.set_result(result.get())
            # A CancelledError is one, too.
            except Exception as error:
                ticket.future.set_exception(error)

    def _drop_cancelled(self) -> None:
        self._waiting = deque(each for each in self._waiting if not each[1].future.cancelled())

    def _members(self) -> list[WaveTicket]:
        """Return the oldest request and those that go with it, in the order of arrival."""
        first = self._waiting[0][1]
        wanted = None if self._key is None else dict(self._key(first.request))
        members = []
        for _, ticket in self._waiting:
            if self._key is None or dict(self._key(ticket.request)) == wanted:
                members.append(ticket)
                if len(members) == self._size:
                    break
        return members

    def _give_out(self, members: Sequence[WaveTicket]) -> list[WaveTicket]:
        chosen = set(map(id, members))
        self._waiting = deque(each for each in self._waiting if id(each[1]) not in chosen)
        return [ticket for ticket in members if ticket.future.set_running_or_notify_cancel()]
