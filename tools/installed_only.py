"""A pytest plug-in that fails the run when a module of dlo comes from the checkout.

tox loads it with ``-p installed_only``: the tests there must prove the wheel, not the source tree.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PACKAGES = ("dlo_core", "dlo_cuda", "dlo_ascend")


def foreign(name: str, origin: str | None) -> str | None:
    """Say where module ``name`` comes from if that is not the running environment."""
    if origin is None or Path(origin).resolve().is_relative_to(Path(sys.prefix).resolve()):
        return None
    return f"{name} comes from {origin}, not from the wheel installed in {sys.prefix}"


def pytest_configure() -> None:
    """Refuse to start when an import would find the checkout."""
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if problem := foreign(package, spec.origin if spec else None):
            raise pytest.UsageError(problem)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Check the modules that the tests did import."""
    problems = [
        problem
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in PACKAGES
        and (problem := foreign(name, getattr(module, "__file__", None)))
    ]
    if problems:
        sys.stderr.write("\n".join(["", *problems, ""]))
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
