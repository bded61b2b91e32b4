"""Turns: simulated ranks, threads of which exactly one runs at a time.

A rank hands over only when it has to wait for another. When every rank waits and nothing can move,
all of them raise ``Deadlock``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["Deadlock", "RankFailed", "Turns"]


class Deadlock(RuntimeError):
    """Raised on every rank when each waits for something that nobody will do."""


class RankFailed(AssertionError):
    """Raised when a simulated rank raised; ``errors`` has them all, by rank."""

    def __init__(self, message: str, errors: dict[int, BaseException]) -> None:
        super().__init__(message)
        self.errors = errors


class Turns:
    """Whose turn it is."""

    def __init__(self, size: int, chance: random.Random | None) -> None:
        """Start with rank 0.

        Args:
            size: Number of ranks.
            chance: Draws who is next; None: the ranks go round.
        """
        self.size = size
        self._chance = chance
        self._condition = threading.Condition()
        self._turn = 0
        self._waiting: dict[int, tuple[int, str]] = {}
        self._running = set(range(size))
        self._progress = 0
        self._failure: BaseException | None = None

    def run_ranks(self, fn: Callable[[int], Any], limit_s: float = 60.0) -> list[Any]:
        """Run ``fn(rank)`` on every rank and return the results, by rank.

        Raises:
            ExceptionGroup-like: The first rank's error; the others are in its notes.
        """
        results: list[Any] = [None] * self.size
        errors: dict[int, BaseException] = {}
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def body(rank: int) -> None:
            try:
                self._await_turn(rank)
                with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                    results[rank] = fn(rank)
            # Collected, and raised by the caller.
            except BaseException as error:
                errors[rank] = error
            finally:
                self._leave(rank)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(limit_s)
        if any(thread.is_alive() for thread in threads):
            raise TimeoutError(f"simulated ranks did not end within {limit_s:g} s")
        if errors:
            rank, error = next(iter(sorted(errors.items())))
            others = {r: repr(e) for r, e in errors.items() if r != rank}
            raise RankFailed(f"rank {rank}: {error!r}; others: {others}", errors) from error
        return results

    def wait_until(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until ``ready()`` is true.

        Raises:
            Deadlock: It never will be.
        """
        while not ready():
            self._waiting[rank] = (self._progress, what)
            if self._stuck():
                waits = "; ".join(f"rank {r} waits for {w}" for r, (_, w) in self._waiting.items())
                self._failure = Deadlock(f"every rank waits and nothing can move: {waits}")
            if self._failure is not None:
                self._wake_all()
                raise self._failure
            self._hand_over(rank)
        self._waiting.pop(rank, None)

    def moved(self) -> None:
        """Note that something happened for which somebody may wait."""
        self._progress += 1

    def _stuck(self) -> bool:
        return all(
            rank in self._waiting and self._waiting[rank][0] == self._progress
            for rank in self._running
        )

    def _hand_over(self, rank: int) -> None:
        with self._condition:
            self._turn = self._next(rank)
            self._condition.notify_all()
        self._await_turn(rank)

    def _next(self, rank: int) -> int:
        others = sorted(self._running - {rank})
        if not others:
            return rank
        if self._chance is not None:
            return self._chance.choice(others)
        return next((other for other in others if other > rank), others[0])

    def _await_turn(self, rank: int) -> None:
        with self._condition:
            while self._turn != rank:
                if not self._condition.wait(60.0):
                    raise TimeoutError(f"rank {rank} was never given its turn")

    def _leave(self, rank: int) -> None:
        with self._condition:
            self._running.discard(rank)
            self._waiting.pop(rank, None)
            self._progress += 1
            self._turn = self._next(rank)
            self._condition.notify_all()

    def _wake_all(self) -> None:
        with self._condition:
            self._condition.notify_all()
