"""Write the compatibility table of docs/parallelism.md from the tests that ran.

The tests put what they measured into pytest's JUnit report (``--junitxml``). Without ``--check``
the table in the page is replaced; with it the page is only compared, and the status is 1 when it
would change. A cell of the matrix that did not run, or did not pass, is a failure either way.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "parallelism.md"
BEGIN = "<!-- The table is made by tools/parallel_table.py from the tests that ran. -->\n"
END = "<!-- End of the table. -->\n"
HEAD = (
    "| topology | model | `use_allgather` | weights | host bytes a rank: predicted, measured "
    "| device bytes a rank: predicted, measured | test |\n|---|---|---|---|---|---|---|\n"
)

Row = dict[str, object]


def read_report(path: Path) -> tuple[list[Row], list[str]]:
    """Return the cells of a JUnit report, in its order, and the tests that did not pass."""
    rows: list[Row] = []
    failed: list[str] = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        if any(case.find(kind) is not None for kind in ("failure", "error", "skipped")):
            failed.append(name)
        for found in case.iter("property"):
            if found.get("name") == "cell":
                rows.append(json.loads(found.get("value") or "") | {"test": name})
    return rows, failed


def missing_cells(rows: list[Row]) -> list[str]:
    """Return the cells of tests/parallel_cells.py that are not among ``rows``."""
    sys.path.insert(0, str(ROOT / "tests"))
    from parallel_cells import CELLS, cell_id

    there = {(row["name"], row["use_allgather"]) for row in rows if "model" not in row}
    return [cell_id(c) for c in CELLS if (c.name, c.use_allgather) not in there]


def line(row: Row) -> str:
    """Return one row of the table."""
    test = str(row["test"])
    short = f"`{test.partition('::')[0]}[{test.partition('[')[2]}`"
    mode = "yes" if row["use_allgather"] else "no"
    start = f"| {row['name']} | {row.get('model', 'our DiT')} | {mode} |"
    if row["rejected"]:
        return f"{start} rejected: {row['rejected']} | | | {short} |\n"
    shares = row["shares"]
    how = "rank-local" if shares == 1 else f"shared by {shares}"
    found = row["found"]
    assert isinstance(found, dict)
    host, device = (", ".join(f"{n:,}" for n in found[kind]) for kind in ("host", "device"))
    return f"{start} {how} | {host} | {device} | {short} |\n"


def main() -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reports", nargs="+", type=Path, help="JUnit reports of the tests")
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    args = parser.parse_args()
    rows: list[Row] = []
    problems: list[str] = []
    for report in args.reports:
        found, failed = read_report(report)
        rows += found
        problems += [f"{name} did not pass" for name in failed]
    problems += [f"the cell {name} did not run" for name in missing_cells(rows)]
    if problems:
        print("\n".join(problems))
        return 1
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    wanted = before + BEGIN + "\n" + HEAD + "".join(map(line, rows)) + "\n" + END + after
    if wanted == text:
        print(f"the table of {len(rows)} cells in {PAGE.name} is current")
        return 0
    if args.check:
        print(f"the table in {PAGE.name} is not what the tests gave; run this without --check")
        return 1
    PAGE.write_text(wanted)
    print(f"wrote {len(rows)} cells to {PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
