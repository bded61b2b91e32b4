"""Turns: resident blocks, the resident model and the link, one after the other, again and again."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from checks import Findings, Options

__all__ = ["turns"]

_ROUNDS = 5
_LIMITS = {4096: 1.015, 10240: 1.025}


def turns(options: Options, found: Findings) -> None:
    """Keep 10, 20 and 28 of 40 blocks: passes, and replays of a captured pass, at two lengths.

    Machines change their speed by a percent within minutes, so here each figure is of steps that
    took turns with those that it is compared with.
    """
    options.need_cuda()
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import Shape, build, inputs

    shape = Shape(64, 4, 6) if options.small else Shape(3072, 24, 40)
    counts = (1, 2) if options.small else (10, 20, 28)
    resident = build(shape, options.device)
    num = len(resident.blocks)
    nbytes = sum(each.nbytes for each in resident.blocks.parameters())
    device = torch.device(options.device)
    pinned = torch.empty(nbytes // num, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    with torch.inference_mode():
        for count in counts:
            model = build(shape)
            offloaded = dlo.offload(
                model, device=options.device, resident_layers=count, packed=False
            )
            for tokens, limit in _LIMITS.items():
                args = inputs(shape, tokens // (128 if options.small else 1), device)
                replay = offloaded.capture(model, *args)
                wanted = resident(*args)
                same = torch.equal(model(*args), wanted) and torch.equal(replay(*args), wanted)
                found.true(f"same bits, {count} residents, {tokens} tokens", same)
                rows = [
                    (
                        _step_ms(there.copy_, (pinned, True), 6) * (num - count),
                        *(_step_ms(call, args, 4) for call in (resident, model, replay)),
                    )
                    for _ in range(_ROUNDS)
                ]
                found.note(**{f"link, resident, pass, replay; {count}, {tokens}": rows})
                for name, place in (("pass", 2), ("replay", 3)):
                    ratio = statistics.median(row[place] / max(row[:2]) for row in rows)
                    what = f"{name} / limit of its round, {count} residents, {tokens} tokens"
                    found.at_most(what, ratio, 1000.0 if options.small else limit)
            del replay
            offloaded.shutdown()


def _step_ms(call: Callable[..., Any], args: tuple[Any, ...], num: int) -> float:
    """Return the median milliseconds of a call behind another one."""
    import torch

    marks: list[Any] = []
    for _ in range(num):
        call(*args)
        marks.append(torch.cuda.Event(enable_timing=True))
        marks[-1].record()
    torch.cuda.synchronize()
    return float(statistics.median(a.elapsed_time(b) for a, b in pairwise(marks)))
