"""How ranks agree on what the tape asks: the ring order that the first pass has shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlo_core.pass_agreement import PassAgreement
from dlo_core.tape import FirstPass, agreed

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.agreement import Agreement
    from dlo_core.slots import Pool

__all__ = ["AgreeAlone", "AgreeOver"]


class AgreeAlone:
    """One rank, or ranks that do not gather: each takes the order that it saw."""

    def __call__(self, mine: FirstPass, serve: Callable[[int], None]) -> FirstPass:
        return mine

    def announce(self, wanted: int) -> None:
        """Tell nobody."""


class AgreeOver:
    """The exchange over the control group; see [Note: the first pass] in tape.py."""

    def __init__(self, agreement: Agreement, timeout_s: float, model: int, pool: Pool) -> None:
        self._agreement = agreement
        self._passes = PassAgreement(agreement, pool, timeout_s)
        self._topic = f"fills of model {model}"

    def __call__(self, mine: FirstPass, serve: Callable[[int], None]) -> FirstPass:
        def meanwhile() -> None:
            serve(self._agreement.announced(self._topic))

        what = "the ring order after the first pass"
        return agreed(self._passes.exchange(mine, what, meanwhile))

    def announce(self, wanted: int) -> None:
        self._agreement.announce(self._topic, wanted)
