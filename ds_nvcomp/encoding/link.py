"""fp32 master weights as their difference from the 16-bit weights that were rounded from them.

With `w` the 16-bit weight widened to fp32 and all as 32-bit integers, z = zigzag(master - w): 0, -1, 1, -2, ... become 0, 1, 2, 3, ... A
bf16 weight is the master rounded to nearest, so it is no further off than half of bf16's last place, which is 2^15: z has 16 bits, and 17
for the ties that were rounded down (4 in a million, measured). Subtraction wraps, so z gives back any master from any weight, NaNs too;
whether it was rounded at all decides the size, and nothing else. Below 6e-5 fp16 has fewer places, and z up to 26 bits: an upper byte is
then stored for the whole chunk.

z is put where split32 looks for it: bits 16 to 23 in the exponent, which is coded, 24 to 30 in the mantissa, 31 in the sign. So the
transform, the codecs and the table know nothing of links.
"""
from __future__ import annotations

import numpy as np

KINDS = ("bfloat16", "float16")


def difference(master: np.ndarray, weights: np.ndarray, kind: str) -> np.ndarray:
    """uint8 [4 n] of fp32 `master` (uint8 [4 n]) against 16-bit `weights` (uint8 [2 k], k <= n; zeros behind)."""
    z = master.view(np.uint32) - widened(weights, kind, len(master) // 4)
    z = z << 1 ^ (z.view(np.int32) >> 31).view(np.uint32)
    return (z & 0x8000ffff | (z >> 16 & 0xff) << 23 | (z >> 24 & 0x7f) << 16).view(np.uint8)


def restore(data: np.ndarray, weights: np.ndarray, kind: str) -> None:
    """Inverse of `difference`, in place."""
    x = data.view(np.uint32)
    z = x & 0x8000ffff | (x >> 23 & 0xff) << 16 | (x >> 16 & 0x7f) << 24
    np.add(z >> 1 ^ (0 - (z & 1)).astype(np.uint32), widened(weights, kind, len(x)), out=x)


def widened(weights: np.ndarray, kind: str, count: int) -> np.ndarray:
    """The bits of `weights` as fp32, uint32 [count]; zeros behind the last. By integers, for NaNs to keep theirs."""
    wide = np.zeros(count, np.uint32)
    half = weights.view(np.uint16)[:count].astype(np.uint32)
    if kind == "bfloat16":
        half <<= 16
    else:
        sign, exponent, mantissa = (half & 0x8000) << 16, half >> 10 & 0x1f, half & 0x3ff
        tiny = (mantissa.astype(np.float32) * np.float32(2.0 ** -24)).view(np.uint32)
        exponent = np.where(exponent == 31, 255, exponent + 112)
        half = sign | np.where(half >> 10 & 0x1f, exponent << 23 | mantissa << 13, tiny).astype(np.uint32)
    wide[:len(half)] = half
    return wide
