"""The base of the suites: known limits, and the fixture that an author overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from dlo_core.testing.conformance.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlo_core.interface import Backend

__all__ = ["BackendSuite", "Suite"]


class Suite:
    """Tests of one part of a backend.

    Attributes:
        known_limits: Names of tests that are known to fail, each with the reason. Such a test must
            fail: when it passes, the run fails until the entry is gone.
    """

    known_limits: ClassVar[Mapping[str, str]] = {}


class BackendSuite(Suite):
    """Tests of one backend."""

    @pytest.fixture
    def backend(self) -> Backend:
        """Return the backend under test; override it."""
        raise NotImplementedError(
            f"{type(self).__name__} needs a fixture named 'backend' that returns the backend "
            "under test; see 'Checking it' in docs/backends.md"
        )

    @pytest.fixture
    def lab(self, backend: Backend) -> Iterator[Lab]:
        """Return the lab for the backend; it cleans up."""
        lab = Lab(backend)
        yield lab
        lab.close()
