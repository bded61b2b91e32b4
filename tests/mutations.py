"""Mutations: copies of ``dlo_core.transfer`` with one wait or one record of an event taken out."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from dataclasses import dataclass

from dlo_core import transfer

__all__ = [
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

ORDERING = ("wait_event", "record_event")
WAIT_ON_RESIDENT = "Transfer._wait_for_load: stream.wait_event(slot.filled)"
PACKED = "DecodedHome"
REUSED_MEMORY = "Transfer.load: self._backend.current_stream().record_event(slot.drained)"
# What orders the blocks that stay; test_residents.py shows the need of both.
RESIDENTS = (WAIT_ON_RESIDENT, REUSED_MEMORY)


@dataclass(frozen=True, slots=True)
class Site:
    """One call in ``transfer.py`` that orders something.

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
    every = tuple(site for site, _ in _find(_tree()))
    return tuple(site for site in every if not site.owner.startswith(PACKED))


def packed_sites() -> tuple[Site, ...]:
    """Return the statements that only packed weights need."""
    return tuple(site for site, _ in _find(_tree()) if site.owner.startswith(PACKED))


def mutant(number: int) -> types.ModuleType:
    """Return a copy of the module without the statement of site ``number``."""
    tree = _tree()
    for site, statement in _find(tree):
        if site.number == number:
            _replace(tree, statement)
    module = types.ModuleType(f"transfer_without_{number}")
    module.__file__ = transfer.__file__
    sys.modules[module.__name__] = module
    code = compile(ast.fix_missing_locations(tree), transfer.__file__ or "transfer.py", "exec")
    exec(code, module.__dict__)
    return module


def _tree() -> ast.Module:
    return ast.parse(inspect.getsource(transfer))


def _find(tree: ast.Module) -> list[tuple[Site, ast.stmt]]:
    found: list[tuple[Site, ast.stmt]] = []
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
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
