"""Ranks, from the testing kit."""

from __future__ import annotations

from dlo_core.testing.ranks import RanksError, run_ranks

__all__ = ["RanksError", "run_ranks"]
