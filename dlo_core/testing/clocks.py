"""Vector clocks: what happened before what, across the host and all streams of one rank.

Pure. A *timeline* is the host or a stream. Work that is queued on a stream comes after what the
host did
before; a wait adds what the event's stream had done when the event was recorded. Two accesses
are ordered when the later one's clock has the earlier one's tick.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Clocks", "Stamp"]

Clock = dict[str, int]


class Stamp:
    """A moment on a timeline: its own tick, and all that had happened before."""

    __slots__ = ("clock", "timeline")

    def __init__(self, timeline: str, clock: Clock) -> None:
        """Remember a copy of the clock."""
        self.timeline = timeline
        self.clock = dict(clock)

    def before(self, other: Stamp) -> bool:
        """Return whether this moment happened before ``other``."""
        return other.clock.get(self.timeline, 0) >= self.clock[self.timeline]


class Clocks:
    """The clocks of all timelines."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._now: dict[str, Clock] = {}

    def tick(self, timeline: str, *, after: Iterable[str] = ()) -> Stamp:
        """Do something on ``timeline`` and return the moment.

        Args:
            timeline: Whose clock goes on.
            after: Timelines after which this one thing comes; what comes later does not.
        """
        now = self._now.setdefault(timeline, {})
        if timeline != "host":
            _join(now, self._now.setdefault("host", {}))
        now[timeline] = now.get(timeline, 0) + 1
        clock = dict(now)
        for other in after:
            _join(clock, self._now.get(other, {}))
        return Stamp(timeline, clock)

    def join(self, timeline: str, stamp: Stamp) -> None:
        """Let all that comes on ``timeline`` come after ``stamp``."""
        _join(self._now.setdefault(timeline, {}), stamp.clock)

    def join_all(self, timeline: str) -> None:
        """Let all that comes on ``timeline`` come after everything so far."""
        now = self._now.setdefault(timeline, {})
        for clock in list(self._now.values()):
            _join(now, clock)


def _join(into: Clock, other: Clock) -> None:
    for timeline, tick in other.items():
        if tick > into.get(timeline, 0):
            into[timeline] = tick
