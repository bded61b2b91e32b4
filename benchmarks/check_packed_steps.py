"""Steps with packed weights: against their own limit, and against the raw ring in the same run."""

from __future__ import annotations

import dataclasses
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checks import Findings, Options

__all__ = ["auto", "default", "products", "steps"]

_GB = 1e9
_TOKENS = (1, 4096, 8192)
_CHOICES = (4096, 20480, 8192, 10240, 12288)


def steps(options: Options, found: Findings) -> None:
    """Run 40 blocks of 340 MB raw and packed, with nearly no tokens, with 4k and with 8k."""
    _compare(options, found, products_only=False)


def products(options: Options, found: Findings) -> None:
    """The same with blocks that multiply by their matrices, and have no attention."""
    _compare(options, found, products_only=True)


def _compare(options: Options, found: Findings, *, products_only: bool) -> None:
    tokens = _lengths(options, _TOKENS)
    reports, _ = _measure(options, tokens=tokens, products_only=products_only)
    raw, packed = reports[False], reports[True]
    loose = 1e6 if options.small else 1.0
    raw_link_ms = raw.streamed[0].copied_nbytes / raw.streamed[0].link_gb_s / 1e6
    for plain, row in zip(raw.rows, packed.rows, strict=True):
        found.note(
            **{
                f"raw {row.tokens}": dataclasses.asdict(plain),
                f"packed {row.tokens}": dataclasses.asdict(row) | {"bound_ms": row.bound_ms},
            }
        )
        name = f"{row.tokens} tokens"
        found.at_most(f"step / its limit, {name}", row.step_ms / row.bound_ms, 1.02 * loose)
        found.at_most(f"step / simulated, {name}", row.step_ms / row.simulated_ms, 1.02 * loose)
        if row.bound_ms < 0.7 * raw_link_ms:
            # The link is the bound; else computation and decoding are, and say how much is gained.
            found.at_most(f"step / T_x raw, {name}", row.step_ms / raw_link_ms, 0.71 * loose)
            found.at_most(f"step / raw step, {name}", row.step_ms / plain.step_ms, 0.75 * loose)
    found.true("same bits", packed.bit_identical)
    found.note(about=[*raw.lines(), *packed.lines()])
    rank = packed.streamed[0]
    weights = sum(rank.blocks_nbytes)
    found.note(
        weights_gb=weights / _GB,
        pinned_gb=rank.pinned_nbytes / _GB,
        device_gb=rank.device_nbytes / _GB,
        raw_device_gb=raw.streamed[0].device_nbytes / _GB,
        ratio=rank.packed_ratio,
        decode_ms=rank.decode_ms,
        enable_s=rank.enable_s,
        raw_enable_s=raw.streamed[0].enable_s,
    )
    if options.cuda:
        found.at_most("pinned / weights", rank.pinned_nbytes / weights, 0.70)


def auto(options: Options, found: Findings) -> None:
    """Let it choose: where the link is the bound, near the crossing, where computation is."""
    loose = 1e6 if options.small else 1.0
    limits = dict(zip(_lengths(options, _CHOICES), (0.75, *(1.01,) * 4), strict=True))
    reports, resident = _measure(options, forms=(False,), tokens=tuple(limits))
    for number, (plain, limit) in enumerate(zip(reports[False].rows, limits.values(), strict=True)):
        alone = tuple(runs[number : number + 1] for runs in resident)
        # It looks after three passes.
        choosing, _ = _measure(
            options, forms=("auto",), tokens=(plain.tokens,), num_warm=6, resident=alone
        )
        chosen = choosing["auto"]
        row, packed = chosen.rows[0], chosen.streamed[0].packed_ratio is not None
        found.note(
            **{
                f"step {row.tokens}": [plain.step_ms, row.step_ms, row.compute_ms],
                f"packed {row.tokens}": packed,
            }
        )
        name = f"step / raw step, {row.tokens} tokens"
        found.at_most(name, row.step_ms / plain.step_ms, limit * loose)
        found.true(f"same bits, {row.tokens} tokens", chosen.bit_identical)


