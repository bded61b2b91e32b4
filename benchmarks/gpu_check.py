#!/usr/bin/env python3
"""One command for a machine with a GPU: is dlo right there, and is it at the limits?

Every section runs in a process of its own with a time limit, so none can take another one down;
what it found so far is kept when it is killed. The findings are printed and written as they come.
Where dlo is not installed, the clone around this file is used.

    python benchmarks/gpu_check.py --out gpu_check.json --budget 560
    python benchmarks/gpu_check.py --sections pinned,equal
    python benchmarks/gpu_check.py --device cpu --small          to see that it works
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import check_host
import check_memory
import check_order
import check_start
import check_steps
import check_turns
from checkout import use_checkout
from checks import Findings, Options, Skip
from child import answer, end_with_parent, keep, machine, run_child

if TYPE_CHECKING:
    from collections.abc import Callable

use_checkout()

Sections = dict[str, tuple["Callable[[Options, Findings], None]", float]]
_LINES = 20
# In the order of what one wants to know first, each with its limit in seconds.
SECTIONS: Sections = {
    "grow": (check_start.grow, 60),
    "parts": (check_start.parts, 60),
    "pinned": (check_memory.pinned, 60),
    "bits": (check_order.bits, 90),
    "equal": (check_steps.equal, 150),
    "unequal": (check_steps.unequal, 120),
    "rates": (check_start.rates, 120),
    "flat": (check_memory.flat, 60),
    "sync": (check_order.sync, 60),
    "host": (check_host.host, 90),
    "residents": (check_steps.residents, 240),
    "turns": (check_turns.turns, 240),
    "stages": (check_memory.stages, 60),
    "nccl": (check_order.nccl, 120),
    "compiled": (check_order.compiled, 120),
    "graph": (check_order.graph, 60),
    "context": (check_memory.context, 40),
    "sanitizer": (check_order.sanitizer, 60),
}


def run_section(options: argparse.Namespace, sections: Sections) -> int:
    """Run one section in this process and hand over what it finds."""
    end_with_parent()
    made = Options(
        device=options.device,
        small=options.small,
        limit_s=options.limit,
        save=lambda found: answer(options.answer, found),
    )
    found = Findings(made)
    try:
        sections[options.run][0](made, found)
    except Skip as skip:
        answer(options.answer, found.to_dict() | {"skipped": str(skip)})
        return 0
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        answer(options.answer, found.to_dict() | {"error": text[:2000]})
        return 1
    answer(options.answer, found.to_dict() | {"complete": True})
    return 0


def run_all(options: argparse.Namespace, sections: Sections, *, script: str) -> int:
    """Run every section within the budget; return 0 when all that ran is in order."""
    deadline = time.monotonic() + options.budget
    results: dict[str, Any] = {"machine": machine(options.device), "sections": {}}
    print(json.dumps(results["machine"]), flush=True)

    def note(name: str, found: dict[str, Any]) -> None:
        results["sections"][name] = found
        keep(Path(options.out), json.dumps(results, indent=1))

    for name in options.sections:
        left = deadline - time.monotonic()
        if left < 15:
            note(name, {"skipped": "out of budget"})
        else:
            limit_s = min(sections[name][1], left)
            print(f"== {name} (at most {limit_s:.0f} s)", flush=True)
            passed_on = ["--device", options.device, *(["--small"] if options.small else [])]
            arguments = [*passed_on, "--run", name, "--limit", str(max(limit_s - 5, 5))]
            on_answer = partial(note, name)
            note(name, run_child(script, arguments, limit_s=limit_s, on_answer=on_answer))
        _show(name, results["sections"][name])
    verdicts = {name: verdict(found) for name, found in results["sections"].items()}
    print(json.dumps({"verdicts": verdicts}))
    return 1 if "failed" in verdicts.values() else 0


def verdict(found: dict[str, Any]) -> str:
    """Return ``"ok"``, ``"failed"`` or ``"skipped"``."""
    right = all(check["ok"] for check in found.get("checks", ()))
    if "skipped" in found:
        return "skipped" if right else "failed"
    ended = found.get("complete") and "error" not in found
    return "ok" if ended and right else "failed"


def _show(name: str, found: dict[str, Any]) -> None:
    for check in found.get("checks", ()):
        word = "ok  " if check["ok"] else "FAIL"
        print(f"  {word} {check['name']}: {check['value']} ({check['limit']})")
    if found.get("facts"):
        print(f"  facts: {json.dumps(_shortened(found['facts']))}")
    for key in ("skipped", "error", "log"):
        if key in found:
            print(f"  {key}: {found[key]}")
    print(f"  {name}: {verdict(found)}, {found.get('seconds', 0)} s", flush=True)


def _shortened(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts without long texts, which are in the file."""
    long = {name: value for name, value in facts.items() if isinstance(value, list)}
    said = {name: f"{len(text)} lines" for name, text in long.items() if len(text) > _LINES}
    return facts | said


def parse(about: str, sections: Sections, *, out: str) -> argparse.Namespace:
    """Return the options of a script that says ``about`` of itself."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu to try it")
    parser.add_argument("--small", action="store_true", help="models of a few megabytes")
    parser.add_argument("--out", default=out, help="file of the findings")
    parser.add_argument("--sections", default="", help=f"of: {', '.join(sections)}")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all sections")
    parser.add_argument("--run", choices=sections, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.sections = options.sections.split(",") if options.sections else [*sections]
    unknown = [name for name in options.sections if name not in sections]
    if unknown:
        parser.error(f"unknown sections {', '.join(unknown)}; known: {', '.join(sections)}")
    return options


if __name__ == "__main__":
    given = parse(__doc__, SECTIONS, out="gpu_check.json")
    sys.exit(
        run_section(given, SECTIONS) if given.run else run_all(given, SECTIONS, script=__file__)
    )
