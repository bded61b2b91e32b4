"""Plug-ins: a backend of a third party, found by its entry point, and those that are broken."""

from __future__ import annotations

import configparser
import importlib
import io
import json
import shutil
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from poison import PoisonBackend
from ranks import run_ranks
from toys import assert_restored, inputs, make_toy, snapshot, twin
from typer.testing import CliRunner

import dlo_core as dlo
from dlo_core import cli, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

THIRD_PARTY = Path(__file__).parent / "third_party"
N = 4


def install(folder: Path, name: str, version: str, entry_points: dict[str, str]) -> None:
    """Write what an installer writes, so that the entry points are found in ``folder``."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    rows = "".join(f"{key} = {value}\n" for key, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[dlo]\n{rows}", encoding="utf-8")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )


def install_brick(folder: Path) -> None:
    """Install the third party's package from its own pyproject, without an installer."""
    project = configparser.ConfigParser()
    project.read(THIRD_PARTY / "pyproject.toml", encoding="utf-8")
    name, version = (project["project"][key].strip('"') for key in ("name", "version"))
    points = {key: v.strip('"') for key, v in project["project.entry-points.dlo"].items()}
    shutil.copytree(THIRD_PARTY / "dlo_brick", folder / "dlo_brick")
    install(folder, name, version, points)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path, and none of what is imported from it afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    importlib.invalidate_caches()


def status(name: str) -> registry.BackendStatus:
    (found,) = [each for each in registry.installed() if each.name == name]
    return found


# --- a third party's backend ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("device", ["brick", "brick:1"])
def test_a_third_partys_backend_is_found_and_streams_bit_for_bit(
    site: Path, device: str, size: int
) -> None:
    """torch knows no device "brick", so it must not be asked."""
    install_brick(site)

    def job(rank: int) -> bool:
        model = make_toy(N)
        reference, before = twin(model), snapshot(model)
        group = dist.group.WORLD if size > 1 else None
        for stages in (2, 0):
            offloaded = dlo.offload(model, device=device, group=group, stages=stages)
            assert type(offloaded.backend).__name__ == "BrickBackend"
            assert vars(offloaded.backend)["number"] == int(device == "brick:1")
            for seed in range(3):
                assert torch.equal(model(inputs(seed + rank)), reference(inputs(seed + rank)))
            held = offloaded.backend.memory().allocated
            assert held == offloaded.footprint.device_nbytes
            offloaded.disable()
            assert_restored(model, before)
        return True

    assert all(run_ranks(job, size)) if size > 1 else job(0)


def test_a_third_partys_backend_says_what_it_cannot(site: Path) -> None:
    install_brick(site)
    with pytest.raises(dlo.BackendError, match="two bricks, 0 and 1; got 'brick:2'"):
        dlo.offload(make_toy(N), device="brick:2")
    found = status("brick")
    assert found.reason is None
    assert found.distribution == "dlo-brick 7.5"
    assert isinstance(found.backend, dlo.Backend)


def test_the_same_name_from_two_distributions_is_refused(site: Path) -> None:
    """B41, https://github.com/simonw/llm/pull/1351"""
    install_brick(site)
    (site / "other_brick.py").write_text("", encoding="utf-8")
    install(site, "other-brick", "1.0", {"brick": "other_brick"})
    importlib.invalidate_caches()
    with pytest.raises(dlo.BackendError, match=r"several distributions.*dlo-brick 7\.5") as caught:
        dlo.offload(make_toy(N), device="brick")
    assert "other-brick 1.0" in str(caught.value)
    both = [each for each in registry.installed() if each.name == "brick"]
    assert [each.reason for each in both] == [str(caught.value)] * 2


