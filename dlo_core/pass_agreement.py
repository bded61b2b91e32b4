"""Exchanges between two passes: what ranks that gather tell each other while nothing is gathered.

A rank that waits in one ends it when the offload fails, and its error says who did not come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from dlo_core.agreement import Problem
from dlo_core.errors import AgreementError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dlo_core.agreement import Agreement
    from dlo_core.slots import Pool

__all__ = ["PassAgreement"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Told(Problem, Generic[T]):
    """A rank's value; a problem for ranks that are in another call of dlo's."""

    value: T


class PassAgreement:
    """The ranks that make their passes together."""

    def __init__(self, agreement: Agreement, pool: Pool, timeout_s: float) -> None:
        """Take the parts.

        Args:
            agreement: The ranks.
            pool: Says whether the offload has failed, and who is to blame.
            timeout_s: How long they wait for each other.
        """
        self._agreement = agreement
        self._pool = pool
        self._timeout_s = timeout_s
        self.rank, self.size = agreement.rank, agreement.size

    def exchange(
        self, value: T, what: str, meanwhile: Callable[[], object] = lambda: None
    ) -> list[T]:
        """Return every rank's ``value``, in rank order.

        Args:
            value: This rank's.
            what: Names the exchange in errors.
            meanwhile: Called now and then while the others are awaited.

        Raises:
            AgreementError: A rank did not come within the timeout, or came to another exchange.
            DloError: The offload has failed.
        """

        def look() -> None:
            if self._pool.failure is not None:
                raise self._pool.failure
            meanwhile()

        mine = _Told("", f"this rank was at {what}", value)
        try:
            answers = self._agreement.exchange(mine, what, self._timeout_s, meanwhile=look)
        except AgreementError as error:
            if self._pool.explain is None:
                raise
            found = self._pool.explain(error.missing)
            if found.kind == "nobody":
                raise
            missing = error.missing if found.culprit < 0 else (found.culprit,)
            raise AgreementError(
                f"{what}: the ranks could not agree within {self._timeout_s:g} s: {found.text}",
                missing=missing,
            ) from error
        for rank, answer in enumerate(answers):
            if not isinstance(answer, _Told) or answer.text != mine.text:
                where = answer.text if isinstance(answer, _Told) else "this rank was elsewhere"
                raise AgreementError(
                    f"{what}: rank {rank} came to something else ({where}); every rank must make "
                    "the same passes and dlo calls in the same order"
                )
        return [answer.value for answer in answers]
