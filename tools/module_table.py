"""Write the table of dlo_core's modules in CONTRIBUTING.md, or check that it is current.

usage: module_table.py [--check]

The order is that of the contract in pyproject.toml, from the top down; what is said of a module is
the first line of its docstring.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- modules: begin (tools/module_table.py) -->\n", "<!-- modules: end -->\n"
# Not in the contract: it is no room.
UNRANKED = {"__init__", "__main__"}


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Return the modules and packages of dlo_core by name, with the file that holds the docstring.

    Args:
        root: Of the repository.
    """
    core = root / "dlo_core"
    found = {path.stem: path for path in core.glob("*.py")}
    found |= {path.parent.name: path for path in core.glob("*/__init__.py")}
    return {name: path for name, path in found.items() if name not in UNRANKED}


def order(root: Path = ROOT) -> list[str]:
    """Return the names in the order of the contract."""
    # Read as text: Python 3.10 has no reader of TOML.
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r"^layers = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert match is not None
    return re.findall(r"\((\w+)\)", match[1])


def table(root: Path = ROOT) -> str:
    """Return the table.

    Raises:
        SystemExit: A module has no docstring or no place in the contract.
    """
    found, rows = modules(root), []
    ranked = order(root)
    if strays := sorted(set(found) - set(ranked)):
        raise SystemExit(f"not in the layers of pyproject.toml: {', '.join(strays)}")
    for name in ranked:
        if name not in found:
            continue
        path = found[name]
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if not said:
            raise SystemExit(f"{path} has no docstring")
        label = f"`{name}/`" if path.name == "__init__.py" else f"`{name}`"
        line = said.partition("\n")[0].rstrip(".").replace("|", "\\|").replace("``", "`")
        rows.append(f"| {label} | {line} |\n")
    return "| module | what it is |\n|---|---|\n" + "".join(rows)


def page(root: Path = ROOT) -> tuple[str, str]:
    """Return CONTRIBUTING.md as it is, and as it should be."""
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return text, before + BEGIN + table(root) + END + after


def main(arguments: list[str]) -> int:
    """Write or check; return the exit status."""
    text, wanted = page()
    if arguments == ["--check"]:
        if text != wanted:
            print("the modules in CONTRIBUTING.md: run python tools/module_table.py")
        return int(text != wanted)
    if arguments:
        raise SystemExit(__doc__)
    (ROOT / "CONTRIBUTING.md").write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
