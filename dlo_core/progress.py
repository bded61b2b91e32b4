"""Progress of loading: what the caller is told, as a bar or through a callback."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import Progress, TaskID

__all__ = ["LoadProgress", "Report", "reporting"]


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is on this rank.

    Attributes:
        done_nbytes: Bytes read so far.
        total_nbytes: Bytes to read.
        seconds: Time since the start.
    """

    done_nbytes: int
    total_nbytes: int
    seconds: float

    @property
    def rate_gb_s(self) -> float:
        """Gigabytes a second so far."""
        return self.done_nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the end at the rate so far; None before the first byte."""
        if not self.done_nbytes:
            return None
        return self.seconds * (self.total_nbytes - self.done_nbytes) / self.done_nbytes


class Report:
    """Counts bytes and tells the listener."""

    def __init__(self, total_nbytes: int, listener: Callable[[LoadProgress], None] | None) -> None:
        """Start at zero."""
        self._total = total_nbytes
        self._listener = listener
        self._done = 0
        self._start_s = time.perf_counter()

    def expect(self, nbytes: int) -> None:
        """Take ``nbytes`` as the total."""
        self._total = nbytes

    def add(self, nbytes: int) -> None:
        """Count ``nbytes``; an exception of the listener goes through and cancels the load."""
        self._done += nbytes
        if self._listener is not None:
            seconds = time.perf_counter() - self._start_s
            self._listener(LoadProgress(self._done, self._total, seconds))

    def finish(self) -> None:
        """Tell the listener once, if there was nothing to read, so that it can cancel here, too."""
        if not self._done:
            self.add(0)


@contextmanager
def reporting(
    progress: bool | Callable[[LoadProgress], None],
    total_nbytes: int = 0,
    verb: str = "loading",
) -> Iterator[Report]:
    """Yield a report: to the caller's callback, to a bar on a terminal, or to nobody."""
    if callable(progress):
        yield Report(total_nbytes, progress)
    elif progress and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(f"{verb} weights", total=total_nbytes, rate="")
            yield Report(total_nbytes, _to_bar(bar, task))
    else:
        yield Report(total_nbytes, None)


def _to_bar(bar: Progress, task: TaskID) -> Callable[[LoadProgress], None]:
    def update(now: LoadProgress) -> None:
        rate = f"{now.rate_gb_s:.2f} GB/s"
        bar.update(task, completed=now.done_nbytes, total=now.total_nbytes, rate=rate)

    return update
