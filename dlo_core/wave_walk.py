"""A walk: one wave on one rank, from the first pass to the last idle one.

[Note: equal passes]
Ranks that share one sharded copy of the weights must make the same passes. A rank without a
request, or one whose request took fewer steps, makes idle passes until the last rank is done: it
serves its shards. It learns from the store how far the others are; who computes only tells, once a
pass, and asks nobody. So the bits of a request do not depend on who runs beside it.

[Note: two sets of topics]
What is told stays in the store, so waves take turns with two sets of topics, and each number is
stamped with its wave. A rank that writes over what it told two waves ago has seen the wave between
them end on every rank, so nobody reads that any more.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NoReturn

from dlo_core.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.engine import Engine
    from dlo_core.layerwise import LayerwiseOffload

__all__ = ["FreeWalk", "Walk", "of_turn", "stamped"]

_POLL_S = 0.0005
_STAMP = 1 << 32


def stamped(turn: int, number: int) -> int:
    """Return ``number`` as told in ``turn``; greater than all that was told in earlier turns."""
    return turn * _STAMP + number


def of_turn(turn: int, told: int) -> int:
    """Return the number that was told in ``turn``; 0 when ``told`` is of another turn."""
    return told % _STAMP if told // _STAMP == turn else 0


class Walk:
    """One wave on this rank: counts passes, tells them, and makes idle ones."""

    def __init__(
        self, offloaded: LayerwiseOffload, engine: Engine, before_pass: Callable[[int], object]
    ) -> None:
        """Number the wave, alike on every rank.

        Args:
            offloaded: What walks.
            engine: Its parts.
            before_pass: Is told the number of each pass of this rank's own request; what it raises
                comes out of the model's call, before the pass begins.
        """
        self._offloaded = offloaded
        self._engine = engine
        self._before_pass = before_pass
        self._serving = False
        self._agreement = offloaded.agreement
        self._wave: int = engine.next_wave()
        # See [Note: two sets of topics].
        self._topics = ("even", "odd")[self._wave % 2]
        self.passes = 0
        self._model = -1
        self._switches = 0

    def __enter__(self) -> Walk:
        for number, streamer in enumerate(self._engine.streamers):
            streamer.on_pass = lambda number=number: self._tell(number)
        return self

    def __exit__(self, *exc: object) -> None:
        for streamer in self._engine.streamers:
            streamer.on_pass = None

    def _tell(self, model: int) -> None:
        """Say, before the pass begins, which it is and of which model."""
        self._count()
        if model != self._model:
            # Who serves must fill from the same model: see where each stretch of passes begins.
            self._model = model
            place = self.passes * len(self._engine.streamers) + model
            self._announce(f"stretch {self._switches}", place)
            self._switches += 1
        self._announce("passes", self.passes)

    def _announce(self, what: str, number: int) -> None:
        self._agreement.announce(f"{self._topics} wave {what}", stamped(self._wave, number))

    def _heard(self, what: str) -> list[int]:
        told = self._agreement.heard(f"{self._topics} wave {what}")
        return [of_turn(self._wave, number) for number in told]

    def _count(self) -> None:
        if not self._serving:
            self._before_pass(self.passes + 1)
        self.passes += 1

    def serve(self, timeout_s: float) -> int:
        """Make idle passes until every rank is done; return how many."""
        self._serving = True
        self._announce("done", 1)
        made, seen, quiet_since = 0, None, time.monotonic()
        while True:
            if self._engine.watch is not None:
                self._engine.watch.look()
            ended = self._heard("done")
            counts = self._heard("passes")
            if max(counts) > self.passes:
                with self._offloaded.run_pass(self._model_of(self.passes + 1)):
                    pass
                made += 1
            elif all(ended):
                # Counts were read after all had ended, so they are final.
                return made
            if (ended, counts) != seen:
                seen, quiet_since = (ended, counts), time.monotonic()
            elif time.monotonic() - quiet_since > timeout_s:
                self._give_up(ended, counts, timeout_s)
            else:
                time.sleep(_POLL_S)

    def _model_of(self, number: int) -> Any:
        """Return the model whose pass ``number`` the other ranks make."""
        models = self._offloaded.models
        found, stretch = 0, 0
        while True:
            place = max(self._heard(f"stretch {stretch}"))
            begins, model = divmod(place, len(models))
            if not place or begins > number:
                return models[found]
            found, stretch = model, stretch + 1

    def _give_up(self, ended: list[int], counts: list[int], timeout_s: float) -> NoReturn:
        late = [
            f"rank {rank} (in pass {count})"
            for rank, (over, count) in enumerate(zip(ended, counts, strict=True))
            if not over
        ]
        raise AgreementError(
            f"wave {self._wave}: no sign of {', '.join(late)} for {timeout_s:g} s while this rank "
            f"served after {self.passes} passes; look for an error there, or raise idle_timeout_s"
        )


class FreeWalk(Walk):
    """A wave in rank-local mode: nobody waits for anybody."""

    def _tell(self, model: int) -> None:
        self._count()

    def serve(self, timeout_s: float) -> int:
        """Do nothing."""
        return 0