def test_a_distribution_that_is_on_the_path_twice_counts_once(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_brick(site)
    again = site.parent / "again"
    shutil.copytree(site, again)
    monkeypatch.syspath_prepend(str(again))
    model = make_toy(N)
    reference = twin(model)
    dlo.offload(model, device="brick")
    assert torch.equal(model(inputs()), reference(inputs()))


# --- broken plug-ins ------------------------------------------------------------------------------

# A module's text, where the entry point points (None: at the module), words of the reason.
BROKEN: dict[str, tuple[str, str | None, str]] = {
    "absent": ("", "nowhere_at_all", "ModuleNotFoundError.*nowhere_at_all"),
    "importerror": ("import a_library_that_is_not_there", None, "a_library_that_is_not_there"),
    "oserror": ("raise OSError('libbroken.so: no such file')", None, "OSError: libbroken.so"),
    "syntax": ("def broken(:\n    pass\n", None, "SyntaxError"),
    "exits": ("import sys\nsys.exit(3)", None, "SystemExit"),
    "attribute": ("x = 1", "dlo_broken_attribute:plugin", "AttributeError.*plugin"),
    "unmarked": ("def dlo_backend(device):\n    return None\n", None, "marked with"),
    "nothing": ("{mark}\ndef dlo_backend(device):\n    return None\n", None, "gave None"),
    "nonsense": ("{mark}\ndef dlo_backend(device):\n    return 5\n", None, "gave 5"),
    "raises": (
        "{mark}\ndef dlo_backend(device):\n    raise KeyError('driver')\n",
        None,
        "KeyError: 'driver'",
    ),
    "arguments": ("{mark}\ndef dlo_backend(thing):\n    return None\n", None, "thing"),
    "hook": ("{mark}\ndef dlo_backends(device):\n    return None\n", None, "dlo_backends"),
    "reason": (
        "from dlo_core import BackendError\n{mark}\ndef dlo_backend(device):\n"
        "    raise BackendError('the brick fell down')\n",
        None,
        "the brick fell down",
    ),
}
MARK = "from dlo_core import hookimpl\n\n\n@hookimpl"


def install_broken(folder: Path) -> None:
    for name, (text, target, _) in BROKEN.items():
        module = f"dlo_broken_{name}"
        (folder / f"{module}.py").write_text(text.replace("{mark}", MARK), encoding="utf-8")
        install(folder, f"broken-{name}", "0.1", {name: target or module})


def test_broken_plug_ins_leave_the_others_usable_and_keep_their_reasons(site: Path) -> None:
    """pluggy alone would stop at the first one.

    B41, https://github.com/simonw/llm/pull/1351
    """
    install_broken(site)
    install_brick(site)
    importlib.invalidate_caches()
    found = {each.name: each for each in registry.installed()}
    assert {*BROKEN, "brick"} <= found.keys()
    for name, (_, _, words) in BROKEN.items():
        assert found[name].backend is None
        reason = found[name].reason
        assert reason is not None
        assert_says(reason, words)
        with pytest.raises(dlo.BackendError) as caught:
            registry.get_backend(name)
        assert_says(str(caught.value), words)
    assert found["brick"].reason is None
    model = make_toy(N)
    reference = twin(model)
    dlo.offload(model, device="brick")
    assert torch.equal(model(inputs()), reference(inputs()))


def assert_says(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        raise ValueError(text)


# --- the command line -----------------------------------------------------------------------------


def test_dlo_info_shows_every_plug_in_and_why_not(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B41, https://github.com/simonw/llm/pull/1351"""
    install_broken(site)
    install_brick(site)
    importlib.invalidate_caches()
    monkeypatch.setenv("COLUMNS", "300")
    shown = CliRunner().invoke(cli.app, ["info"])
    assert shown.exit_code == 0, shown.output
    for word in (*BROKEN, "brick", "dlo-brick 7.5", "libbroken.so", "host memory", "torch"):
        assert word in shown.output
    asked = CliRunner().invoke(cli.app, ["info", "--json"])
    assert asked.exit_code == 0
    facts: Any = json.loads(asked.output)
    backends = {each["name"]: each for each in facts["backends"]}
    assert backends["brick"] | {"memory": None} == {
        "name": "brick",
        "distribution": "dlo-brick 7.5",
        "usable": True,
        "reason": None,
        "device": "cpu",
        "comm_library": "gloo",
        "pinned_memory": False,
        "settings": {},
        "memory": None,
    }
    for name in BROKEN:
        assert backends[name]["usable"] is False
        assert backends[name]["reason"]
    assert facts["torch"] == torch.__version__


def test_dlo_tells_its_version() -> None:
    told = CliRunner().invoke(cli.app, ["--version"])
    assert told.exit_code == 0
    assert told.output == f"dlo {dlo.__version__}\n"


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    paths = [entry for entry in sys.path if entry]
    return subprocess.run(
        [sys.executable, *arguments, *(["-c", textwrap.dedent(code)] if code else [])],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ":".join(paths), "PYTHONSAFEPATH": "1", "PATH": ""},
    )


def test_the_package_is_the_command() -> None:
    done = python("", "-m", "dlo_core", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"dlo {dlo.__version__}\n"


# --- the core is quiet, and names no vendor -------------------------------------------------------


def test_importing_dlo_starts_nothing_and_a_forked_child_can_offload() -> None:
    """No thread, no device, no plug-in; then fork, and all works in the child.

    B43, https://github.com/pytorch/pytorch/pull/145752
    """
    done = python(
        """
        import os, sys, threading
        import dlo_core as dlo
        dlo.OffloadConfig(depth=3)
        assert threading.active_count() == 1, threading.enumerate()
        import torch
        assert not torch.cuda.is_initialized()
        assert not {"dlo_cuda", "dlo_ascend", "torch_npu"} & sys.modules.keys()
        from dlo_core import registry
        registry.installed()
        assert threading.active_count() == 1, threading.enumerate()
        assert not torch.cuda.is_initialized()
        torch.set_num_threads(1)
        child = os.fork()
        if child == 0:
            from dlo_core.cpu import CpuBackend
            from toys import inputs, make_toy
            model, reference = make_toy(4), make_toy(4)
            dlo.offload(model, device=CpuBackend())
            for seed in range(3):
                assert torch.equal(model(inputs(seed)), reference(inputs(seed)))
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        """
    )
    assert done.returncode == 0, done.stderr


def code_of(source: str) -> str:
    """Return the tokens of a module without comments and strings, one space between."""
    skipped = (tokenize.COMMENT, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return " ".join(token.string for token in tokens if token.type not in skipped)


VENDOR = (
    "torch . cuda",
    "torch . npu",
    "torch_npu",
    "dlo_cuda",
    "dlo_ascend",
    ". is_cuda",
    ". cuda (",
)


def test_the_core_names_no_vendor() -> None:
    """B42, https://github.com/vllm-project/vllm-omni/pull/1492"""
    files = sorted(Path(dlo.__file__).parent.rglob("*.py"))
    assert len(files) > 30
    for file in files:
        code = code_of(file.read_text(encoding="utf-8"))
        assert not [name for name in VENDOR if name in code], file


def test_the_search_for_vendors_finds_one() -> None:
    assert "torch . cuda" in code_of("x = 1\nif torch.cuda.is_available():  # torch\n    pass\n")
    assert "cuda" not in code_of('"""Uses torch.cuda."""\nx = "torch.cuda"  # torch.cuda\n')


class Forbidden:
    """Raises on any use."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"torch.cuda.{name} was asked for")


def test_the_core_runs_where_torch_cuda_must_not_be_touched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """B42, https://github.com/vllm-project/vllm-omni/pull/1492"""
    model = make_toy(N)
    reference, before = twin(model), snapshot(model)
    x = inputs()
    monkeypatch.setattr(torch, "cuda", Forbidden())
    offloaded = dlo.offload(model, device=PoisonBackend())
    for _ in range(3):
        assert torch.equal(model(x), reference(x))
    offloaded.stats()
    offloaded.disable()
    assert_restored(model, before)
