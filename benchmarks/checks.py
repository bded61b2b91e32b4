"""Checks: what a section of the GPU check finds, as plain values with a limit each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Findings", "Options", "Skip"]


class Skip(Exception):
    """The section cannot be run here; says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the sections run.

    Attributes:
        device: The device.
        small: Whether to use models of a few megabytes.
        limit_s: Seconds that a section has.
        save: Hands over what was found so far, in case the section is killed.
    """

    device: str
    small: bool
    limit_s: float
    save: Callable[[dict[str, Any]], None]

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.startswith("cuda")

    def need_cuda(self) -> None:
        """Leave the section where there is no GPU.

        Raises:
            Skip: There is none.
        """
        if not self.cuda:
            raise Skip("needs a CUDA device")


@dataclass(frozen=True, slots=True)
class _Check:
    name: str
    value: Any
    limit: str
    ok: bool


@dataclass(slots=True)
class Findings:
    """What a section found so far; every addition is saved at once."""

    options: Options
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[_Check] = field(default_factory=list)

    def note(self, **facts: Any) -> None:
        """Keep figures that have no limit."""
        self.facts |= facts
        print("  ", facts, flush=True)
        self._save()

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Check that ``value`` is not above ``limit``."""
        self._add(_Check(name, round(value, 4), f"<= {limit}", value <= limit))

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Check that ``value`` is not below ``limit``."""
        self._add(_Check(name, round(value, 4), f">= {limit}", value >= limit))

    def true(self, name: str, value: bool) -> None:
        """Check that ``value`` holds."""
        self._add(_Check(name, bool(value), "true", bool(value)))

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {"facts": self.facts, "checks": [asdict(check) for check in self.checks]}

    def _add(self, check: _Check) -> None:
        self.checks.append(check)
        word = "ok  " if check.ok else "FAIL"
        print(f"  {word} {check.name}: {check.value} ({check.limit})", flush=True)
        self._save()

    def _save(self) -> None:
        self.options.save(self.to_dict())
