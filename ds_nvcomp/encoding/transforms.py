"""Cut numbers into planes: the exponents, which an entropy coder can shrink, and the rest, which is noise and stored as it is.

Every IEEE-like float has the sign, the exponent and the top of the mantissa in its most significant bits. One cut serves all
widths. With `t` the top 16 bits of an element (of a byte `b` for 8-bit floats, with 4 bits where 16-bit cuts have 8):

    X = (t >> 7) & 0xff                     the top 8 exponent bits      -> coded
    H = ((t >> 8) & 0x80) | (t & 0x7f)      sign and the next 7 bits     -> stored; 7 bits an element where no sign is set
    L = the bytes below, untouched                                       -> stored

For bf16 and fp32 X is the exact exponent; fp16's X also has 3 mantissa bits, fp64's lacks the 3 lowest exponent bits; 8-bit floats
give 4 + 4 bits, two elements to a byte. Measured on Adam states (DESIGN: order-0 floor), this is within 1 % of what any order-0
coder can reach. The CPU implementation is here (NumPy releases the GIL, so chunks run on threads); kernels.cu has the same bytes.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Plane:
    """`bits` of every element, packed; `codable` planes go to the codec, `has_sign` planes may be stored without the sign bit."""
    name: str
    bits: int
    codable: bool = False
    has_sign: bool = False

    def raw_bytes(self, elements):
        return (elements * self.bits + 7) // 8

    def unsigned_bytes(self, elements):
        return (elements * (self.bits - 1) + 7) // 8


@dataclass(frozen=True)
class Transform:
    """`width` bytes an element; the first plane is the coded one."""
    id: int
    name: str
    width: int
    planes: tuple[Plane, ...]

    def chunk_elements(self, chunk_bytes: int) -> int:
        """Elements whose coded plane is `chunk_bytes` bytes."""
        return chunk_bytes * 8 // self.planes[0].bits


_X8, _H8 = Plane("exponent", 8, codable=True), Plane("sign+mantissa", 8, has_sign=True)

WHOLE = Transform(0, "whole", 1, (Plane("bytes", 8, codable=True),))
SPLIT8 = Transform(1, "split8", 1, (Plane("exponent", 4, codable=True), Plane("sign+mantissa", 4, has_sign=True)))
SPLIT16 = Transform(2, "split16", 2, (_X8, _H8))
SPLIT32 = Transform(3, "split32", 4, (_X8, _H8, Plane("low", 16)))
SPLIT64 = Transform(4, "split64", 8, (_X8, _H8, Plane("low", 48)))

BY_ID = {t.id: t for t in (WHOLE, SPLIT8, SPLIT16, SPLIT32, SPLIT64)}

# By dtype name, so that dtypes which this torch does not have yet cost nothing. Complex numbers are pairs of floats.
_BY_DTYPE = {
    "float8_e4m3fn": SPLIT8, "float8_e5m2": SPLIT8, "float8_e4m3fnuz": SPLIT8, "float8_e5m2fnuz": SPLIT8,
    "bfloat16": SPLIT16, "float16": SPLIT16, "float32": SPLIT32, "float64": SPLIT64,
    "complex32": SPLIT16, "complex64": SPLIT32, "complex128": SPLIT64,
}


def for_dtype(name: str) -> Transform:
    """The transform for a dtype name such as `bfloat16`; integers, bools and bytes go through whole."""
    return _BY_DTYPE.get(name, WHOLE)


def split(transform: Transform, chunk: np.ndarray) -> list[np.ndarray]:
    """Planes, raw, of a chunk given as uint8 [elements * width]; the result may alias `chunk`."""
    if transform is WHOLE:
        return [chunk]
    if transform is SPLIT8:
        return [_pair(chunk >> 3 & 0x0f), _pair(chunk >> 4 & 0x08 | chunk & 0x07)]
    words = chunk.view(np.uint16).reshape(-1, transform.width // 2)
    top = words[:, -1]
    exponent = (top >> 7).astype(np.uint8)
    sign_mantissa = (top >> 8 & 0x80 | top & 0x7f).astype(np.uint8)
    low = [np.ascontiguousarray(words[:, :-1]).reshape(-1).view(np.uint8)] if transform.width > 2 else []
    return [exponent, sign_mantissa, *low]


def merge(transform: Transform, planes: list[np.ndarray], out: np.ndarray) -> None:
    """Inverse of `split`, into `out` uint8 [elements * width]. A plane given as None is all zero."""
    if transform is WHOLE:
        out[:] = 0 if planes[0] is None else planes[0]
        return
    if transform is SPLIT8:
        x, h = (np.zeros(len(out), np.uint8) if p is None else _unpair(p, len(out)) for p in planes)
        np.bitwise_or(x << 3 | (h & 0x08) << 4, h & 0x07, out=out)
        return
    words = out.view(np.uint16).reshape(-1, transform.width // 2)
    top = np.zeros(len(words), np.uint16)
    if planes[0] is not None:
        np.left_shift(planes[0], 7, out=top, dtype=np.uint16)
    if planes[1] is not None:
        h = planes[1].astype(np.uint16)
        top |= (h & 0x80) << 8
        top |= h & 0x7f
    words[:, -1] = top
    if transform.width > 2:
        words[:, :-1] = 0 if planes[2] is None else planes[2].view(np.uint16).reshape(words[:, :-1].shape)


def has_sign(transform: Transform, plane: np.ndarray) -> bool:
    """Whether any sign bit is set in a raw sign+mantissa plane."""
    return bool(np.bitwise_or.reduce(plane) & (0x88 if transform is SPLIT8 else 0x80)) if len(plane) else False


def drop_sign(transform: Transform, plane: np.ndarray, elements: int) -> np.ndarray:
    """Pack a sign+mantissa plane without its sign bits: 7 (8-bit floats: 3) bits an element, first element in the lowest bits."""
    values = _unpair(plane, elements) if transform is SPLIT8 else plane
    bits = transform.planes[1].bits - 1
    groups = np.zeros(-(-elements // 8) * 8, np.uint8)
    groups[:elements] = values
    x = groups.view(np.uint64)
    for step in (1, 2, 4):  # fold neighbours of step bytes onto one another, `step * bits` bits each
        low, gap = np.uint64(_mask(step * bits, 16 * step)), np.uint64(step * (8 - bits))
        x = x & low | (x >> gap) & np.uint64(_mask(step * bits, 16 * step) << (step * bits))
    return x.view(np.uint8).reshape(-1, 8)[:, :bits].reshape(-1)[:transform.planes[1].unsigned_bytes(elements)]


def restore_sign(transform: Transform, packed: np.ndarray, elements: int) -> np.ndarray:
    """Inverse of `drop_sign`: the raw plane, sign bits zero."""
    bits = transform.planes[1].bits - 1
    groups = np.zeros((-(-elements // 8), 8), np.uint8)
    tail = np.zeros(len(groups) * bits, np.uint8)
    tail[:len(packed)] = packed
    groups[:, :bits] = tail.reshape(-1, bits)
    x = groups.reshape(-1).view(np.uint64)
    for step in (4, 2, 1):
        low, gap = np.uint64(_mask(step * bits, 16 * step)), np.uint64(step * (8 - bits))
        x = x & low | (x & np.uint64(_mask(step * bits, 16 * step) << (step * bits))) << gap
    values = x.view(np.uint8)[:elements]
    return _pair(values) if transform is SPLIT8 else values


def _mask(ones: int, period: int) -> int:
    """64-bit mask with `ones` low bits set in every `period` bits."""
    return sum(((1 << ones) - 1) << at for at in range(0, 64, period))


def _pair(nibbles: np.ndarray) -> np.ndarray:
    """Two nibbles to a byte, the first in the low half; an odd last one alone."""
    paired = nibbles[0::2].copy()
    paired[:len(nibbles) // 2] |= nibbles[1::2] << 4
    return paired


def _unpair(paired: np.ndarray, elements: int) -> np.ndarray:
    nibbles = np.empty(len(paired) * 2, np.uint8)
    nibbles[0::2] = paired & 0x0f
    nibbles[1::2] = paired >> 4
    return nibbles[:elements]
