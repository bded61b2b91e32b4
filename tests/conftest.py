"""What every test gets: one compute thread, and ``--require`` against silent skips."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core import registry

if TYPE_CHECKING:
    from collections.abc import Iterator

# Before anything is computed: a forked child of a process that used torch's thread pool hangs.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require",
        action="append",
        default=[],
        metavar="BACKEND",
        help="fail when this backend cannot be used, instead of skipping its tests",
    )


def pytest_configure(config: pytest.Config) -> None:
    usable = {status.name: status.reason for status in registry.installed()}
    for name in config.getoption("--require"):
        reason = usable.get(name, "no entry point has this name")
        if reason is not None:
            raise pytest.UsageError(f"--require {name}: {reason}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep the number of threads: bits depend on it."""
    yield
    assert torch.get_num_threads() == 1
