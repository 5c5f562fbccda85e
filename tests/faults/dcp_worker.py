"""Ranks that save by dcp.save or dcp.async_save and NvcompWriter, and break at a named step: worker.py's server with other ranks."""
from __future__ import annotations

import errno
import os
import resource
import signal
import time
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

if __name__ == "__main__":
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1", DS_ACCELERATOR="cpu",
                      CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ds_nvcomp.dcp
from ds_nvcomp.archive import files
from ds_nvcomp.checkpoint import metadata_seal
from ds_nvcomp.dcp import NvcompWriter
from tests.faults import worker
from tests.faults.worker import failing, replaced


def numbers(version: int) -> dict:
    """What version `version` holds, whole."""
    generator = torch.Generator().manual_seed(version)
    return {"plain": torch.randn(6000, generator=generator), "rows": torch.randn(101, 60, generator=generator),
            "half": torch.randn(900, generator=generator).bfloat16(), "step": version, "text": f"version {version} " * 20}


def state(version: int, world: int) -> dict:
    found = numbers(version)
    return {**found, "rows": distribute_tensor(found["rows"], init_device_mesh("cpu", (world,)), [Shard(0)])}


class Steps(worker.Steps):
    """Those of a DCP save. Threads of torch's writer come to them too."""

    def install(self) -> None:
        for name in ("prepare_local_plan", "prepare_global_plan", "write_data", "finish"):
            self.around(NvcompWriter, name, name)
        for name in ("reduce_scatter", "all_reduce"):
            self.around(_DistWrapper, name, name, lambda wrapper, step, *args, name=name: f"{name} {step}")
        self.around(ds_nvcomp.dcp, "encode_items", "encode_items")
        self.around(metadata_seal, "seal_file", "seal_file")
        self.around(files, "sync_directory", "sync_directory")
        self.around(os, "replace", "replace")
        self.around(os, "fsync", "fsync")
        self.around(Path, "unlink", "unlink")
        write_item = filesystem._write_item

        def half_written(transforms, stream, data, *args):
            self.at("write_item:before")
            if self.due("write_item:midway"):
                whole = data.getbuffer()
                stream.write(whole[:len(whole) // 2])
                stream.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            done = write_item(transforms, stream, data, *args)
            self.at("write_item:after")
            return done
        filesystem._write_item = half_written


# -- storages that fail ---------------------------------------------------------------------------------------------------------

class _Full:
    """A stream that fails at its nth write."""

    def __init__(self, stream, number, nth):
        self._stream, self._number, self._left = stream, number, nth

    def write(self, data):
        self._left -= 1
        if self._left <= 0:
            self._stream.write(bytes(data)[:len(data) // 2])
            raise OSError(self._number, os.strerror(self._number))
        return self._stream.write(data)

    def __getattr__(self, name):
        return getattr(self._stream, name)


def _full_stream(number, nth, ending):
    def make(original):
        @contextmanager
        def create_stream(fs, path, mode):
            with original(fs, path, mode) as stream:
                yield _Full(stream, number, nth) if "w" in mode and str(path).endswith(ending) else stream
        return create_stream
    return make


@contextmanager
def _limited(size):
    """No file may be larger, by the kernel: a write is cut short there, and the next one fails."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


FAULTS = {
    "enospc_first_item": lambda: replaced(filesystem.FileSystem, "create_stream", _full_stream(errno.ENOSPC, 1, ".distcp")),
    "eio_second_item": lambda: replaced(filesystem.FileSystem, "create_stream", _full_stream(errno.EIO, 2, ".distcp")),
    "enospc_metadata": lambda: replaced(filesystem.FileSystem, "create_stream", _full_stream(errno.ENOSPC, 1, ".metadata.tmp")),
    "file_size_limit": lambda: _limited(9000),
    "eio_fsync": lambda: replaced(os, "fsync", failing(errno.EIO)),
    "enospc_seal": lambda: replaced(metadata_seal, "seal_file", failing(errno.ENOSPC)),
    "eio_replace": lambda: replaced(os, "replace", failing(errno.EIO)),
    "enospc_mkdir": lambda: replaced(os, "mkdir", failing(errno.ENOSPC)),
    "memory_error": lambda: replaced(ds_nvcomp.dcp, "encode_items", worker._raising(MemoryError("made up"))),
    "codec_library_raises": lambda: replaced(ds_nvcomp.dcp, "encode_items", worker._raising(RuntimeError("CUDA error: made up"))),
}


# -- one rank -------------------------------------------------------------------------------------------------------------------

def run_rank(job: dict, rank: int) -> None:
    out, world = Path(job["out"]), job["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(out / "store"), world), rank=rank, world_size=world,
                            timeout=timedelta(seconds=60))
    steps = Steps(job["kill"]["step"] if job.get("kill", {}).get("rank") == rank else None)
    if "kill" in job or job.get("trace"):
        steps.install()
    if job.get("staged"):  # as if the tensors were on a GPU
        ds_nvcomp.dcp._is_encoded_here = lambda value: isinstance(value, torch.Tensor)
    results = []
    for index, save in enumerate(job["saves"]):
        value, began, result = state(save["version"], world), time.monotonic(), {"error": None, "message": ""}
        writer = NvcompWriter(job["directory"], {"min_bytes": 0, "threads": 1, "device": "cpu"}, **save.get("writer", {}))
        with ExitStack() as stack:
            for ranks, kind in save.get("faults", []):
                if rank in ranks:
                    stack.enter_context(FAULTS[kind]())
            steps.armed = index == len(job["saves"]) - 1
            try:
                if job.get("async"):
                    dcp.async_save(value, storage_writer=writer).result()
                else:
                    dcp.save(value, storage_writer=writer)
            except BaseException as err:  # CheckpointException is none of Exception
                result.update(error=type(err).__name__, message=str(err))
            steps.armed = False
        results.append({**result, "seconds": time.monotonic() - began})
        worker._write(out / f"rank{rank}.json", {"results": results, "trace": steps.trace, "events": []})
        if job.get("snapshots"):
            store = dist.distributed_c10d._get_default_store()
            worker._meet(store, f"end{index}", world)
            if rank == 0 and Path(job["directory"]).exists():
                worker.shutil.copytree(job["directory"], out / f"after{index}")
            worker._meet(store, f"copied{index}", world)


if __name__ == "__main__":
    worker.run_rank = run_rank
    worker.serve()
