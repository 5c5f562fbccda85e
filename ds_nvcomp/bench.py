"""`ds-nvcomp bench`: what this machine and a directory can do, and what to choose for them."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from .checkpoint.choose import CANDIDATES, Choice, Target, choose
from .checkpoint.probe import DiskSpeed, probe
from .config import Config
from .pipeline import speeds
from .pipeline.threads import count


@dataclass(frozen=True)
class Bench:
    """`copy` is GB/s from the GPU to the host, None on a CPU; `disk` and `choice` are None where no directory was named."""
    device: str
    on_gpu: bool
    speeds: list[speeds.Speed]
    copy: float | None
    disk: DiskSpeed | None
    choice: Choice | None


def run(path: Path | None, config: Config, share: float = math.inf) -> Bench:
    """Measure the codecs and, where it is named, the directory `path`: a few seconds, nothing stays. `share` is the GB/s of storage that
    a process has at most when all of its job save, whatever `path` takes from this one.

    Raises `CodecUnavailableError`, `DirectoryError` and the operating system's own errors.
    """
    disk = None if path is None else probe(path, config)  # first, for it is what a wrong path fails
    device = speeds.default_device(config)
    rows = list(speeds.measure(speeds.settings(config, device, tuned=CANDIDATES), device))
    copy = speeds.copy_speed(device)
    choice = choose(rows, Target(min(disk.write, share), copy, config.behind)) if disk else None
    on_gpu = device.type == "cuda"
    threads = config.threads or count(0)
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {threads} thread{'' if threads == 1 else 's'}"
    return Bench(name, on_gpu, rows, copy, disk, choice)
