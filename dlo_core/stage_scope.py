"""The stage scope: loading and dropping the resident blocks between two passes, all ranks alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.errors import UseError
from dlo_core.residents import ResidentBlocks
from dlo_core.together import begin_together

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.agreement import Agreement
    from dlo_core.engine import Engine

__all__ = ["drop_residents", "load_residents"]


def load_residents(engine: Engine, agreement: Agreement) -> None:
    """Queue the loads of all models' resident blocks, where they are not there.

    Raises:
        UseError: A block computes now, or a rank has not the memory.
        AgreementError: The ranks did not call it alike.
        FillError: A load could not be queued; the offload is closed.
    """
    _between_passes(engine, agreement, "load_resident_layers()", ResidentBlocks.load)


def drop_residents(engine: Engine, agreement: Agreement) -> None:
    """Let the device memory of all models' resident blocks go; nothing is copied back.

    Raises:
        UseError: A block computes now.
        AgreementError: The ranks did not call it alike.
        FillError: A transfer went wrong; the offload is closed.
    """
    _between_passes(engine, agreement, "offload_resident_layers()", ResidentBlocks.drop)


def _between_passes(
    engine: Engine, agreement: Agreement, what: str, do: Callable[[ResidentBlocks], None]
) -> None:
    entered: list[bool] = []
    pool = engine.pool

    def check() -> tuple[None, dict[str, str]]:
        engine.streamers[0].enter()
        entered.append(True)
        if pool.busy:
            raise UseError(
                f"busy: {what} was called while a block computes; call it between passes"
            )
        facts = {"call": what}
        for number, state in enumerate(engine.states):
            for name, value in state.readback.facts().items():
                facts[f"{name} of model {number}"] = value
        return None, facts

    try:
        begin_together(agreement, what, check)
        if pool.owner.open:
            # An engine that calls blocks and not the root ends its pass here.
            pool.owner.end_pass()
        for streamer in engine.streamers:
            streamer.guarded(do, streamer.residents)
    finally:
        if entered:
            engine.streamers[0].leave()
