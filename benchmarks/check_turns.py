"""Turns: resident blocks, the resident model and the link, one after the other, again and again.

[Note: places in a round]
A device that has rested for a moment is fast, then slow, then settles: on an H200 whoever came
first in a round was 2 per cent faster than its own mean, whoever came third 3 per cent slower. So
each contender is equally often in each place, and means over all rounds are compared; the ratio of
two steps of one round compares places.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import cycle, pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from checks import Findings, Options

    from dlo_core.interface import Backend

__all__ = ["Beside", "Rows", "streamed_bytes", "turns"]

# A multiple of the number of contenders: see [Note: places in a round].
_ROUNDS = 8
_LIMITS = {4096: 1.015, 10240: 1.025}


def turns(options: Options, found: Findings) -> None:
    """Keep 10, 20 and 28 of 40 blocks: passes, and replays of a captured pass, at two lengths.

    Machines change their speed by a percent within minutes, so here each figure is of steps that
    took turns with those that it is compared with. See [Note: places in a round].
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
            beside = Beside(resident, streamed_bytes(offloaded), offloaded.backend)
            for tokens, limit in _LIMITS.items():
                args = inputs(shape, tokens // (128 if options.small else 1), device)
                replay = offloaded.capture(model, *args)
                wanted = resident(*args)
                same = all(torch.equal(call(*args), wanted) for call in (model, replay, beside))
                found.true(f"same bits, {count} residents, {tokens} tokens", same)
                rows = Rows(num - count)
                calls: dict[str, Callable[..., Any]]
                calls = {"resident": resident, "beside": beside, "pass": model, "replay": replay}
                for turn in range(_ROUNDS):
                    rows.add(_step_ms(there.copy_, (pinned, True), 6), _round(calls, args, turn))
                found.note(**{f"ms; {count}, {tokens}": rows.ms})
                found.note(**{f"ratios; {count}, {tokens}": rows.ratios()})
                for name in ("pass", "replay"):
                    what = f"{name} / limit, {count} residents, {tokens} tokens"
                    found.at_most(what, rows.of_limit(name), 1000.0 if options.small else limit)
            # It has the pinned bytes.
            del replay, beside, calls
            offloaded.shutdown()


class Beside:
    """The floor of the hardware: a resident pass, and bare copies of what an offload would stream.

    Both begin together and the pass has ended when both have, so every pass has its own copies
    beside it, no more and no fewer. In between nothing waits for the other: no block for its
    weights, no copy for a buffer. What such a pass takes longer than the limit is what copies and
    computation take from each other.
    """

    def __init__(
        self, model: Callable[..., Any], sources: Sequence[torch.Tensor], backend: Backend
    ) -> None:
        """Make two buffers and a stream.

        Args:
            model: The resident model.
            sources: Bytes in pinned memory, a tensor for each copy.
            backend: Copies them, and knows where one must be cut.
        """
        self._model = model
        self._sources = sources
        self._backend = backend
        most = max(each.numel() for each in sources)
        self._buffers = [backend.empty(most) for _ in range(2)]
        self._side = backend.new_stream()
        self._began, self._ended = backend.new_event(), backend.new_event()

    def __call__(self, *args: Any) -> Any:
        """Queue a pass and its copies, behind those before."""
        current, side = self._backend.current_stream(), self._side
        current.wait_event(self._ended)
        current.record_event(self._began)
        with self._backend.stream(side):
            side.wait_event(self._began)
            for buffer, source in zip(cycle(self._buffers), self._sources):
                self._backend.copy(buffer[: source.numel()], source)
            side.record_event(self._ended)
        return self._model(*args)


def streamed_bytes(offloaded: Any) -> list[torch.Tensor]:
    """Return the pinned bytes of the blocks that stream, in their order."""
    engine = offloaded._engine
    stay = engine.pool.residents
    return [
        part
        for number, block in enumerate(engine.transfer._blocks)
        if number not in stay
        for _, part in block.parts
    ]


@dataclass
class Rows:
    """Milliseconds of steps that took turns.

    Attributes:
        copies: How often the link's time of one block is needed in a pass.
        ms: Of each contender, and of the link, a figure a round.
    """

    copies: int

    def __post_init__(self) -> None:
        self.ms: dict[str, list[float]] = {}

    def add(self, copy_ms: float, steps: Mapping[str, float]) -> None:
        """Add a round.

        Args:
            copy_ms: The link's time of one block.
            steps: The contenders' steps.
        """
        for name, value in {"link": copy_ms * self.copies, **steps}.items():
            self.ms.setdefault(name, []).append(value)

    def of_limit(self, name: str) -> float:
        """Return the mean step as a multiple of the limit."""
        return self._mean(name) / max(self._mean("link"), self._mean("resident"))

    def of(self, name: str, other: str) -> float:
        """Return the mean step as a multiple of another contender's."""
        return self._mean(name) / self._mean(other)

    def _mean(self, name: str) -> float:
        return statistics.mean(self.ms[name])

    def ratios(self) -> dict[str, float]:
        """Return each contender to the limit, and passes and replays to the hardware's floor."""
        found = {f"{name} / limit": self.of_limit(name) for name in ("beside", "pass", "replay")}
        found |= {f"{name} / beside": self.of(name, "beside") for name in ("pass", "replay")}
        return {name: round(ratio, 4) for name, ratio in found.items()}


def _round(
    calls: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], turn: int
) -> dict[str, float]:
    """Return the step of each; in the next round all are a place further on."""
    names = [*calls]
    start = turn % len(names)
    return {name: _step_ms(calls[name], args, 4) for name in names[start:] + names[:start]}


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
