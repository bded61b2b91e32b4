"""Together: steps that all ranks of a group go through, and that succeed on all or raise on all."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from dlo_core.agreement import agree_on

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dlo_core.agreement import Agreement

__all__ = ["begin_together", "do_together"]

T = TypeVar("T")


def do_together(agreement: Agreement, what: str, work: Callable[[], T]) -> T:
    """Return what ``work`` returns on this rank, when it raises on none.

    Raises:
        BaseException: What ``work`` raised here; where it raised elsewhere, an error of dlo's that
            names the rank.
    """
    problem: BaseException | None = None
    result: T | None = None
    try:
        result = work()
    # Every rank must hear of it, whatever it is.
    except BaseException as error:
        problem = error
    agreement.vote(problem, what)
    return result  # type: ignore[return-value]


def begin_together(
    agreement: Agreement, what: str, check: Callable[[], tuple[T, Mapping[str, str]]]
) -> T:
    """Return what ``check`` found, when it raises on no rank and its facts are the same on all.

    Args:
        agreement: The ranks.
        what: Names the step in errors.
        check: Returns something and facts; changes nothing.

    Raises:
        BaseException: As ``do_together`` does.
        AgreementError: The facts differ.
    """
    found, facts = do_together(agreement, what, check)
    agree_on(agreement, facts, what)
    return found
