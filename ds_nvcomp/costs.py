"""What checkpoints cost a training job: arithmetic, without a GPU or a disk.

    save seconds   stored bytes / bandwidth to storage; encoding overlaps, and decides only where it is slower
    stall          while GPUs wait. Synchronous: the whole save. Asynchronous: until the state is in host memory, and for what a
                   save lasts longer than the interval, since the next one waits for it
    a month        30 days of saves that begin every interval
"""
from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import ConfigError

MONTH = 30 * 86400.0  # seconds
RATIO = 0.81          # stored / raw of a whole ZeRO-2 checkpoint in bf16 with Adam, measured on an H200 (deflate: 0.803)
SNAPSHOT = 55.0       # GB/s of raw tensors a GPU takes to host memory: what plain copies over PCIe 5 reach, though less is copied
BYTES_PER_PARAM = 14  # ZeRO-1 and 2 with Adam in bf16: 4 master, 4 + 4 moments, 2 weights. ZeRO-3: 12
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Job:
    """`checkpoint` GB (1e9 bytes) raw, saved every `interval` seconds by `gpus` at `gpu_hour` each, through `bandwidth` GB/s in total.

    Raises `ConfigError` for what is not above zero.
    """
    checkpoint: float
    gpus: int
    gpu_hour: float
    interval: float
    bandwidth: float

    def __post_init__(self):
        for name, unit in (("checkpoint", "GB"), ("gpus", "GPUs"), ("gpu_hour", "an hour"), ("interval", "seconds"), ("bandwidth", "GB/s")):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"The cost model's {name.replace('_', ' ')} is {value:g} {unit}; it must be a number above 0.")


@dataclass(frozen=True)
class Cost:
    """Of one way to save: GB stored, seconds from begin to end of a save, seconds of it that GPUs wait, and sums of a month."""
    way: str
    stored: float
    save_seconds: float
    stall_seconds: float
    saves: float
    gpu_hours: float
    money: float


def costs(job: Job, *, ratio: float = RATIO, snapshot: float = SNAPSHOT) -> list[Cost]:
    """Uncompressed and synchronous, compressed and synchronous, compressed and asynchronous. `snapshot` is in GB/s of raw tensors a GPU."""
    host = job.checkpoint / job.gpus / snapshot
    plain = max(job.checkpoint / job.bandwidth, host)
    compressed = max(job.checkpoint * ratio / job.bandwidth, host)
    behind = host + job.checkpoint * ratio / job.bandwidth
    return [_cost(job, "uncompressed, sync", 1.0, plain, plain),
            _cost(job, "compressed, sync", ratio, compressed, compressed),
            _cost(job, "compressed, async", ratio, behind, min(behind, host + max(0.0, behind - job.interval)))]


def _cost(job, way, ratio, save_seconds, stall_seconds) -> Cost:
    saves = MONTH / max(job.interval, save_seconds)
    hours = saves * stall_seconds * job.gpus / 3600
    return Cost(way, job.checkpoint * ratio, save_seconds, stall_seconds, saves, hours, hours * job.gpu_hour)


def duration(text: str) -> float:
    """Seconds of `90s`, `30m`, `2h`, `1.5d`. Raises `ConfigError`."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([smhd])\s*", text, re.ASCII)
    if match is None:
        raise ConfigError(f"{text!r} is no duration: write a number and s, m, h or d, such as 90s, 30m or 2h.")
    seconds = float(match[1]) * _UNITS[match[2]]
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{text!r} is no interval between saves: it must be longer than 0 s, such as 90s, 30m or 2h.")
    return seconds