def default(options: Options, found: Findings) -> None:
    """Say nothing of packing: a long run gets it, at the price of one stop and a block's memory.

    Twice, for the second time finds its kernels compiled. Each gets new values then, of which one
    matrix cannot be packed, and so makes way; the second one is packed again.
    """
    import torch

    from dlo_core.bench.model import Shape, build, inputs

    shape = Shape(64, 4, 4) if options.small else Shape(3072, 24, 40)
    (tokens,) = _lengths(options, (4096,))
    device = torch.device(options.device)
    with torch.inference_mode():
        args = inputs(shape, tokens, device)
        resident = build(shape, device)
        wanted = resident(*args)
        name = next(
            name
            for name, value in resident.named_parameters()
            if name.startswith("blocks.") and value.ndim > 1
        )
        bits = torch.empty_like(resident.get_parameter(name), dtype=torch.int16)
        # All exponents below 1, so that the outputs stay finite.
        noise = bits.random_(0, 0x3F80).view(torch.bfloat16)
        resident.get_parameter(name).copy_(noise)
        changed = resident(*args)
        del resident
        for kernels in ("new kernels", "known kernels"):
            _run_default(options, found, kernels, (shape, args, wanted), (name, noise, changed))


def _run_default(
    options: Options,
    found: Findings,
    kernels: str,
    run: tuple[Any, Any, Any],
    update: tuple[str, Any, Any],
) -> None:
    """Go through the choice once, and say what it took."""
    import torch

    import dlo_core as dlo
    from dlo_core.bench.model import build

    shape, args, wanted = run
    name, values, changed = update
    model = build(shape)
    offloaded = dlo.offload(model, device=options.device)
    steps, taken, wrong = [], [], 0
    for _ in range(8 if options.small else 60):
        before = _allocated(options)
        start = time.perf_counter()
        wrong += not torch.equal(model(*args), wanted)
        steps.append((time.perf_counter() - start) * 1e3)
        taken.append(_peak(options) - before)
    stats = offloaded.stats()
    raw_ms, packed_ms = statistics.median(steps[4:40]), statistics.median(steps[-6:])
    block = max(sum(p.nbytes for p in block.parameters()) for block in build(shape, "meta").blocks)
    stop = max(range(4, len(steps)), key=steps.__getitem__)
    found.note(
        **{
            f"{kernels}: {what}": value
            for what, value in (
                ("steps_ms", [round(each, 1) for each in steps]),
                ("raw_ms", raw_ms),
                ("packed_ms", packed_ms),
                ("stop_ms", steps[stop] - raw_ms),
                ("blocks of memory more in that pass", (taken[stop] - taken[3]) / block),
                ("reason", stats.packed_reason),
                ("device_gb", stats.device_bytes / _GB),
                ("footprint_gb", offloaded.footprint.device_nbytes / _GB),
            )
        }
    )
    if options.cuda:
        found.true(f"packed in the end, {kernels}", stats.packed_ratio is not None)
        found.at_most(f"step / step before, {kernels}", packed_ms / raw_ms, 0.75)
    held, promised = stats.device_bytes, offloaded.footprint.device_nbytes
    found.true(f"no more than the footprint, {kernels}", held <= promised)
    offloaded.update_weights({name: values})
    found.true(f"raw after an update, {kernels}", offloaded.stats().packed_ratio is None)
    for _ in range(4 if kernels == "new kernels" or options.small else 70):
        wrong += not torch.equal(model(*args), changed)
    found.note(**{f"{kernels}: after the update": offloaded.stats().packed_reason})
    found.at_most(f"passes with a wrong bit, {kernels}", wrong, 0)
    offloaded.shutdown()


def _allocated(options: Options) -> int:
    """Return what is allocated now, and begin to look for the peak."""
    import torch

    if not options.cuda:
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(options: Options) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if options.cuda else 0


def _lengths(options: Options, tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(1, each // 1024) for each in tokens) if options.small else tokens


def _measure(
    options: Options,
    *,
    forms: tuple[Any, ...] = (False, True),
    tokens: tuple[int, ...],
    num_warm: int = 2,
    resident: Any = None,
    products_only: bool = False,
) -> tuple[dict[Any, Any], Any]:
    """Measure in processes of their own; return the reports and the resident runs."""
    from dlo_core.bench.job import BenchJob
    from dlo_core.bench.launch import run_ranks
    from dlo_core.bench.measure import measure_resident, measure_streamed
    from dlo_core.bench.model import Shape
    from dlo_core.bench.report import BenchReport

    sizes = (64, 4, 4) if options.small else (3072, 24, 40)
    shape = Shape(*sizes, products_only=products_only)
    run = partial(run_ranks, device=options.device, limit_s=options.limit_s)
    reports: dict[Any, Any] = {}
    for packed in forms:
        num = 2 if options.small else 6
        job = BenchJob(shape, tokens, {"packed": packed}, num_passes=num, num_warm=num_warm)
        resident = resident or run(measure_resident, (job,))
        reports[packed] = BenchReport(job, resident, run(measure_streamed, (job,)))
    return reports, resident
