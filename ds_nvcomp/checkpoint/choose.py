"""Which codec, chunk size and threads save soonest: a decision from measured figures, and nothing else.

Of a gigabyte of tensors, with e = encode speed into host memory, r = ratio, c = copy speed to the host, w = write speed:

    to host memory   host  = max(1/e, r/c)
    sync saves       stall = max(host, r/w)     written while the rest is encoded; total is the same
    async saves      stall = host               total = host + r/w, the writing in the background
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable

from ..pipeline.speeds import Speed

CANDIDATES = ("deflate", "none", "zstd", "ans")  # what measures alike is decided by this order: who can read it, and for how long
TOLERANCE = 0.05        # of the least stall, and of the least total: closer ones are noise
RATIO_TOLERANCE = 0.01


@dataclass(frozen=True)
class Target:
    """Where saves go: `write` GB/s of this process to the files, `copy` GB/s from its device to the host (None: tensors are there)."""
    write: float
    copy: float | None = None
    asynchronous: bool = False


@dataclass(frozen=True)
class Choice:
    """`stall` and `total` are seconds a GB (1e9 bytes) of tensors: of waiting training, and until files are written."""
    speed: Speed
    stall: float
    total: float
    reason: str = ""


def rate(speed: Speed, target: Target) -> Choice:
    """What saving by one setting would cost."""
    host = max(1 / speed.encode, speed.ratio / target.copy if target.copy else 0)
    write = speed.ratio / target.write
    return Choice(speed, host, host + write) if target.asynchronous else Choice(speed, max(host, write), max(host, write))


def choose(speeds: Iterable[Speed], target: Target) -> Choice:
    """The setting with the least stall; among those within a few percent of it the least total, then the fewest bytes, then the first of
    `CANDIDATES`. Other codecs are not considered; at least one row of a candidate is needed."""
    rated = [rate(speed, target) for speed in speeds if speed.codec in CANDIDATES]
    left = rated
    for cost, tolerance in ((lambda choice: choice.stall, TOLERANCE), (lambda choice: choice.total, TOLERANCE),
                            (lambda choice: choice.speed.ratio, RATIO_TOLERANCE)):
        least = min(map(cost, left))
        left = [choice for choice in left if cost(choice) <= least * (1 + tolerance)]
    best = min(left, key=lambda choice: CANDIDATES.index(choice.speed.codec))
    return replace(best, reason=_reason(best, rated, target))


def _reason(best, rated, target) -> str:
    speed = best.speed
    limits = {f"the target takes {target.write:.3g} GB/s": 0 if target.asynchronous else speed.ratio / target.write,
              f"encoding into host memory reaches {speed.encode:.3g} GB/s": 1 / speed.encode}
    if target.copy:
        limits[f"copies to the host reach {target.copy:.3g} GB/s"] = speed.ratio / target.copy
    others = {}
    for choice in sorted(rated, key=lambda choice: choice.stall):
        if choice.speed.codec != speed.codec:
            others.setdefault(choice.speed.codec, f"; {choice.speed.codec} {choice.stall:.3g} s at ratio {choice.speed.ratio:.2f}")
    how = f"{speed.codec}, chunks of {speed.chunk_bytes >> 10} KiB" + (f", {speed.threads} threads" if speed.threads else "")
    return (f"{how}: training waits {best.stall:.3g} s for a GB of tensors ({'async' if target.asynchronous else 'sync'} saves), since "
            f"{max(limits, key=limits.get)} and the ratio is {speed.ratio:.2f}{''.join(others.values())}")
