# mypy: ignore-errors
"""Triton kernels of the packed format: one program a chunk; docs/packed.md has the format.

A chunk's 4096 values are those of 256 lanes, one a thread; a lane has two runs of eight. The codes
of the second and third level are dense strings over all lanes, in which a lane finds its place by
a prefix sum of how many codes the lanes before it have.

Every address that a kernel takes from a packed row is clamped, so that a damaged row gives wrong
values and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

# A kernel knows no global but as a constant of its own language.
_ENTRIES = tl.constexpr(16)
_CHUNK = tl.constexpr(2048)
_FIXED = tl.constexpr(1280)


@triton.jit
def _count_pairs(x):
    """How many of the even bits of x are set; the odd ones are not."""
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    return (x * 0x01010101) >> 24


@triton.jit
def _window(p, bit):
    """The 32 bits that begin at bit `bit` of the words at p."""
    w = bit >> 5
    a = tl.load(p + w).to(tl.uint32, bitcast=True).to(tl.uint64)
    b = tl.load(p + w + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    both = (a | (b << 32)) >> (bit & 31).to(tl.uint64)
    return both.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _permute(a, b, s, PORTABLE: tl.constexpr):
    """Four of the eight bytes of a and b, as the nibbles of s say."""
    if PORTABLE:
        r = a & 0
        for j in tl.static_range(4):
            q = (s >> (4 * j)) & 7
            r = r | (((tl.where(q < 4, a, b) >> ((q & 3) * 8)) & 0xFF) << (8 * j))
        return r
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, s], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _to_bf16(w):
    """Of each half, exponent << 8 | mantissa << 1 | sign, the two values."""
    return ((w >> 1) & 0x7FFF7FFF) | ((w << 15) & -0x7FFF8000)


@triton.jit
def _copy_chunk(src, dst, L: tl.constexpr):
    lanes = tl.arange(0, L)
    for part in tl.static_range(4):
        tl.store(dst + part * L + lanes, tl.load(src + part * L + lanes))


@triton.jit
def decode(
    rows32, rows64, out64, out16, row_words, num_chunks, L: tl.constexpr, PORTABLE: tl.constexpr
):
    c = tl.program_id(0)
    r = tl.program_id(1)
    lanes = tl.arange(0, L)
    two = tl.arange(0, 2)
    row = rows32 + r.to(tl.int64) * row_words
    entry = row + _ENTRIES + 4 * c
    place = tl.load(entry)
    counts = tl.load(entry + 1)
    more = tl.load(entry + 2)
    place = tl.minimum(tl.maximum(place, 0), (row_words - _CHUNK) // 4)
    chunk = r.to(tl.int64) * num_chunks + c
    out = out64 + chunk * (4 * L)
    blob64 = rows64 + (r.to(tl.int64) * row_words) // 2 + place.to(tl.int64) * 2
    table = (more >> 16) & 0xFFFF
    if table == 0xFFFF:
        _copy_chunk(blob64, out, L)
    else:
        blob = row + place.to(tl.int64) * 4
        num_second = tl.minimum(counts & 0xFFFF, 256)
        num_third = tl.minimum((counts >> 16) & 0xFFFF, 384)
        tab = row + tl.minimum(_ENTRIES + 4 * num_chunks + 4 * table, row_words - 4)
        z = lanes * 0
        luta = tl.load(tab) + z
        lutb = tl.load(tab + 1) + z
        lutc = tl.load(tab + 2) + z
        lutd = tl.load(tab + 3) + z
        w1 = tl.load(blob + lanes)
        sm0 = tl.load(blob64 + L // 2 + lanes)
        sm1 = tl.load(blob64 + L // 2 + L + lanes)
        em = w1 & (w1 >> 1) & 0x55555555
        n2 = _count_pairs(em)
        i2 = tl.cumsum(n2, 0) - n2
        r2 = _window(blob + _FIXED, i2 * 2)
        live = tl.where(n2 == 16, -1, (1 << (n2 * 2)) - 1)
        f3 = r2 & (r2 >> 1) & 0x55555555 & live
        n3 = _count_pairs(f3)
        i3 = (tl.cumsum(n3, 0) - n3) * 3
        p3 = blob + _FIXED + num_second
        r3 = _window(p3, i3)
        for g in tl.static_range(2):
            sm = sm0 if g == 0 else sm1
            if g == 1:
                # Eight values took 24 bits at most, so the window is read anew.
                r3 = _window(p3, i3)
            for h in tl.static_range(2):
                # Four codes of two bits, one a nibble.
                y = (w1 >> (16 * g + 8 * h)) & 0xFF
                y = (y | (y << 4)) & 0x0F0F
                y = (y | (y << 2)) & 0x3333
                for k in tl.static_range(4):
                    esc = (em & (1 << (16 * g + 8 * h + 2 * k))) != 0
                    y = tl.where(esc, y + ((r2 & 3) << (4 * k)) + (1 << (4 * k)), y)
                    r2 = tl.where(esc, r2 >> 2, r2)
                ex = _permute(luta, lutb, y, PORTABLE)
                m3 = y & (y >> 1) & (y >> 2) & 0x1111
                for k in tl.static_range(4):
                    e3 = _permute(lutc, lutd, r3 & 7, PORTABLE)
                    esc3 = (m3 & (1 << (4 * k))) != 0
                    put = _permute(ex, e3, z + (0x3210 + ((4 - k) << (4 * k))), PORTABLE)
                    ex = tl.where(esc3, put, ex)
                    r3 = tl.where(esc3, r3 >> 3, r3)
                    i3 += tl.where(esc3, 3, 0)
                s4 = (sm >> (32 * h)).to(tl.int32)
                lo = _to_bf16(_permute(s4, ex, z + 0x5140, PORTABLE))
                hi = _to_bf16(_permute(s4, ex, z + 0x7362, PORTABLE))
                v = lo.to(tl.uint32, bitcast=True).to(tl.int64) | (hi.to(tl.int64) << 32)
                if h == 0:
                    v0 = v
                else:
                    pair = out + 2 * g * L + (2 * lanes)[:, None] + two[None, :]
                    tl.store(pair, tl.join(v0, v))
        num_patches = tl.minimum(more & 0xFFFF, 16 * L)
        if num_patches > 0:
            # They overwrite what other threads have stored.
            tl.debug_barrier()
            first = place * 4 + _FIXED + num_second + num_third
            for i in range(0, num_patches, L):
                ok = (i + lanes < num_patches) & (first + i + lanes < row_words)
                q = tl.load(row + first + i + lanes, mask=ok, other=0)
                tl.store(out16 + chunk * (16 * L) + (q & 0xFFF), (q >> 16).to(tl.int16), mask=ok)


@triton.jit
def _codes(x64, rank, c, L: tl.constexpr):
    """Of each lane: the words of its codes, how many of each level, patches, checksum."""
    lanes = tl.arange(0, L)
    w1 = lanes * 0
    r2 = lanes * 0
    ra = lanes * 0
    rb = lanes * 0
    n2 = lanes * 0
    na = lanes * 0
    nb = lanes * 0
    missed = lanes * 0
    total = lanes * 0
    for q in tl.static_range(4):
        at = (q // 2) * (2 * L) + 2 * lanes + (q % 2)
        v = tl.load(x64 + c.to(tl.int64) * (4 * L) + at)
        total += v.to(tl.int32) * (4 * at + 1) + (v >> 32).to(tl.int32) * (4 * at + 3)
        for k in tl.static_range(4):
            b = (v >> (16 * k)).to(tl.int32) & 0xFFFF
            r = tl.load(rank + ((b >> 7) & 0xFF)).to(tl.int32)
            bad = r == 255
            missed += bad.to(tl.int32)
            r = tl.where(bad, 0, r)
            esc = r >= 3
            esc3 = r >= 6
            w1 = w1 | (tl.minimum(r, 3) << (8 * q + 2 * k))
            r2 = r2 | tl.where(esc, tl.minimum(r - 3, 3) << (2 * n2), 0)
            n2 += esc.to(tl.int32)
            if q < 2:
                ra = ra | tl.where(esc3, (r - 6) << (3 * na), 0)
                na += esc3.to(tl.int32)
            else:
                rb = rb | tl.where(esc3, (r - 6) << (3 * nb), 0)
                nb += esc3.to(tl.int32)
    return w1, r2, ra, rb, n2, na, nb, missed, total


@triton.jit
def count(x64, ranks, table_of, counts, L: tl.constexpr):
    c = tl.program_id(0)
    rank = ranks + tl.maximum(tl.load(table_of + c), 0) * 256
    w1, r2, ra, rb, n2, na, nb, missed, total = _codes(x64, rank, c, L)
    tl.store(counts + c * 4, tl.sum(n2, 0))
    tl.store(counts + c * 4 + 1, tl.sum(na + nb, 0))
    tl.store(counts + c * 4 + 2, tl.sum(missed, 0))
    # Summed wide and then cut, which is the same modulo 2**32.
    tl.store(counts + c * 4 + 3, tl.sum(total.to(tl.int64), 0).to(tl.int32))


@triton.jit
def _or_bits(p, v, bit):
    """Or the bits v into the words at p, from bit `bit` on."""
    w = (v.to(tl.uint32, bitcast=True).to(tl.uint64)) << (bit & 31).to(tl.uint64)
    lo = w.to(tl.uint32).to(tl.int32, bitcast=True)
    hi = (w >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(p + (bit >> 5), lo, mask=lo != 0, sem="relaxed")
    tl.atomic_or(p + (bit >> 5) + 1, hi, mask=hi != 0, sem="relaxed")


@triton.jit
def write(x64, ranks, row32, row64, L: tl.constexpr):
    c = tl.program_id(0)
    lanes = tl.arange(0, L)
    entry = row32 + _ENTRIES + 4 * c
    place = tl.load(entry).to(tl.int64)
    counts = tl.load(entry + 1)
    table = (tl.load(entry + 2) >> 16) & 0xFFFF
    run = x64 + c.to(tl.int64) * (4 * L)
    if table == 0xFFFF:
        _copy_chunk(run, row64 + place * 2, L)
    else:
        rank = ranks + table * 256
        w1, r2, ra, rb, n2, na, nb, missed, total = _codes(x64, rank, c, L)
        blob = row32 + place * 4
        tl.store(blob + lanes, w1)
        second = blob + _FIXED
        _or_bits(second, r2, (tl.cumsum(n2, 0) - n2) * 2)
        third = second + (counts & 0xFFFF)
        i3 = (tl.cumsum(na + nb, 0) - na - nb) * 3
        _or_bits(third, ra, i3)
        _or_bits(third, rb, i3 + 3 * na)
        patches = third + ((counts >> 16) & 0xFFFF)
        ip = tl.cumsum(missed, 0) - missed
        for g in tl.static_range(2):
            s = lanes.to(tl.int64) * 0
            for h in tl.static_range(2):
                v = tl.load(run + g * (2 * L) + 2 * lanes + h)
                for k in tl.static_range(4):
                    b = (v >> (16 * k)).to(tl.int32) & 0xFFFF
                    low = ((b << 1) & 0xFF) | (b >> 15)
                    s = s | (low.to(tl.int64) << (32 * h + 8 * k))
                    bad = tl.load(rank + ((b >> 7) & 0xFF)) == 255
                    at = g * (8 * L) + lanes * 8 + 4 * h + k
                    tl.store(patches + ip, at | (b << 16), mask=bad)
                    ip += bad.to(tl.int32)
            tl.store(row64 + place * 2 + L // 2 + g * L + lanes, s)
