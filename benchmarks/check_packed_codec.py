"""The codec for packed weights on a GPU: bits against the reference, damage, rates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from checks import Findings, Options

__all__ = ["bits", "damage", "rates"]

_CHUNK = 8192
_GB = 1e9


def bits(options: Options, found: Findings) -> None:
    """Code and decode random patterns of many kinds; the reference gives bytes and bits."""
    import torch

    from dlo_core.packed import pack

    codec, device = _codec(options)
    found.note(codec=type(codec).__name__)
    count = 4 if options.small else 60
    gen = torch.Generator().manual_seed(1)
    same = right = joined = True
    for number in range(count):
        num_values = int(torch.randint(1, 40 * 4096, (1,), generator=gen))
        data = _any_data(number, num_values, gen)
        row, run, _ = _pack(codec, data.to(device))
        reference = pack(data)
        same &= torch.equal(row.cpu(), reference)
        out = torch.full_like(run, 0xEE)
        rows = torch.zeros(2, len(row) + 2 * _CHUNK, dtype=torch.uint8, device=device)
        rows[:, : len(row)] = row
        codec.decode(rows[:1], out)
        right &= torch.equal(out, run)
        both = torch.full((2 * len(run),), 0xEE, dtype=torch.uint8, device=device)
        codec.decode(rows, both)
        joined &= torch.equal(both, torch.cat([run, run]))
    found.true(f"{count} kinds of data: the bytes of the reference", same)
    found.true(f"{count} kinds of data: every bit comes back", right)
    found.true(f"{count} kinds of data: two rows in one call", joined)


def damage(options: Options, found: Findings) -> None:
    """Decode garbage and damaged rows between guards; nothing outside may be touched."""
    import torch

    codec, device = _codec(options)
    gen = torch.Generator().manual_seed(2)
    whole = True
    count = 10 if options.small else 300
    good, run, _ = _pack(codec, _any_data(0, 16 * 4096, gen).to(device))
    for number in range(count):
        rows = torch.zeros(1, len(good) + _CHUNK, dtype=torch.uint8, device=device)
        rows[0, : len(good)] = good
        if number % 3 == 0:
            rows[0, 64:] = torch.randint(0, 256, (rows.shape[1] - 64,), dtype=torch.uint8).to(
                device
            )
        else:
            # In the index, where it hurts.
            place = 64 + int(torch.randint(0, 16 * 18, (1,), generator=gen))
            rows[0, place] = number % 256
        out = torch.full((len(run) + 2 * _CHUNK,), 0xAB, dtype=torch.uint8, device=device)
        codec.decode(rows, out[_CHUNK:-_CHUNK])
        whole &= bool((out[:_CHUNK] == 0xAB).all()) and bool((out[-_CHUNK:] == 0xAB).all())
    _synchronize(options)
    found.true(f"{count} damaged rows: nothing outside is touched, no error of the device", whole)


def rates(options: Options, found: Findings) -> None:
    """Time coding and decoding of a block of 340 MB, alone and from and to pinned memory."""
    import torch

    codec, device = _codec(options)
    num_values = 40 * 4096 if options.small else 169_869_312 // 4096 * 4096
    gen = torch.Generator().manual_seed(3)
    sigma = torch.exp(torch.randn(num_values // 4096, 1, generator=gen) * 0.25) * 0.02
    values = torch.randn(num_values // 4096, 4096, generator=gen) * sigma
    data = values.to(torch.bfloat16).view(torch.uint8).flatten()
    pinned = data.pin_memory() if options.cuda else data
    row, run, tensors = _pack(codec, data.to(device))
    rows = torch.zeros(1, -(-len(row) // 256) * 256, dtype=torch.uint8, device=device)
    rows[0, : len(row)] = row
    out = torch.empty_like(run)
    ratio = len(row) / len(data)
    decode_s = _time(options, lambda: codec.decode(rows, out))
    found.true("bits", torch.equal(out, run))
    back = torch.empty(len(row) + _CHUNK, dtype=torch.uint8, pin_memory=options.cuda)

    from dlo_core.packed import measure, write_segment

    index = measure(codec, run, len(data), tensors)
    count_s = _time(options, lambda: measure(codec, run, len(data), tensors))
    write_s = _time(options, lambda: write_segment(codec, run, index, row))

    def whole() -> None:
        run[: len(data)].copy_(pinned, non_blocking=True)
        made = measure(codec, run, len(data), tensors)
        write_segment(codec, run, made, row)
        back[: len(row)].copy_(row, non_blocking=True)

    whole_s = _time(options, whole)
    nbytes = len(data)
    found.note(
        ratio=round(ratio, 4),
        decode_ms=round(decode_s * 1e3, 3),
        decode_gb_s=round(nbytes / decode_s / _GB, 1),
        measure_ms=round(count_s * 1e3, 3),
        write_ms=round(write_s * 1e3, 3),
        encode_gb_s=round(nbytes / (count_s + write_s) / _GB, 1),
        pinned_to_pinned_gb_s=round(nbytes / whole_s / _GB, 1),
    )
    if options.cuda:
        found.at_most("decode of 340 MB, ms", decode_s * 1e3, 0.4)
        found.at_least("pinned, coded, pinned: GB/s", nbytes / whole_s / _GB, 15)
        found.at_most("ratio", ratio, 0.68)


def _codec(options: Options) -> tuple[Any, Any]:
    from dlo_core.packed_torch import TorchCodec
    from dlo_core.registry import resolve

    backend = resolve(options.device)
    codec = backend.codec()
    assert codec is not None or not options.cuda, "no Triton on this machine"
    return codec or TorchCodec(), backend.device


def _pack(codec: Any, data: Any) -> tuple[Any, Any, list[tuple[int, int]]]:
    """Return the segment, the run, and where its tensor lies."""
    import torch

    from dlo_core.packed import measure, padded, write_segment

    run = torch.zeros(padded(len(data)), dtype=torch.uint8, device=data.device)
    run[: len(data)] = data
    tensors = [(0, len(data))]
    index = measure(codec, run, len(data), tensors)
    row = torch.empty(index.header.nbytes, dtype=torch.uint8, device=data.device)
    write_segment(codec, run, index, row)
    return row, run, tensors


def _any_data(number: int, count: int, gen: Any) -> Any:
    """Return weights, patterns, powers of two, or weights with patterns among them."""
    import torch

    weights = (torch.randn(count, generator=gen) * 0.02).to(torch.bfloat16).view(torch.int16)
    noise = torch.randint(-32768, 32768, (count,), dtype=torch.int16, generator=gen)
    least = -1 - number % 40
    powers = torch.exp2(torch.randint(least, 0, (count,), generator=gen).float())
    here = torch.rand(count, generator=gen) < number / 200
    kinds = (
        weights,
        noise,
        powers.to(torch.bfloat16).view(torch.int16),
        torch.where(here, noise, weights),
        noise[:1].repeat(count),
    )
    return kinds[number % len(kinds)].view(torch.uint8).flatten()


def _time(options: Options, work: Callable[[], object]) -> float:
    """Return the seconds of one run, the least of some."""
    times = []
    for _ in range(2 if options.small else 8):
        _synchronize(options)
        start = time.perf_counter()
        work()
        _synchronize(options)
        times.append(time.perf_counter() - start)
    return min(times)


def _synchronize(options: Options) -> None:
    import torch

    if options.cuda:
        torch.cuda.synchronize()
