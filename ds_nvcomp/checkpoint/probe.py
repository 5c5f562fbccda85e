"""How fast a directory takes files and gives them back, by writing one as a save does."""
from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..archive import files
from ..config import Config
from ..errors import DirectoryError

GB = 1e9
FIRST, MOST = 16 << 20, 256 << 20  # bytes written at first, and at most
GROWTH = 4
SECONDS = 1.0                      # no larger file is begun when it would take the probe beyond this


@dataclass(frozen=True)
class DiskSpeed:
    """GB (1e9 bytes) a second of one process, measured on a file of `bytes`; `write` includes making it durable if `fsync`."""
    write: float
    read: float
    bytes: int
    fsync: bool


def probe(directory, config: Config | None = None, *, most: int = MOST, seconds: float = SECONDS) -> DiskSpeed:
    """Write a hidden file to `directory` and read it back from the disk, not from memory; nothing stays, also after a failure.

    The file has 16 MiB, and up to `most` bytes where `seconds` allow for it: on a slow target it takes as long as 16 MiB do. Its bytes
    are random, so that no file system can compress them or has seen them. Several processes that probe at once measure the share of each.
    `config` says whether files are made durable (without, the write speed is that of the page cache) and by how many threads.

    Raises `DirectoryError` (not a directory, no room), and the operating system's own errors.
    """
    config, directory = Config.of(config), Path(directory)
    if not directory.is_dir():
        raise DirectoryError("There is no such directory to measure. Name one that exists, on the file system of the checkpoints.",
                             path=str(directory))
    path = directory / f".ds_nvcomp-probe-{secrets.token_hex(4)}"
    size, began = min(FIRST, most), time.perf_counter()
    try:
        while True:
            took = _write(path, size, config)
            if size == most or time.perf_counter() - began + GROWTH * took > seconds:
                return DiskSpeed(size / GB / took, size / GB / _read(path), size, config.fsync)
            size = min(most, size * GROWTH)
    finally:
        path.unlink(missing_ok=True)


def _write(path: Path, nbytes: int, config: Config) -> float:
    """Seconds."""
    status = os.statvfs(path.parent)
    free = status.f_bavail * status.f_frsize
    if free < nbytes:
        raise DirectoryError(f"The file system has {free} bytes free, and measuring it takes {nbytes} for a moment. Make room, or name a "
                             "directory on another one.", path=str(path.parent))
    data = np.random.default_rng().integers(0, 1 << 64, -(-nbytes // 8), np.uint64).view(np.uint8)[:nbytes]
    began = time.perf_counter()
    with files.Writer(path, fsync=config.fsync, threads=config.write_threads) as file:
        file.write_at(0, [data])
    return time.perf_counter() - began


def _read(path: Path) -> float:
    """Seconds."""
    buffer = bytearray(files.WINDOW)
    with open(path, "rb", buffering=0) as file:
        os.fsync(file.fileno())  # only clean pages can be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.readinto(buffer):
            pass
        return time.perf_counter() - began
