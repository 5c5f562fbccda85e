"""Specification of `predict32`, a transform for the next version of the format: split32 with a rank-1 prediction in the log domain.

Nothing of the package uses this file. Its trials are in moments_trials.md. Integers only; one chunk at a time; NumPy.

An fp32 element has t = its upper 16 bits, low = its lower 16 bits (stored raw). sign = t >> 15, x = t & 0x7fff: exponent and 7 mantissa
bits, which as an integer is a piecewise linear logarithm in steps of 1/128 octave.

Side plane of a chunk (never coded; all integers little-endian):
    u8  cut      k, 4 to 7: mantissa bits stored raw
    u8  segment  0: no offsets; 6 to 12: one offset for each 2^segment elements
    u8  quantum  q, 0 to 7: an offset's unit is 2^q / 128 octave
    u8  zero
    u16 base     0 to 0x7fff
    u16 zero
    u32 width    W; 0: no column prediction; else 1 to elements
    u32 zero
    u8  offset [ceil(n / 2^segment)]    none where segment is 0
Element i of n:   column c = i mod W, row r = i div W, counted from the chunk's start (phases in the tensor do not matter)
    off = base + (offset[i >> segment] << q)      (base alone where segment is 0)
    p   = acc[c] >> 4                             arithmetic shift; acc starts as 0 in every chunk; p = 0 where W = 0
    w   = (x - off - p + 2^(k-1) + 2^(k+7)) mod 2^15          a writer must choose k such that w < 2^(k+8) for all; k = 7 always is
    plane 0 byte    w >> k                        coded
    plane 1 value   (sign << k) | (w & (2^k - 1)) k + 1 bits an element, or k where no sign is set; packed from the lowest bit
    then acc[c] += (((x - off) << 4) - acc[c]) >> min(4, floor(log2(r + 1)))      arithmetic shifts, 32-bit signed is enough
Back:  x = (w - 2^(k-1) - 2^(k+7) + off + p) mod 2^15, with w = (byte << k) | bits, then acc as above. Columns are independent.
"""
import struct
import numpy as np

HEAD = struct.Struct("<BBBBHHII")
MEMORY = 4            # acc's gain ends at 2^-4
FRACTION = 4          # acc has 4 bits behind the point


def gain(row):
    return min(MEMORY, (row + 1).bit_length() - 1)


# ---- bits -----------------------------------------------------------------------------------------------------------------
def pack_bits(values, bits):
    if bits == 0:
        return np.zeros(0, np.uint8)
    table = (values[:, None] >> np.arange(bits) & 1).astype(np.uint8)
    return np.packbits(table.reshape(-1), bitorder="little")


def unpack_bits(packed, bits, n):
    if bits == 0:
        return np.zeros(n, np.int32)
    table = np.unpackbits(packed, count=n * bits, bitorder="little").reshape(n, bits)
    return (table.astype(np.int32) << np.arange(bits, dtype=np.int32)).sum(1).astype(np.int32)


