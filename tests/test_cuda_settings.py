"""What the CUDA backend finds out without starting a device: availability and settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from dlo_core.errors import BackendError

settings = pytest.importorskip("dlo_cuda.settings")
from dlo_cuda import availability  # noqa: E402
from dlo_cuda.backend import CudaBackend  # noqa: E402

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
def test_a_device_that_is_not_there_is_refused(device: str, count: int, words: str) -> None:
    with pytest.raises(BackendError, match=words):
        availability.number_of(device, count)


def test_a_device_may_be_named_with_or_without_its_number() -> None:
    assert availability.number_of("cuda", 2) is None
    assert availability.number_of("cuda:1", 2) == 1


def test_a_backend_tells_its_settings_and_starts_nothing() -> None:
    told = CudaBackend(torch.device("cuda", 0), None).settings()
    assert "powers of two" in told["pinned memory"]
    assert {"CUDA", "driver", "NCCL", "PYTORCH_CUDA_ALLOC_CONF"} <= told.keys()
    assert all(isinstance(value, str) for value in told.values())
    assert not torch.cuda.is_initialized()


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
