"""The backend that was written from docs/backends.md alone passes the conformance suite."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).resolve().parent.parent / "examples" / "paper_backend"


def test_it_is_short() -> None:
    assert len((PAPER / "dlo_paper.py").read_text(encoding="utf-8").splitlines()) < 150


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_passes_the_suite_on_two_devices(tmp_path: Path) -> None:
    (tmp_path / "dlo_paper.py").write_bytes((PAPER / "dlo_paper.py").read_bytes())
    (tmp_path / "test_paper.py").write_bytes((PAPER / "test_paper.py").read_bytes())
    info = tmp_path / "dlo_paper-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dlo-paper\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[dlo]\npaper = dlo_paper\n")
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "dlo_core.testing.pytest_plugin"),
            *("-p", "no:cacheprovider", "--require", "paper:1", "test_paper.py"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " failed" not in ran.stdout
    assert int(ran.stdout.rsplit(" passed", 1)[0].split()[-1]) > 150
