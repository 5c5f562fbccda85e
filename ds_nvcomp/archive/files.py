"""Bytes to disk: parallel positional writes that finish what they start, and durability."""
from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Sequence

import numpy as np

_TMPFS_MAGIC = 0x01021994  # statfs(2)
WINDOW = 8 << 20  # bytes of a file that go to disk at once, from a multiple of it
_IOV_MAX = os.sysconf("SC_IOV_MAX")
_LONG_NAME = 200  # bytes


class Writer:
    """A new file, written at offsets while the caller goes on: a window of it goes to disk, on threads, when all of it is there.

    On a clean exit all of it is written, and durable if `fsync`; on an exception it is left for the caller to remove. Buffers must
    not change before. Durable files are written past the page cache where the file system allows it (O_DIRECT): what is to be on
    disk anyway gains nothing from a copy in memory (2.4 against 1.7 GB/s with fsync on the disk of an H200 machine). On tmpfs, where
    writes to one file wait for one another, windows are mapped (6.9 against 3.5 GB/s).
    """

    def __init__(self, path, *, fsync: bool, threads: int = 4):
        self.path, self._fsync, self._threads = Path(path), fsync, threads
        self._windows: dict[int, list[tuple[int, memoryview]]] = defaultdict(list)
        self._filled: dict[int, int] = defaultdict(int)
        self._running: list[Future] = []
        self._given = self._written = 0
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._direct: int | None = None
        self._local = threading.local()

    def __enter__(self) -> "Writer":
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                for number in sorted(self._windows):
                    self._write(number, self._windows[number], _plainly)
                for running in self._running:
                    running.result()
                if self._fsync:
                    os.fsync(self._fd)
        finally:
            if self._pool is not None:  # none may still write when the caller removes the file
                self._pool.shutdown(wait=True, cancel_futures=True)
            for fd in (self._direct, self._fd):
                if fd is not None:
                    os.close(fd)

    def write_at(self, offset: int, buffers: Sequence) -> None:
        """Write all of `buffers` one after the other from `offset`, now or before the end. Raises what an earlier write has raised."""
        for buffer in buffers:
            view = memoryview(buffer)
            if not view.nbytes:
                continue
            view = view.cast("B")
            self._given += view.nbytes
            while view.nbytes:
                number, inside = divmod(offset, WINDOW)
                part = view[:WINDOW - inside]
                self._windows[number].append((inside, part))
                self._filled[number] += part.nbytes
                if self._filled[number] == WINDOW:
                    self._start(number)
                offset, view = offset + part.nbytes, view[part.nbytes:]

    def expect_room(self, nbytes: int) -> None:
        """Raise `OSError` (ENOSPC) if the file system has no room for `nbytes` more: before the time is spent on writing."""
        status = os.statvfs(self.path.parent)
        free, nbytes = status.f_bavail * status.f_frsize, nbytes + self._given - self._written
        if free < nbytes:
            raise OSError(errno.ENOSPC, f"{nbytes} bytes are to be written, {free} are free", str(self.path))

    def _start(self, number):
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="ds_nvcomp write")
            self._way = self._best_way()
        while self._running and self._running[0].done():
            self._running[0].result()
            self._running.pop(0)  # one that failed stays, so that the end fails as well, should the caller go on to it
        self._running.append(self._pool.submit(self._write, number, self._windows.pop(number), self._way))

    def _best_way(self):
        """How whole windows are written."""
        if _file_system(self._fd) == _TMPFS_MAGIC:
            return _mapped
        if self._fsync:
            try:
                self._direct = os.open(self.path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
                return self._directly
            except OSError:  # this file system has no such thing
                pass
        return _plainly

    def _write(self, number, pieces, way):
        for start, views in _runs(pieces):  # one, but for a window with holes, which is not whole
            way(self._fd, views, number * WINDOW + start)
        with self._lock:
            self._written += sum(view.nbytes for _, view in pieces)

    def _directly(self, fd, views, offset):
        if not hasattr(self._local, "buffer"):
            self._local.buffer = np.frombuffer(mmap.mmap(-1, WINDOW), np.uint8)  # aligned, as the kernel asks for
        _gather(views, self._local.buffer)
        try:
            _plainly(self._direct, [self._local.buffer], offset)
        except OSError as err:
            if err.errno != errno.EINVAL:  # what a device with larger blocks says
                raise
            _plainly(fd, views, offset)


def _runs(pieces):
    """(start, views) of each stretch of (start, view) without a hole."""
    runs, end = [], None
    for start, view in sorted(pieces, key=lambda piece: piece[0]):
        if start != end:
            runs.append((start, []))
        runs[-1][1].append(view)
        end = start + view.nbytes
    return runs


def _gather(views, whole):
    at = 0
    for view in views:
        whole[at:at + view.nbytes] = np.frombuffer(view, np.uint8)  # without the GIL
        at += view.nbytes


def _mapped(fd, views, offset):
    os.posix_fallocate(fd, offset, WINDOW)  # a full file system says so here, and not by a signal
    with mmap.mmap(fd, WINDOW, offset=offset) as window:
        whole = np.frombuffer(window, np.uint8)
        _gather(views, whole)
        del whole


def _file_system(fd: int) -> int:
    """`f_type` of statfs(2), which os.statvfs leaves out."""
    status = (ctypes.c_long * 32)()
    return status[0] if ctypes.CDLL(None).fstatfs(fd, status) == 0 else 0


def _plainly(fd: int, buffers: Sequence, offset: int) -> None:
    """A short write, which is not an error, goes on."""
    pending = [memoryview(buffer).cast("B") for buffer in buffers]
    while pending:
        done = os.pwritev(fd, pending[:_IOV_MAX], offset)
        offset += done
        while pending and done >= pending[0].nbytes:
            done -= pending.pop(0).nbytes
        if done:
            pending[0] = pending[0][done:]


@contextmanager
def replacing(path, *, fsync: bool, name: str | None = None):
    """A hidden path beside `path` to write a file to. At the end it takes the name `path`, durably if `fsync`; after an exception it is
    gone, and what was at `path` is there. Raises OSError.

    With `name` that is the path's name, the same each time. Else nobody else has the name, so several may write at once; the file is locked
    as long as it is written, and those that a killed process left for the same `path` are removed first.
    """
    path = Path(path)
    lock = None
    try:
        if name is None:
            _remove_abandoned(path)
            part, lock = _begin_part(path)
        else:
            part = path.with_name(name)
        try:
            yield part
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    finally:
        if lock is not None:  # not before the part is gone
            os.close(lock)
    if fsync:
        sync_directory(path.parent)


def _stem(path: Path) -> str:
    """How the names of all parts of `path` begin."""
    name = os.fsencode(path.name)
    if len(name) > _LONG_NAME:  # a file system takes 255 bytes
        name = hashlib.sha256(name).hexdigest().encode()
    return f".ds_nvcomp-{os.fsdecode(name)}-"


def _begin_part(path: Path) -> tuple[Path, int]:
    """An empty part of `path`, and the descriptor that holds its lock."""
    while True:
        part = path.with_name(f"{_stem(path)}{secrets.token_hex(4)}.part")
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        try:
            if _lock(fd) and os.fstat(fd).st_nlink:
                return part, fd
        except OSError:  # this file system has no locks, so nobody removes the part
            return part, fd
        os.close(fd)  # another save took it for abandoned, between the two calls
        part.unlink(missing_ok=True)


def _remove_abandoned(path: Path) -> None:
    """Remove the parts of `path` that nobody writes any more. Best effort: a save does not fail for what another one left."""
    name = re.compile(re.escape(_stem(path)) + r"[0-9a-f]{8}\.part")
    try:
        parts = [part for part in os.listdir(path.parent) if name.fullmatch(part)]
    except OSError:  # a directory that may be written to, but not listed
        return
    for part in map(path.with_name, parts):
        try:
            fd = os.open(part, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # gone, or somebody else's
            continue
        try:
            if _lock(fd):
                part.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(fd)


def _lock(fd: int) -> bool:
    """Lock an open file unless somebody else has. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def sync_directory(path) -> None:
    """Make renames and new names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
