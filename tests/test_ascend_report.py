"""The command with which a user verifies the Ascend backend: what it runs, and what it writes."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ascend import needs_stub

if TYPE_CHECKING:
    from types import ModuleType

SCRIPT = Path(__file__).parent.parent / "tools" / "ascend_report.py"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("ascend_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "ascend_report", module)
    spec.loader.exec_module(module)
    return module


def python(tool: Any, name: str, code: str, **how: Any) -> Any:
    return tool.Part(name, [sys.executable, "-c", code], **how)


def test_a_part_that_fails_or_hangs_is_told_and_the_others_run(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The grandchild holds the pipe of the one that hangs.
    hangs = (
        "import subprocess, sys, time\n"
        "print('begun', flush=True)\n"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    )
    todo = [
        tool.Part("absent", ["no-such-program"], needed=False),
        python(tool, "good", "print('fine')"),
        python(tool, "bad", "print('broken'); raise SystemExit(3)"),
        python(tool, "hanging", hangs, limit_s=4.0),
        python(tool, "slack", "raise SystemExit(4)", needed=False),
    ]
    monkeypatch.setattr(tool, "parts", lambda small, pytest_arguments: todo)
    out = tmp_path / "report.txt"
    began = time.monotonic()
    assert tool.main(["--out", str(out)]) == 1
    assert time.monotonic() - began < 30
    report = out.read_text(encoding="utf-8")
    for words in (
        "=== absent: there is no no-such-program",
        "=== good: ok",
        "fine",
        "=== bad: exit status 3",
        "broken",
        "=== hanging: not done after 4 s",
        "begun",
        "=== slack: exit status 4",
        "=== FAILED: bad (exit status 3); hanging (not done after 4 s)\n",
    ):
        assert words in report
    assert "FAILED: bad" in capsys.readouterr().out


def test_an_interrupt_ends_the_part_that_runs_and_its_ranks(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int] = []

    class Interrupted(subprocess.Popen[str]):
        def communicate(self, *args: Any, **how: Any) -> Any:
            assert self.stdout is not None
            pids.append(int(self.stdout.readline()))
            raise KeyboardInterrupt

    monkeypatch.setattr(tool.subprocess, "Popen", Interrupted)
    # The grandchild says who it is and would stay.
    rank = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    with pytest.raises(KeyboardInterrupt):
        tool.run(python(tool, "hanging", code))
    (pid,) = pids
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_a_report_is_good_only_when_all_that_is_needed_went_well(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = [tool.Part("absent", ["no-such-program"], needed=False), python(tool, "good", "")]
    monkeypatch.setattr(tool, "parts", lambda small, pytest_arguments: todo)
    assert tool.main(["--out", str(tmp_path / "report.txt")]) == 0
    assert (tmp_path / "report.txt").read_text(encoding="utf-8").endswith("=== all passed\n")


def test_the_tests_that_it_names_are_there(tool: Any) -> None:
    assert [name for name in tool.TESTS if not (SCRIPT.parent.parent / name).exists()] == []
    whole = {part.name for part in tool.parts(small=False, pytest_arguments=[])}
    assert whole >= {"info", "tests", "demo", "probe", "bench, rank-local", "bench, two ranks"}


@needs_stub
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("count", "verdict"), [(2, "all passed"), (0, "FAILED: tests")])
def test_it_runs_to_its_end_on_the_stand_in(count: int, verdict: str, tmp_path: Path) -> None:
    out = tmp_path / "report.txt"
    done = subprocess.run(
        [
            *(sys.executable, str(SCRIPT), "--small", "--out", str(out)),
            *("--", "-k", "keeps_what_is_written or locked_memory"),
        ],
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
        env={**os.environ, "DLO_STUB_NPU_COUNT": str(count)},
    )
    report = out.read_text(encoding="utf-8")
    assert done.returncode == (0 if count else 1), report[-4000:]
    assert f"=== {verdict}" in report
    assert f"DLO_STUB_NPU_COUNT={count}" in report
    if count:
        assert " 3 passed" in report
    else:
        assert "torch_npu sees no NPU" in report
