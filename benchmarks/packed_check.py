#!/usr/bin/env python3
"""One command for a machine with a GPU: are packed weights right there, and are they faster?

As ``gpu_check.py``: a process and a time limit for each section, findings as they come.

    python benchmarks/packed_check.py --out packed_check.json --budget 560
    python benchmarks/packed_check.py --device cpu --small        to see that it works
"""

from __future__ import annotations

import sys

import check_packed_codec
import check_packed_steps
from gpu_check import Sections, parse, run_all, run_section

# In the order of what one wants to know first, each with its limit in seconds.
SECTIONS: Sections = {
    "bits": (check_packed_codec.bits, 90),
    "rates": (check_packed_codec.rates, 90),
    "steps": (check_packed_steps.steps, 240),
    "products": (check_packed_steps.products, 240),
    "auto": (check_packed_steps.auto, 240),
    "default": (check_packed_steps.default, 120),
    "damage": (check_packed_codec.damage, 60),
}


if __name__ == "__main__":
    given = parse(__doc__, SECTIONS, out="packed_check.json")
    sys.exit(
        run_section(given, SECTIONS) if given.run else run_all(given, SECTIONS, script=__file__)
    )
