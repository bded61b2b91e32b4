"""The pytest plug-in: one compute thread, ``--require``, and backends that skip with their reason.

Load it with ``pytest -p dlo_core.testing.pytest_plugin``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core import registry
from dlo_core.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from dlo_core.interface import Backend

# Before they are imported: a failing assert shows its values, as in an author's own tests.
pytest.register_assert_rewrite("dlo_core.testing.conformance")

# Before anything is computed. See [Note: fork and one thread] in dlo_core/testing/ranks.py.
torch.set_num_threads(1)

# What a plug-in meets on a machine without its library or driver; all else is a fault in it.
_ABSENT = (ImportError, OSError, BackendError)
_reasons = pytest.StashKey[set[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--require``."""
    parser.getgroup("dlo").addoption(
        "--require",
        action="append",
        default=[],
        metavar="DEVICE",
        help="fail when this device (type or type:1) cannot be used, instead of skipping its tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to start without a required device."""
    for device in config.getoption("--require"):
        try:
            registry.get_backend(device)
        except BackendError as error:
            raise pytest.UsageError(f"--require {device}: {error}") from None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Let a test that its class declares as a limit fail, and nothing else."""
    limits = getattr(getattr(item, "cls", None), "known_limits", {})
    reason = limits.get(getattr(item, "originalname", item.name))
    if reason is not None:
        item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Name an absent device once a class, not once a test."""
    report = yield
    parent, told = item.getparent(pytest.Class), report.longrepr
    if report.skipped and parent is not None and isinstance(told, tuple):
        reason = told[2].removeprefix("Skipped: ")
        if reason in item.config.stash.get(_reasons, ()):
            path, line, _ = parent.reportinfo()
            report.longrepr = (str(path), (line or 0) + 1, told[2])
    return report


@pytest.fixture(scope="session")
def usable_backend(pytestconfig: pytest.Config) -> Callable[[str], Backend]:
    """Return a function from a device to its backend; it skips or fails where there is none."""
    required = {registry.device_type(device) for device in pytestconfig.getoption("--require")}

    def usable(device: str) -> Backend:
        try:
            return registry.get_backend(device)
        except BackendError as error:
            reason, cause = str(error), error.__cause__
            broken = cause is not None and not isinstance(cause, _ABSENT)
            if broken or registry.device_type(device) in required:
                pytest.fail(reason, pytrace=broken)
        pytestconfig.stash.setdefault(_reasons, set()).add(reason)
        pytest.skip(reason)

    return usable


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the number of threads: bits depend on it."""
    yield
    assert torch.get_num_threads() == 1, "the test changed torch's number of threads"
