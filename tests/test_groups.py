"""Groups of dlo's own: what they are made under, and what is left of them when a gather failed."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlo_core import accelerator, collective
from dlo_core.config import OffloadConfig
from dlo_core.gathering import make_collective, make_group
from dlo_core.registry import get_backend


class Careful:
    """A backend whose groups want two variables of the environment."""

    def group_environment(self) -> dict[str, str]:
        """Return them."""
        return {"DLO_TEST_SET": "0", "DLO_TEST_UNSET": "1"}


class Group:
    """A group of an accelerator's comm library, which knows whether it has failed."""

    def __init__(self, error: str | None) -> None:
        self._error = error
        self._device_types = [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        if self._error is None:
            raise RuntimeError("no such backend")
        return SimpleNamespace(get_error=lambda: SimpleNamespace(name=self._error))


def seen() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("DLO_TEST_")}


@pytest.mark.parametrize("fails", [False, True])
def test_the_environment_is_a_groups_own_while_it_is_made(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLO_TEST_SET", "3")
    backend: Any = Careful()
    inside: list[dict[str, str]] = []

    def make() -> Any:
        inside.append(seen())
        if fails:
            raise RuntimeError("no connection")

    before = seen()
    if fails:
        with pytest.raises(RuntimeError, match="no connection"):
            make_group(backend, make)
    else:
        make_group(backend, make)
    assert inside == [{"DLO_TEST_SET": "0", "DLO_TEST_UNSET": "1"}]
    assert seen() == before == {"DLO_TEST_SET": "3"}


def test_a_backend_that_says_nothing_changes_nothing() -> None:
    assert dict(get_backend("cpu").group_environment()) == {}


class Agreed:
    """An agreement that has seen what the environment said when its group was made."""

    def new_group(self, comm_library: str, timeout_s: float, options: Any = None) -> Any:
        """Look."""
        self.environment = dict(os.environ)
        return "a group"


def test_the_weights_group_is_made_so_that_torchs_watchdog_leaves_it_alone() -> None:
    made = pytest.importorskip("dlo_cuda.backend")
    backend: Any = made.CudaBackend(torch.device("cuda", 0), None)
    backend.collective = lambda group: f"gathers over {group}"
    agreement: Any = Agreed()
    before = dict(os.environ)
    gathers: Any = make_collective(OffloadConfig(), backend, agreement)
    assert gathers == "gathers over a group"
    assert agreement.environment == before | {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
    assert dict(os.environ) == before


def test_the_end_of_the_process_destructs_no_group_that_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group: Any = Group("COMM_ERROR")
    monkeypatch.setattr(collective, "_kept", [group])
    monkeypatch.setattr(collective, "_abandoned", [])
    before = sys.getrefcount(group)
    collective._leave_abandoned()
    assert sys.getrefcount(group) == before + 1


@pytest.mark.parametrize(
    ("error", "failed", "stays"),
    [
        ("SUCCESS", False, False),
        (None, False, False),
        ("COMM_ERROR", False, True),
        ("SUCCESS", True, True),
        (None, True, True),
    ],
)
def test_a_group_of_which_a_gather_failed_is_kept(
    error: str | None, failed: bool, stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its destructor would wait for a thread that waits for the interpreter."""
    aborted: list[int] = []
    monkeypatch.setattr(collective, "_is_known", lambda group: True)
    monkeypatch.setattr(collective, "_kept", [])
    monkeypatch.setattr(
        torch.distributed.distributed_c10d,
        "_abort_process_group",
        lambda group: aborted.append(id(group)),
    )
    group: Any = Group(error)
    collective.abort_group(group, failed=failed)
    assert aborted == [id(group)]
    there = weakref.ref(group)
    del group
    gc.collect()
    assert (there() is not None) == stays


def test_the_group_of_an_offload_that_failed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the comm library itself tells of no error."""
    monkeypatch.setattr(collective, "_is_known", lambda group: True)
    monkeypatch.setattr(collective, "_kept", [])
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr(
        torch.distributed.distributed_c10d, "_abort_process_group", lambda group: None
    )
    group: Any = Group("SUCCESS")
    accelerator.DeviceCollective(group, lambda: None).abort(RuntimeError("a peer is gone"))
    assert collective._kept == [group]


def test_a_group_whose_abort_raises_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: Any) -> None:
        raise RuntimeError("it has windows")

    monkeypatch.setattr(collective, "_is_known", lambda group: True)
    monkeypatch.setattr(collective, "_kept", [])
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", refuse)
    group: Any = Group("SUCCESS")
    with pytest.raises(RuntimeError, match="windows"):
        collective.abort_group(group)
    assert collective._kept == [group]


def test_an_error_that_shows_during_the_abort_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def abort(group: Any) -> None:
        group._error = "COMM_ERROR"

    monkeypatch.setattr(collective, "_is_known", lambda group: True)
    monkeypatch.setattr(collective, "_kept", [])
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_abort_process_group", abort)
    group: Any = Group("SUCCESS")
    collective.abort_group(group)
    assert collective._kept == [group]
