"""Runs rounds of worker.py, and judges what they leave in a save_dir."""
from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import Future
from pathlib import Path

import torch

import ds_nvcomp
from ds_nvcomp.checkpoint.verify import verify_tree

from . import worker

WORKER = Path(worker.__file__)


class Server:
    """The warm process. `run(job)` may be called from several threads at a time."""

    def __init__(self, program: Path = WORKER):
        root = str(WORKER.parents[2])
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])})
        assert json.loads(self._process.stdout.readline()) == {"ready": True}
        self._replies: dict[int, Future] = {}
        self._ids, self._lock = itertools.count(), threading.Lock()
        self.block: dict = {}  # keys of the configuration, for all jobs
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._process.stdout:
            reply = json.loads(line)
            self._replies.pop(reply["id"]).set_result(reply)

    def run(self, job: dict) -> "Round":
        """Run the saves of `job` on its ranks. `out` must be a new directory."""
        job = {"timeout": 4.0, **job, "block": {**self.block, **job.get("block", {})}, "id": next(self._ids)}
        Path(job["out"]).mkdir(parents=True)
        reply = self._replies[job["id"]] = Future()
        with self._lock:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        return Round(job, reply.result(worker.PATIENCE + 30))

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)


class Round:
    """How the ranks of one job ended. `results[rank]` has an entry for each save that the rank came to the end of."""

    def __init__(self, job, reply):
        self.job, self.exits, self.hung = job, reply["exits"], reply["hung"]
        self.out, self.world = Path(job["out"]), job["world"]
        reports = [self._report(rank) for rank in range(self.world)]
        self.results = [report["results"] for report in reports]
        self.traces = [report["trace"] for report in reports]
        self.events = sorted(event for report in reports for event in report["events"])  # of the last save, on all ranks
        assert not self.hung, f"ranks hang; exits {self.exits}\n{self.logs()}"

    def _report(self, rank):
        path = self.out / f"rank{rank}.json"
        return json.loads(path.read_text()) if path.exists() else {"results": [], "trace": [], "events": []}

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n" + (self.out / f"rank{rank}.log").read_text(errors="replace")[-3000:]
                         for rank in range(self.world))

    def expect(self, save: int, *, error: str | None, ranks=None) -> list[dict]:
        """The results of one save on `ranks` (all), each of which ended with `error`, or well for None."""
        found = []
        for rank in range(self.world) if ranks is None else ranks:
            assert len(self.results[rank]) > save, f"rank {rank} did not report save {save}: exits {self.exits}\n{self.logs()}"
            found.append(self.results[rank][save])
            assert found[-1]["error"] == error, f"rank {rank}, save {save}: {found[-1]}\n{self.logs()}"
        return found


# -- what is in a save_dir ----------------------------------------------------------------------------------------------------

def same_bits(a, b) -> bool:
    """Whether two states are of one structure, and each tensor of one dtype, shape and the same bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return a == b


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def version_in(directory: Path, world: int, extras: dict[int, dict[int, int]] = {}) -> int:
    """The one version of which every rank's file is in `directory`, bit for bit; with nothing hidden to help. `extras` are
    {version: {rank: bytes}}, where a version was saved with more."""
    found = {}
    with tempfile.TemporaryDirectory() as alone:
        visible = shutil.copytree(directory, Path(alone) / directory.name, ignore=shutil.ignore_patterns(".*"))
        for rank in range(world):
            for name in worker.states(0, rank, world):
                state = ds_nvcomp.load(visible / name, map_location="cpu", weights_only=False)
                version = state["version"] if "module" in state else state["optimizer_state_dict"]["version"]
                expected = worker.states(version, rank, world, extras.get(version, {}).get(rank, 0))[name]
                assert same_bits(state, expected), f"{directory / name}: not what was saved as version {version}"
                found[name] = version
    assert len(set(found.values())) == 1, f"{directory}: files of different saves: {found}"
    return version


def hidden(save_dir: Path) -> list[str]:
    return sorted(str(path.relative_to(save_dir)) for path in save_dir.rglob(".*"))


def check(save_dir: Path, world: int, **kwargs) -> dict[str, int]:
    """{tag: version} of all that is visible in `save_dir`, plus "latest": the tag it names. Each tag is one whole save, and
    `verify` has no complaint."""
    if all(path.name.startswith(".") for path in save_dir.iterdir()):
        return {"latest": None}
    problems = verify_tree(save_dir)
    assert not problems, "\n".join(map(str, problems))
    found = {path.name: version_in(path, world, **kwargs) for path in save_dir.iterdir()
             if path.name != "latest" and not path.name.startswith(".")}
    latest = save_dir / "latest"
    found["latest"] = latest.read_text() if latest.exists() else None
    assert found["latest"] is None or found["latest"] in found, f"`latest` names {found['latest']!r}: there are {found}"
    return found
