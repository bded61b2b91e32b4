"""A program: the engine under torch_npu's race detector, whole or with one wait taken out.

usage: TORCH_NPU_SANITIZER=1 python ascend_sanitizer.py WAY SIZE SITE...

For each SITE (a number of ``mutations.sites()``, or -1 for the engine as it is) one line of JSON:
what every rank met. A rank ends at the first race that the detector reports.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from typing import Any

import torch
import torch.cuda._sanitizer as csan
import torch.distributed as dist
from ascend import build, inputs_of, npu
from mutations import mutant
from ranks import RanksError, run_ranks

import dlo_core as dlo
from dlo_core import engine as engine_module

TRANSFERS = ("LocalTransfer", "StagedTransfer", "InPlaceTransfer")
RACE_EXIT = 77
WAYS: dict[str, dict[str, Any]] = {
    "staged": {"use_allgather": True, "stages": 2},
    "in place": {"use_allgather": True, "stages": 0},
    "local": {"use_allgather": False},
    # Each forward on a compute stream of its own, and some of them read one fill.
    "several streams": {"use_allgather": False},
}
# The blocks that each forward leaves out: such a fill is computed by nobody.
SKIPS: list[tuple[int, ...]] = [(), (1, 3), (), ()]
REBINDS: list[tuple[int, ...]] = [(), (0, 1), (), (0, 1), ()]


class Race(csan.CUDASanitizerErrors):
    """Ends the process: what comes after a race is worth nothing."""

    def __init__(self, errors: Any) -> None:
        os._exit(RACE_EXIT)


def plant(site: int) -> None:
    """Let the engine use transfers without one of their waits."""
    module = mutant(site)
    for name in TRANSFERS:
        setattr(engine_module, name, getattr(module, name))


def run(rank: int, way: str, site: int) -> str:
    """Run a few passes on this rank; return what is wrong, or nothing."""
    csan.CUDASanitizerErrors = Race  # type: ignore[misc]
    if site >= 0:
        plant(site)
    # The detector looks at the current device's stream, whatever device a tensor is on.
    torch.accelerator.set_device_index(rank)
    backend = npu(rank)
    several = way == "several streams"
    model = build(3 if several else 5, "bf16")
    resident = copy.deepcopy(model).to(backend.device)
    x = inputs_of(model, backend.device)
    backend.synchronize()
    group = dist.group.WORLD
    offloaded = dlo.offload(model, device=backend, group=group, timeout_s=20, **WAYS[way])
    outs = []
    skips = REBINDS if several else SKIPS
    with torch.inference_mode():
        for skip in skips:
            stream = backend.new_stream() if several else backend.current_stream()
            with backend.stream(stream):
                outs.append(model(x, skip=skip))
        backend.synchronize()
        wanted = [resident(x, skip=skip) for skip in skips]
    right = [torch.equal(a.cpu(), b.cpu()) for a, b in zip(outs, wanted, strict=True)]
    offloaded.shutdown()
    return "" if all(right) else "wrong bits"


def main() -> None:
    """Run every site."""
    way, size, sites = sys.argv[1], int(sys.argv[2]), [int(number) for number in sys.argv[3:]]
    for site in sites:
        try:
            found = run_ranks(run, size, way, site, limit_s=30.0)
        except RanksError as error:
            found = [error.errors.get(rank, "").strip() for rank in range(size)]
            race = f"(exit code {RACE_EXIT})"
            found = ["race" if race in text else text.rpartition("\n")[2] for text in found]
        print(json.dumps({"site": site, "found": found}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
