"""What the sections share: the device, the ranks, a scratch directory; and `case`, which measures, guards and records."""
from __future__ import annotations

import contextlib
import gc
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
import traceback
from datetime import datetime, timedelta
from importlib import metadata
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent.parent
PACKAGES = ("deepspeed", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12", "nvidia-libnvcomp-cu13", "cupy-cuda13x", "cupy-cuda12x", "numpy",
            "zstandard", "isal", "zlib-ng")


class Skip(Exception):
    """Why something is not measured here."""


class Bench:
    def __init__(self, args):
        for name, value in dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29617").items():
            os.environ.setdefault(name, value)
        self.args = args
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            import deepspeed
            deepspeed.init_distributed(timeout=timedelta(seconds=120), verbose=False)
        self._deadline = time.monotonic() + args.limit
        # The same on all ranks of a run: they have one parent.
        self._scratch = Path(args.dir or tempfile.gettempdir(), f"ds_nvcomp_saves_{os.getppid() if self.world > 1 else os.getpid()}")
        self._cases: dict = {}
        self.result = {**machine(self), "arguments": vars(args), "sections": {}}
        out, name = Path(args.out), self.result["device"].replace(" ", "_") + (f"_x{self.world}" if self.world > 1 else "")
        self._path = out if out.suffix == ".json" else out / f"saves_{name}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)

    # -- measuring ------------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def section(self, name):
        """Record cases under `name`; whatever is raised is recorded too, and ends no more than the section."""
        entry = self.result["sections"][name] = {"cases": {}}
        self._cases = entry["cases"]
        began = time.perf_counter()
        try:
            yield
        except Exception as err:
            _note(entry, err)
        entry["seconds"] = round(time.perf_counter() - began, 2)
        self.release()
        self.write()

    def case(self, name, action, *, nbytes=None, prepare=lambda: None, repeats=None):
        """Measure `action`: once apart, then repeatedly; with `repeats=0` that once is all there is. The bytes it deals with make GB/s.

        The action may return a dict of numbers that are recorded beside the seconds it takes, or instead of them ("seconds").
        Returns the entry.
        """
        if not re.search(self.args.match, name):
            return {}
        entry = self._cases[name] = {"bytes": None if nbytes is None else int(nbytes)}
        repeats, samples, began, error = self.args.repeats if repeats is None else repeats, [], time.monotonic(), None
        while True:
            now = time.monotonic()
            enough = len(samples) > repeats or len(samples) >= 2 and now - began > self.args.budget
            if not self._all(error is None and not enough and now < self._deadline):
                break
            try:
                prepare()
                samples.append(self._sample(action))
            except Exception as err:
                error = err
        error = self._first(error) or (None if samples else Skip("out of time"))
        if error is not None:
            _note(entry, error)
        if samples:
            counted = samples[1:] or samples
            entry["first"], entry["samples"] = samples[0], samples[1:]
            entry["median"] = {key: statistics.median(s[key] for s in counted) for key in counted[0]}
            if nbytes:
                entry["GBps"] = nbytes / max(entry["median"]["seconds"], 1e-9) / 1e9
        self.write()
        return entry

    def _sample(self, action) -> dict:
        """The seconds are those of the slowest rank."""
        self.sync()
        self.barrier()
        began = time.perf_counter()
        try:
            own = action()
            self.sync()
        finally:  # also after a failure, of which the others do not know
            self.barrier()
        return {"seconds": time.perf_counter() - began, **(own or {})}

    def sync(self) -> None:
        if self.gpu:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        if self.world > 1:
            torch.distributed.barrier()

    def _all(self, yes: bool) -> bool:
        """Whether all ranks say so: they must do the same number of samples."""
        if self.world > 1:
            flag = torch.tensor([int(yes)], device=self.device)
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MIN)
            return bool(flag.item())
        return yes

    def _first(self, error):
        """The error of this rank, else that of the first rank that has one."""
        if self.world > 1:
            texts = [None] * self.world
            torch.distributed.all_gather_object(texts, error and f"{type(error).__name__}: {error}"[:1000])
            failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
            return error or (RuntimeError(failed[0]) if failed else None)
        return error

    def release(self) -> None:
        """Give back cached memory, so that what is measured next starts alike."""
        gc.collect()
        if self.gpu:
            torch.cuda.empty_cache()
            getattr(torch._C, "_host_emptyCache", lambda: None)()

    # -- files ----------------------------------------------------------------------------------------------------------------

    def fresh(self, name="files") -> Path:
        """An empty directory, the same one on all ranks."""
        path = self._scratch / name
        self.barrier()
        if self.rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        self.barrier()
        return path

    def close(self) -> None:
        if self.rank == 0:
            shutil.rmtree(self._scratch, ignore_errors=True)
            self.write()

    def write(self) -> None:
        if self.rank == 0:
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.result, indent=1) + "\n")
            part.replace(self._path)

    # -- reporting ------------------------------------------------------------------------------------------------------------

    def say(self, text) -> None:
        if self.rank == 0:
            print(text, flush=True)


def _note(entry, err) -> None:
    if isinstance(err, Skip):
        entry["skipped"] = str(err)
    else:
        entry["error"] = f"{type(err).__name__}: {err}"[:1000]
        entry["trace"] = "".join(traceback.format_exception(err, limit=-4)).splitlines()[:20]


def machine(bench) -> dict:
    from ds_nvcomp import __version__
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ds_nvcomp": __version__}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    name, driver = "cpu", None
    if bench.gpu:
        name = torch.cuda.get_device_name(bench.device)
        with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
            driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True,
                                    timeout=20).stdout.split()[0]
    return {"date": datetime.now().isoformat(timespec="seconds"), "device": name, "ranks": bench.world,
            "cpus": len(os.sched_getaffinity(0)), "driver": driver, "versions": versions}
