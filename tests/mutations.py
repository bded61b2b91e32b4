"""Mutations: copies of the transfers with one wait or one record of an event taken out."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from dataclasses import dataclass

from dlo_core import decoded_home, gather_transfer, transfer

__all__ = [
    "MODULES",
    "ORDERING",
    "PACKED",
    "RESIDENTS",
    "REUSED_MEMORY",
    "WAIT_ON_RESIDENT",
    "Site",
    "mutant",
    "packed_sites",
    "sites",
]

# Whatever orders something is in one of them; each uses those before it.
MODULES = (decoded_home, transfer, gather_transfer)
ORDERING = ("wait_event", "record_event")
WAIT_ON_RESIDENT = "Transfer._wait_for_load: stream.wait_event(slot.filled)"
PACKED = "DecodedHome"
REUSED_MEMORY = "Transfer.load: self._backend.current_stream().record_event(slot.drained)"
# What orders the blocks that stay; test_residents.py shows the need of both.
RESIDENTS = (WAIT_ON_RESIDENT, REUSED_MEMORY)


@dataclass(frozen=True, slots=True)
class Site:
    """One call in one of ``MODULES`` that orders something.

    Attributes:
        owner: ``Class.method``.
        text: The statement.
        number: Among all sites.
    """

    owner: str
    text: str
    number: int

    def __str__(self) -> str:
        """Name it for a test."""
        return f"{self.owner}: {self.text}"

    @property
    def timing_only(self) -> bool:
        """Whether it records an event for the times or the watch, which orders nothing."""
        return "times." in self.text or "_done[" in self.text or self.owner == "Transfer.mark"

    @property
    def of_graphs(self) -> bool:
        """Whether it orders graphs and passes, whose cases are in test_capture.py."""
        methods = ("fork", "join", "before_graph", "after_graph")
        return self.owner.partition(".")[2] in methods


def sites() -> tuple[Site, ...]:
    """Return every ``wait_event`` and ``record_event`` statement, from the source itself.

    Without those that only packed weights need.
    """
    every = tuple(site for site, _ in _find(_trees()))
    return tuple(site for site in every if not site.owner.startswith(PACKED))


def packed_sites() -> tuple[Site, ...]:
    """Return the statements that only packed weights need."""
    return tuple(site for site, _ in _find(_trees()) if site.owner.startswith(PACKED))


def mutant(number: int) -> types.ModuleType:
    """Return a module with what is in ``MODULES``, without the statement of site ``number``."""
    trees = _trees()
    for site, statement in _find(trees):
        if site.number == number:
            for tree in trees:
                _replace(tree, statement)
    made = types.ModuleType(f"transfer_without_{number}")
    sys.modules[made.__name__] = made
    for module, tree in zip(MODULES, trees, strict=True):
        # What one of them uses of another one it finds in the copy.
        tree.body = [node for node in tree.body if not _imports(node)]
        made.__file__ = module.__file__
        code = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec")
        exec(code, made.__dict__)
    return made


def _trees() -> list[ast.Module]:
    return [ast.parse(inspect.getsource(module)) for module in MODULES]


def _imports(node: ast.stmt) -> bool:
    names = {module.__name__ for module in MODULES}
    return isinstance(node, ast.ImportFrom) and node.module in names


def _find(trees: list[ast.Module]) -> list[tuple[Site, ast.stmt]]:
    found: list[tuple[Site, ast.stmt]] = []
    nodes = [node for tree in trees for node in tree.body]
    for cls in (node for node in nodes if isinstance(node, ast.ClassDef)):
        for method in (node for node in cls.body if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(method):
                if isinstance(node, ast.Expr) and _orders(node.value):
                    site = Site(f"{cls.name}.{method.name}", ast.unparse(node), len(found))
                    found.append((site, node))
    return found


def _orders(value: ast.expr) -> bool:
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr in ORDERING
    )


def _replace(tree: ast.Module, statement: ast.stmt) -> None:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and statement in block:
                block[block.index(statement)] = ast.Pass()
