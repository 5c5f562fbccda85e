"""Bytes to disk: positional writes that finish what they start, and durability."""
from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Sequence

_IOV_MAX = os.sysconf("SC_IOV_MAX")


class Writer:
    """A new file, written at offsets. On a clean exit it is durable if `fsync`; on an exception it is left for the caller to remove."""

    def __init__(self, path, *, fsync: bool):
        self.path, self._fsync = Path(path), fsync

    def __enter__(self) -> "Writer":
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None and self._fsync:
                os.fsync(self._fd)
        finally:
            os.close(self._fd)

    def write_at(self, offset: int, buffers: Sequence) -> None:
        """Write all of `buffers` one after the other from `offset`; a short write, which is not an error, goes on."""
        pending = [memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes]
        while pending:
            done = os.pwritev(self._fd, pending[:_IOV_MAX], offset)
            offset += done
            while pending and done >= pending[0].nbytes:
                done -= pending.pop(0).nbytes
            if done:
                pending[0] = pending[0][done:]


def expect_room(path, nbytes: int) -> None:
    """Raise `OSError` (ENOSPC) if the file system of `path` has less than `nbytes` free: before the time is spent on writing."""
    status = os.statvfs(Path(path).parent)
    if status.f_bavail * status.f_frsize < nbytes:
        raise OSError(errno.ENOSPC, f"{nbytes} bytes are to be written, {status.f_bavail * status.f_frsize} are free", str(path))


def sync_directory(path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