# ---- offsets --------------------------------------------------------------------------------------------------------------
def choose_offsets(x, segment):
    """(base, q, offsets): each segment's mean of x, the integer part, as base + (byte << q)."""
    size = 1 << segment
    starts = np.arange(0, len(x), size)
    counts = np.minimum(len(x) - starts, size)
    mean = (np.add.reduceat(x.astype(np.int64), starts) // counts).astype(np.int32)
    base = int(mean.min())
    spread = int(mean.max()) - base
    q = 3
    while spread >> q > 255:
        q += 1
    half = 1 << q >> 1
    return base, q, np.minimum(mean - base + half >> q, 255).astype(np.uint8)


def apply_offsets(n, segment, q, base, offsets):
    if segment == 0:
        return np.full(n, base, np.int32)
    return np.repeat(base + (offsets.astype(np.int32) << q), 1 << segment)[:n]


# ---- column prediction ----------------------------------------------------------------------------------------------------
def residuals(d, width):
    """d - p for d = x - off. On a GPU: one thread for each column (or 4 of them), rows in sequence, loads ahead."""
    if width == 0:
        return d.copy()
    n = len(d)
    out = np.empty(n, np.int32)
    acc = np.zeros(width, np.int32)
    for row in range(-(-n // width)):
        line = d[row * width:(row + 1) * width]
        a = acc[:len(line)]
        out[row * width:row * width + len(line)] = line - (a >> FRACTION)
        a += ((line << FRACTION) - a) >> gain(row)
    return out


def restore(u, off, width):
    """Inverse: x from u = (x - off - p) mod 2^15."""
    if width == 0:
        return u + off & 0x7fff
    n = len(u)
    out = np.empty(n, np.int32)
    acc = np.zeros(width, np.int32)
    for row in range(-(-n // width)):
        at = slice(row * width, min((row + 1) * width, n))
        a = acc[:at.stop - at.start]
        x = u[at] + off[at] + (a >> FRACTION) & 0x7fff
        out[at] = x
        a += (((x - off[at]) << FRACTION) - a) >> gain(row)
    return out


def cut_values(u, k):
    return u + (1 << k - 1) + (1 << k + 7) & 0x7fff


# ---- choosing -------------------------------------------------------------------------------------------------------------
def cost(symbols):
    """Bits of a chunk's symbols by order-0 entropy, with about 6 bits of table for each symbol in use."""
    counts = np.bincount(symbols, minlength=256)
    counts = counts[counts > 0].astype(np.float64)
    total = counts.sum()
    return float((counts * np.log2(total / counts)).sum() + 6 * len(counts))


def best_cut(u, cuts=(5, 7)):
    """(bits, k) with the lowest cost among the cuts that fit."""
    best = None
    for k in cuts:
        w = cut_values(u, k)
        if int(w.max()) >> k + 8:
            continue
        bits = cost(w >> k) + k * len(u)
        if best is None or bits < best[0]:
            best = bits, k
    return best


def find_widths(d, step=64, samples=4096):
    """The row length that the content suggests, among the multiples of `step`, from d = x - off: [W] or [].

    The mean |d[i + W] - d[i]| of 4096 sampled pairs for each candidate (64 runs of 64 elements): the smallest candidate close to the best.
    On a GPU a warp for each candidate; 512 candidates in a chunk of 64 Ki elements are 32 differences an element."""
    n = len(d)
    candidates = np.arange(step, n // 2 + 1, step)
    if len(candidates) < 8 or n < 8 * samples:
        return []
    c = np.clip(d - int(np.median(d)), -1024, 1024)              # +- 8 octaves: single zeros must not decide
    run = samples // 64
    scores = np.empty(len(candidates), np.int64)
    for j, width in enumerate(candidates):
        at = (np.arange(64) * ((n - width - run) // 63))[:, None] + np.arange(run)
        scores[j] = np.abs(c[at + width] - c[at]).sum()
    best, middle = int(scores.min()), int(np.median(scores))
    if best * 32 > middle * 31:
        return []
    return [int(candidates[np.flatnonzero(4 * (scores - best) <= middle - best)[0]])]


def encode(chunk, widths=None, segments=(8,), cuts=(5, 7)):
    """Planes of a chunk, uint32 [n] of fp32 bits, n >= 1: (symbols u8 [n], packed u8, low u16 [n], side bytes, signed).

    `signed` is what plane 1's mode in the chunk table says: RAW or UNSIGNED.

    `widths`: row lengths that the host knows or that were found before; None looks into this chunk."""
    n = len(chunk)
    t = (chunk >> 16).astype(np.int32)
    x, sign = t & 0x7fff, t >> 15
    middle = int(x.min()) + int(x.max()) >> 1
    bits, k = best_cut(x - middle, cuts)
    best = bits, k, 0, 0, middle, np.zeros(0, np.uint8), 0
    for segment in segments:
        base, q, offsets = choose_offsets(x, segment)
        d = x - apply_offsets(n, segment, q, base, offsets)
        for width in (0, *(find_widths(d) if widths is None else widths)):
            if 2 * width > n:
                continue
            u = residuals(d, width)
            bits, k = best_cut(u, cuts)
            bits += 8 * len(offsets)
            if bits < best[0]:
                best = bits, k, segment, q, base, offsets, width
    _, k, segment, q, base, offsets, width = best
    w = cut_values(residuals(x - apply_offsets(n, segment, q, base, offsets), width), k)
    assert not int(w.max()) >> k + 8
    signed = bool(sign.any())
    rest = w & (1 << k) - 1 | sign << k
    side = HEAD.pack(k, segment, q, 0, base, 0, width, 0) + offsets.tobytes()
    return (w >> k).astype(np.uint8), pack_bits(rest, k + signed), (chunk & 0xffff).astype(np.uint16), side, signed


def decode(symbols, packed, low, side, signed, n):
    k, segment, q, zero, base, zero2, width, zero3 = HEAD.unpack_from(side)
    if not (4 <= k <= 7 and (segment == 0 or 6 <= segment <= 12) and q <= 7 and base <= 0x7fff and width <= n
            and zero == zero2 == zero3 == 0):
        raise ValueError("side plane: a field is out of range")
    count = -(-n >> segment) if segment else 0
    if len(side) != HEAD.size + count or len(symbols) != n:
        raise ValueError("side plane: wrong size")
    bits = k + signed
    if len(packed) != (n * bits + 7) // 8:
        raise ValueError("plane 1: wrong size")
    rest = unpack_bits(packed, bits, n)
    offsets = np.frombuffer(side, np.uint8, count, HEAD.size)
    off = apply_offsets(n, segment, q, base, offsets)
    w = symbols.astype(np.int32) << k | rest & (1 << k) - 1
    x = restore(w - (1 << k - 1) - (1 << k + 7) & 0x7fff, off, width)
    t = x | (rest >> k) << 15
    return t.astype(np.uint32) << 16 | low


# ---- the smaller variant: the same prediction, of the exponent plane alone ----------------------------------------------------
# Only plane 0 changes, so it is a byte filter that serves split16 (bf16) as well. x is (e << 7) + 64, the middle of an octave, and
#     plane 0 byte = (e - ((off + p) >> 7) + 128) mod 256
# with the same side plane; cut is 7, and 0 as segment and width with base 128 << 7 is the identity.

def encode_exponents(e, widths=None, segment=8):
    """(symbols u8 [n], side bytes) of an exponent plane u8 [n]."""
    n = len(e)
    x = (e.astype(np.int32) << 7) + 64
    best = cost(e), 0, 0, 128 << 7, np.zeros(0, np.uint8), 0, e
    base, q, offsets = choose_offsets(x, segment)
    off = apply_offsets(n, segment, q, base, offsets)
    d = x - off
    for width in (0, *(find_widths(d) if widths is None else widths)):
        if 2 * width > n:
            continue
        p = d - residuals(d, width)
        symbols = (e - (off + p >> 7) + 128 & 0xff).astype(np.uint8)
        bits = cost(symbols) + 8 * len(offsets)
        if bits < best[0]:
            best = bits, segment, q, base, offsets, width, symbols
    _, segment, q, base, offsets, width, symbols = best
    return symbols, HEAD.pack(7, segment, q, 0, base, 0, width, 0) + offsets.tobytes()


def decode_exponents(symbols, side):
    n = len(symbols)
    _, segment, q, _, base, _, width, _ = HEAD.unpack_from(side)
    off = apply_offsets(n, segment, q, base, np.frombuffer(side, np.uint8, -1, HEAD.size))
    if width == 0:
        return (symbols + (off >> 7) - 128 & 0xff).astype(np.uint8)
    out = np.empty(n, np.uint8)
    acc = np.zeros(width, np.int32)
    for row in range(-(-n // width)):
        at = slice(row * width, min((row + 1) * width, n))
        a = acc[:at.stop - at.start]
        e = symbols[at] + (off[at] + (a >> FRACTION) >> 7) - 128 & 0xff
        out[at] = e
        a += (((e << 7) + 64 - off[at] << FRACTION) - a) >> gain(row)
    return out
