"""GB/s to a file: our Writer, and plain parallel writes of 8 MiB blocks, buffered and past the page cache."""
from __future__ import annotations

import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import torch

from ds_nvcomp.archive.files import Writer

from .data import SLAB

BLOCK = 8 << 20
THREADS = (1, 4, 8)


def run(bench) -> None:
    slabs = random_slabs(bench, max(1, round(bench.args.bytes / SLAB)))
    nbytes = len(slabs) * SLAB

    def measure(name, path, write, *args, **keys):
        try:
            bench.case(name, lambda: write(path, slabs, *args, **keys), nbytes=nbytes, prepare=lambda: path.unlink(missing_ok=True))
        finally:
            path.unlink(missing_ok=True)

    disk = bench.fresh() / "file"
    for threads in (4, 8):
        for fsync in (True, False):
            measure(f"disk: ours, {threads} threads, fsync {'on' if fsync else 'off'}", disk, ours, threads, fsync=fsync)
    for direct, name in ((False, "pwrite"), (True, "O_DIRECT")):
        for threads in THREADS:
            measure(f"disk: {name} and fsync, {threads} threads", disk, pwrite, threads, fsync=True, direct=direct)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        for threads in (4, 8):
            measure(f"tmpfs: ours, {threads} threads", Path(shm, "file"), ours, threads)
        measure("tmpfs: ours, 4 threads, fsync on", Path(shm, "file"), ours, 4, fsync=True)
        for threads in THREADS:
            measure(f"tmpfs: pwrite, {threads} threads", Path(shm, "file"), pwrite, threads)


def random_slabs(bench, count) -> list[np.ndarray]:
    """Random bytes on page boundaries, pinned where there is a GPU: what the encoder hands to the writer."""
    slabs = []
    for _ in range(count):
        slab = torch.empty(SLAB, dtype=torch.uint8, pin_memory=True) if bench.gpu else \
            torch.frombuffer(mmap.mmap(-1, SLAB), dtype=torch.uint8)
        slab.copy_(torch.randint(-1 << 63, (1 << 63) - 1, (SLAB // 8,), device=bench.device).view(torch.uint8))
        slabs.append(slab.numpy())
    return slabs


def ours(path, slabs, threads, fsync=False) -> None:
    with Writer(path, fsync=fsync, threads=threads) as file:
        for i, slab in enumerate(slabs):
            file.write_at(i * SLAB, [slab])


def pwrite(path, slabs, threads, fsync=False, direct=False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0))
    blocks, lock, failures = iter(range(0, len(slabs) * SLAB, BLOCK)), threading.Lock(), []

    def work():
        try:
            while not failures:
                with lock:
                    offset = next(blocks, None)
                if offset is None:
                    return
                view = memoryview(slabs[offset // SLAB])[offset % SLAB:offset % SLAB + BLOCK]
                while view.nbytes:
                    done = os.pwrite(fd, view, offset)
                    view, offset = view[done:], offset + done
        except OSError as err:
            failures.append(err)
    workers = [threading.Thread(target=work) for _ in range(threads)]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if failures:
            raise failures[0]
        if fsync:
            os.fsync(fd)
    finally:
        os.close(fd)
