"""The one tree of errors: every exception that dlo raises on purpose.

A message says what went wrong, what was got, what was wanted and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AgreementError",
    "BackendError",
    "CheckpointError",
    "ConfigError",
    "DloError",
    "DloWarning",
    "FillError",
    "FillTimeout",
    "HostMemoryError",
    "RestoreError",
    "UseError",
    "text_of",
]


def text_of(error: BaseException) -> str:
    """Return the class and the text of an error, whatever the error does when it is asked for it.

    What carries the news of a failure must not fail for what somebody's error says of itself.
    """
    try:
        text = str(error)
    except Exception as problem:
        text = f"(no text: {type(problem).__name__})"
    return f"{type(error).__name__}: {text}"


class DloError(Exception):
    """Base of every error that dlo raises."""


class ConfigError(DloError, ValueError):
    """Raised when a setting or an argument cannot be honoured; nothing was changed."""


class BackendError(DloError, RuntimeError):
    """Raised when a backend is absent or broken; the message holds the reason and the remedy."""


class CheckpointError(DloError, ValueError):
    """Raised when a checkpoint is missing, damaged or not the one that the model needs."""


class AgreementError(DloError, RuntimeError):
    """Raised on every rank when the ranks of a group differ or one of them did not answer.

    Attributes:
        missing: Ranks in the group that did not answer, as far as is known.
    """

    def __init__(self, message: str = "", *, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)


class HostMemoryError(DloError, MemoryError):
    """Raised when host memory cannot be had; names the bytes and the limit."""


class UseError(DloError, RuntimeError):
    """Raised when an offloaded model is used in a way that would give wrong numbers.

    For example: gradients, a weight used outside its block's forward, a moved model, a second
    thread in the same model, a call after ``shutdown()``, a replaced module.
    """


class FillError(DloError, RuntimeError):
    """Raised when a block could not be loaded into its slot.

    Attributes:
        rank: Rank in the shard group on which the error was seen.
        block: Dotted name of the block.
        fill: Number of the fill on the tape.
        culprit: Rank in the shard group that is to blame; -1 where it cannot be named.
        reason: What is known about the cause, without what it did to this rank.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        block: str,
        fill: int,
        culprit: int = -1,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.block = block
        self.fill = fill
        self.culprit = culprit
        self.reason = reason


class FillTimeout(FillError):
    """Raised when a fill did not end within ``timeout_s``."""


class RestoreError(DloError, RuntimeError):
    """Raised when ``disable()`` cannot give the weights back; the placeholders stay."""


class DloWarning(UserWarning):
    """Warned about a choice that is allowed but probably not what was meant."""
