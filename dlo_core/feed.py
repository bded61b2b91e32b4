"""A feed: how a transfer comes by the bytes of a block on the host when it queues their copy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dlo_core.interface import Event

__all__ = ["DirectFeed", "Feed", "FeedError", "Part"]

Part = tuple[int, torch.Tensor]
"""A place in a shard, and the bytes that lie there."""


class FeedError(RuntimeError):
    """Raised on the host when a feed could not come by a block's bytes.

    Attributes:
        block: Number of the block among those of the transfer.
    """

    def __init__(self, message: str, block: int) -> None:
        super().__init__(message)
        self.block = block


class Feed(ABC):
    """Brings blocks to where the device can copy from, in the order in which they are sent for."""

    @abstractmethod
    def send(
        self,
        block: int,
        parts: Sequence[Part],
        filled: Event,
        queue: Callable[[Sequence[Part]], None],
    ) -> None:
        """Let ``queue`` queue the copy of a block's shard, now or later, here or in a thread.

        Args:
            block: Its number.
            parts: Its bytes, where they lie in host memory already.
            filled: The event that ``queue`` records behind the copy.
            queue: Is given the parts of the shard to copy from.
        """

    @abstractmethod
    def catch_up(self, filled: Event) -> None:
        """Block the host until what was sent for with ``filled`` is queued.

        A wait for an event means the recording that it has at that time, so nothing may wait for
        ``filled`` before this.

        Raises:
            FeedError: The bytes could not be had.
            TimeoutError: They did not come in time.
        """

    @abstractmethod
    def settle(self) -> None:
        """Block the host until everything that was sent for is queued."""

    @abstractmethod
    def close(self) -> None:
        """Drop what is not queued yet. Idempotent; never raises."""


class DirectFeed(Feed):
    """The bytes lie where the device can copy from: the copy is queued at once."""

    def send(
        self,
        block: int,
        parts: Sequence[Part],
        filled: Event,
        queue: Callable[[Sequence[Part]], None],
    ) -> None:
        """Queue the copy."""
        queue(parts)

    def catch_up(self, filled: Event) -> None:
        """Do nothing: it is queued."""

    def settle(self) -> None:
        """Do nothing: all is queued."""

    def close(self) -> None:
        """Do nothing: nothing waits."""
