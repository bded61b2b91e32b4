"""The tool that makes the table of docs/parallelism.md: what it refuses, and what it notices."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from parallel_cells import CELLS, Cell, cell_id

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what the tool reads."""
    for name in ("tools/parallel_table.py", "docs/parallelism.md", "tests/parallel_cells.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def report(checkout: Path, cells: list[Cell], bad: str = "") -> Path:
    """Write a JUnit report of ``cells``, in which one test may have failed."""
    cases = []
    for cell in cells:
        found = {"host": (10, 10), "device": (20, 21)} if cell.shares else None
        row = {
            "name": cell.name,
            "use_allgather": cell.use_allgather,
            "shares": cell.shares,
            "rejected": cell.rejected,
            "found": found,
        }
        value = quoteattr(json.dumps(row))
        inside = f'<properties><property name="cell" value={value}/></properties>'
        if cell_id(cell) == bad:
            inside += "<failure/>"
        name = f"test_it[{cell_id(cell)}]"
        cases.append(f'<testcase classname="tests.test_some" name="{name}">{inside}</testcase>')
    path = checkout / "report.xml"
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    return path


def run(checkout: Path, *arguments: object) -> tuple[int, str]:
    command = [sys.executable, checkout / "tools" / "parallel_table.py", *arguments]
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_table_is_written_from_the_report_and_a_stale_one_is_noticed(checkout: Path) -> None:
    page = checkout / "docs" / "parallelism.md"
    full = report(checkout, CELLS)
    before = page.read_text()
    assert run(checkout, "--check", full)[0] == 1
    assert page.read_text() == before
    assert run(checkout, full)[0] == 0
    row = "| DP2 | our DiT | yes | shared by 2 | 10, 10 | 20, 21 | `test_some[DP2-gather]` |"
    assert row in page.read_text()
    assert run(checkout, "--check", full)[0] == 0


@pytest.mark.slow
def test_a_cell_that_failed_or_did_not_run_is_named(checkout: Path) -> None:
    """Whatever the page says."""
    part = report(checkout, CELLS[1:])
    code, said = run(checkout, part)
    assert code == 1
    assert "the cell DP2-gather did not run" in said
    code, said = run(checkout, report(checkout, CELLS, bad="SP4-gather"))
    assert code == 1
    assert "test_some::test_it[SP4-gather] did not pass" in said
