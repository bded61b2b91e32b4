"""What the CUDA backend finds out without starting a device: availability and settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.accelerator import device_index
from dlo_core.errors import BackendError

settings = pytest.importorskip("dlo_cuda.settings")
from dlo_cuda.backend import CudaBackend, make_backend  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("cuda", 0, "CUDA_VISIBLE_DEVICES"),
        ("cuda:2", 2, "there are 2 CUDA devices, 0 to 1"),
        ("cuda:-1", 2, "there are 2 CUDA devices, 0 to 1"),
        ("cuda:x", 2, "there are 2 CUDA devices, 0 to 1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(BackendError, match=words):
        make_backend(device)


@pytest.mark.parametrize(
    ("device", "started", "index"),
    [("cuda:1", False, 1), ("cuda:1", True, 1), ("cuda", False, 0), ("cuda", True, 2)],
)
def test_a_device_without_a_number_is_the_current_one_if_any_was_started(
    device: str, started: bool, index: int
) -> None:
    def current_device() -> int:
        assert started, "asking for it would start it"
        return 2

    module = SimpleNamespace(
        device_count=lambda: 3, is_initialized=lambda: started, current_device=current_device
    )
    assert device_index(module, device, kind="CUDA devices", absent="") == index


def test_a_backend_tells_its_settings_and_starts_nothing() -> None:
    # Another test of this process may have.
    before = torch.cuda.is_initialized()
    told = CudaBackend(torch.device("cuda", 0), None).settings()
    assert "powers of two" in told["pinned memory"]
    assert {"CUDA", "driver", "NCCL", "PYTORCH_CUDA_ALLOC_CONF"} <= told.keys()
    assert all(isinstance(value, str) for value in told.values())
    assert torch.cuda.is_initialized() == before


def test_settings_that_cost_something_say_so() -> None:
    on = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0", "NCCL_BLOCKING_WAIT": ""}
    assert set(settings.costly(on)) == {"CUDA_LAUNCH_BLOCKING"}
    assert settings.costly({}) == {}
    assert "wait behind" in settings.connections("1")
    assert settings.connections("") == "8 (default)"
    assert "cannot tell" in settings.device_memory(
        {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    )
    assert "not set" in settings.device_memory({})


def test_what_the_system_tells_is_read(tmp_path: Path) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n"
        "GCC version: gcc 12.3.0\n"
    )
    assert settings.driver_version(driver) == "580.159.04"
    assert settings.driver_version(tmp_path / "none") == "unknown"
    pages = tmp_path / "enabled"
    pages.write_text("always madvise [never]\n")
    assert "takes longer" in settings.huge_pages(pages)
    pages.write_text("always [madvise] never\n")
    assert settings.huge_pages(pages) == "madvise"
