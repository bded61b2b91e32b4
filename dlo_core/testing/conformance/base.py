"""The base of the suites of a backend: the fixture that an author overrides."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlo_core.testing.conformance.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dlo_core.interface import Backend

__all__ = ["BackendSuite"]


class BackendSuite:
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
