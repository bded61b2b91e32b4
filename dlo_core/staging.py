"""Staging: two bounded buffers through which blocks come from where the device cannot copy.

[Note: staging]
A worker reads block after block into the two buffers in turn and queues the copy to the device
itself, because a stream cannot wait for a thread of the host. Three things keep the order:

- the worker fills a buffer only when the copy before the last is done: it waits for that copy's
  own event, which was recorded behind it on the copy stream;
- nobody may wait for an event before the worker recorded it, for that would be no wait at all or
  one for an earlier fill: so the host *catches up* with the worker first;
- the copy stream of such a transfer is the worker's alone, but for ``settle``, which follows it.

So the host is held when it is faster than the reading, and at no other time.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from dlo_core.feed import Feed, FeedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from dlo_core.feed import Part
    from dlo_core.interface import Event
    from dlo_core.worker import Job, Worker

__all__ = ["StagingFeed"]


class StagingFeed(Feed):
    """Reads each block anew for each of its copies. See [Note: staging].

    Attributes:
        ended: Whether the worker is known to touch the buffers no more.
    """

    ended = False

    def __init__(
        self,
        read: Callable[[int, torch.Tensor, Callable[[], bool]], None],
        sizes: Sequence[int],
        buffers: Sequence[torch.Tensor],
        *,
        worker: Worker,
        timeout_s: float,
    ) -> None:
        """Put the parts together.

        Args:
            read: Reads a block's shard into a buffer; ends early when it is told to stop.
            sizes: Bytes of each block's shard.
            buffers: Two, each as large as the largest shard.
            worker: Does the reading.
            timeout_s: Seconds that the host waits for one block.
        """
        self._read = read
        self._sizes = tuple(sizes)
        self._buffers = tuple(buffers)
        self._copied: list[Event | None] = [None] * len(self._buffers)
        self._turn = 0
        self._worker = worker
        self._timeout_s = timeout_s
        self._jobs: dict[int, tuple[Job, int]] = {}

    def send(
        self,
        block: int,
        parts: Sequence[Part],
        filled: Event,
        queue: Callable[[Sequence[Part]], None],
    ) -> None:
        """Let the worker read the block and queue its copy."""
        job = self._worker.submit(partial(self._carry, block, filled, queue))
        self._jobs[id(filled)] = job, block

    def catch_up(self, filled: Event) -> None:
        """Wait for the worker to have queued what was sent for with ``filled``."""
        job, block = self._jobs.get(id(filled), (None, -1))
        if job is None:
            return
        self._wait(job, block)
        self._jobs.pop(id(filled), None)

    def settle(self) -> None:
        """Wait for the worker to have queued everything."""
        for job, block in list(self._jobs.values()):
            self._wait(job, block)
        self._jobs.clear()

    def close(self) -> None:
        """Stop the worker; give it a moment to end."""
        self.ended = self.ended or self._worker.close()
        self._jobs.clear()

    def _carry(self, block: int, filled: Event, queue: Callable[[Sequence[Part]], None]) -> None:
        """Read one block and queue its copy; in the worker."""
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        buffer = self._buffers[turn][: self._sizes[block]]
        # See [Note: staging].
        before = self._copied[turn]
        if before is not None:
            before.synchronize()
        self._read(block, buffer, self._worker.stopping)
        queue(((0, buffer),))
        self._copied[turn] = filled

    def _wait(self, job: Job, block: int) -> None:
        error = job.wait(self._timeout_s)
        if error is not None:
            text = f"it could not be read into the staging buffer: {type(error).__name__}: {error}"
            raise FeedError(text, block) from error

    def __repr__(self) -> str:
        """Show the buffers and what is under way."""
        size = self._buffers[0].nbytes if self._buffers else 0
        return f"StagingFeed({len(self._buffers)} x {size:,} bytes, {len(self._jobs)} under way)"
