"""Whether the Ascend backend can be used, and what is said when not; needs no torch_npu."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from importlib import metadata
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dlo_core import registry
from dlo_core.errors import BackendError

if TYPE_CHECKING:
    from pathlib import Path

availability = pytest.importorskip("dlo_ascend.availability")
backend = pytest.importorskip("dlo_ascend.backend")
npurt = pytest.importorskip("dlo_ascend.npurt")
settings = pytest.importorskip("dlo_ascend.settings")


def python(code: str, *folders: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(["-c", textwrap.dedent(code)], *folders, **environment)


def run_python(
    arguments: list[str], *folders: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    paths = [str(folder) for folder in folders] + [entry for entry in sys.path if entry]
    hidden = {"LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_NPU_SANITIZER"}
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=kept | {"PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "400"} | environment,
    )


def install_fake(folder: Path, version: str, body: str) -> None:
    """Write a torch_npu that fails on import as ``body`` does, with its metadata."""
    (folder / "torch_npu").mkdir()
    (folder / "torch_npu" / "__init__.py").write_text(body, encoding="utf-8")
    info = folder / f"torch_npu-{version}.dist-info"
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\ntorch_npu = torch_npu:_autoload\n", encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0", (2, 13, 0)),
        ("2.13.0+cpu", (2, 13, 0)),
        ("2.7.1.post11", (2, 7, 1)),
        ("2.14.0.dev20260101+cu130", (2, 14, 0)),
    ],
)
def test_a_release_is_three_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert availability.release(version) == numbers


@pytest.mark.parametrize(
    ("torch_npu", "torch_version", "build", "words"),
    [
        ("2.13.0", "2.13.0+cpu", None, None),
        ("2.12.0.post3", "2.12.0", None, None),
        ("2.12.0.post3", "2.13.0+cpu", None, "pip install torch-npu==2.13.0"),
        ("2.14.0", "2.13.0", None, "works with torch 2.14.0 only"),
        ("2.13.0", "2.13.0+cu130", "CUDA 13.0", "environments of their own"),
    ],
)
def test_the_pair_of_versions_is_checked_before_anything_is_imported(
    torch_npu: str,
    torch_version: str,
    build: str | None,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: torch_npu)
    reason = availability.why_unfit(torch_version, build)
    assert (reason is None) if words is None else (words in reason)


@pytest.mark.parametrize(
    ("device", "count", "words"),
    [
        ("npu", 0, "ASCEND_RT_VISIBLE_DEVICES"),
        ("npu:2", 2, "there are 2 NPUs, 0 to 1"),
        ("npu:-1", 2, "there are 2 NPUs, 0 to 1"),
        ("npu:x", 2, "there are 2 NPUs, 0 to 1"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, count: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    npu = SimpleNamespace(device_count=lambda: count)
    monkeypatch.setattr(backend, "import_torch_npu", lambda device: SimpleNamespace(npu=npu))
    with pytest.raises(BackendError, match=words):
        backend.make_backend(device)


def test_without_torch_npu_the_reason_names_the_release_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError) as caught:
        registry.get_backend("npu")
    wanted = ".".join(map(str, availability.release(torch.__version__)))
    assert f"pip install torch-npu=={wanted}" in str(caught.value)


NO_CANN = "raise ImportError('libhccl.so: cannot open shared object file')"


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch for CUDA is refused before")
def test_torch_npu_without_cann_is_a_reason_in_dlo_info(tmp_path: Path) -> None:
    install_fake(tmp_path, torch.__version__.partition("+")[0], NO_CANN)
    done = python(
        "from dlo_core.cli import main; import sys; sys.argv = ['dlo', 'info']; main()",
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.returncode == 0, done.stderr
    for words in ("CANN is not to be found", "set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert words in done.stdout


def test_torch_npu_without_cann_breaks_torch_and_dlo_says_what_to_do(tmp_path: Path) -> None:
    install_fake(tmp_path, torch.__version__.partition("+")[0], NO_CANN)
    done = python("import dlo_core", tmp_path)
    assert done.returncode == 1
    told = done.stderr.rpartition("BackendError: ")[2]
    for words in ("libhccl.so", "set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert words in told


@pytest.mark.parametrize("start", [pytest.param("-m", marks=pytest.mark.slow), "script"])
def test_the_command_says_it_in_a_line_and_shows_no_traceback(start: str, tmp_path: Path) -> None:
    install_fake(tmp_path, torch.__version__.partition("+")[0], NO_CANN)
    script = tmp_path / "bin" / "dlo"
    script.parent.mkdir()
    script.write_text("from dlo_core.cli import main\nmain()\n", encoding="utf-8")
    given = ["-m", "dlo_core"] if start == "-m" else [str(script)]
    done = run_python([*given, "info"], tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("dlo: torch itself cannot be imported")
    assert "Traceback" not in done.stderr
    for words in ("libhccl.so", "set_env.sh", "TORCH_DEVICE_BACKEND_AUTOLOAD=0"):
        assert words in done.stderr


def test_a_torch_npu_that_cannot_be_imported_is_a_reason(tmp_path: Path) -> None:
    install_fake(tmp_path, torch.__version__.partition("+")[0], "raise OSError('libx.so: broken')")
    done = python(
        """
        import dlo_core, dlo_ascend.availability as availability
        from dlo_core import registry
        availability.why_no_cann = lambda: None
        availability.build_of_torch = lambda: None
        try:
            registry.get_backend("npu")
        except dlo_core.BackendError as error:
            print(error)
        """,
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert "OSError: libx.so: broken" in done.stdout, done.stderr
    assert "set_env.sh" in done.stdout


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "powers of two"),
        ("expandable_segments:True", "powers of two"),
        ("pinned_max_round_threshold_mb:1", "exact above 1 MiB"),
        ("page_size:1g, pinned_max_round_threshold_mb:8", "exact above 8 MiB"),
        (
            "pinned_max_round_threshold_mb:1,pin_memory_expandable_segments:True",
            "powers of two",
        ),
    ],
)
def test_dlo_info_says_how_pinned_memory_is_rounded(value: str, words: str) -> None:
    assert words in settings.pinned_memory(value)


def fake_torch_npu(cann: str | None, driver: str) -> Any:
    """Return what tells these versions; None: there is no npurt()."""
    if cann is None:
        return SimpleNamespace(npu=SimpleNamespace(), __version__="2.8.0.post5")
    utils = SimpleNamespace(get_cann_version={"RUNTIME": cann, "DRIVER": driver}.__getitem__)
    return SimpleNamespace(npu=SimpleNamespace(npurt=None, utils=utils), __version__="2.13.0")


@pytest.mark.parametrize(
    ("cann", "driver", "kernel", "words"),
    [
        ("8.5.0", "25.5.0", "5.15.0-91-generic", None),
        ("9.1.0.RC1", "26.0.rc1", "6.6.0", None),
        (None, "", "6.6.0", "torch_npu 2.8.0.post5 has no npurt()"),
        ("8.3.RC1", "25.5.0", "6.6.0", "CANN is 8.3.RC1, and 8.5.0 is needed"),
        ("8.5.0", "25.2.3", "6.6.0", "the driver is 25.2.3, and 25.5.0 is needed"),
        ("8.5.0", "", "6.6.0", "the version of the driver is unknown"),
        ("8.5.0", "25.5.0", "5.10.0-136.oe2203", "5.11 is needed"),
    ],
)
def test_memory_is_registered_only_where_copies_from_it_do_not_hold_the_host(
    cann: str | None, driver: str, kernel: str, words: str | None
) -> None:
    reason = npurt.why_no_registration(fake_torch_npu(cann, driver), kernel)
    assert (reason is None) if words is None else (words in reason)


def test_dlo_info_names_settings_that_hold_the_host() -> None:
    on: dict[str, Any] = {"ASCEND_LAUNCH_BLOCKING": "1", "HCCL_BLOCKING_WAIT": "0"}
    assert set(settings.costly(on)) == {"ASCEND_LAUNCH_BLOCKING"}
    assert settings.costly({}) == {}
    assert "hangs" in settings.costly({"HCCL_OP_EXPANSION_MODE": "AIV"})["HCCL_OP_EXPANSION_MODE"]
