"""Starts a group of cases in real processes, one a rank, and collects what they report."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def environment(**more) -> dict[str, str]:
    """A child's environment: the CPU accelerator, one thread. `PYTHONPATH` of this process stays, it names the checkout."""
    return {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
            **{key: str(value) for key, value in more.items()}}


class Group:
    """The `ranks` processes that run one group of cases of worker.py in `out`."""

    def __init__(self, name: str, out: Path, ranks: int = 2, **env):
        self.out, self.ranks = out, ranks
        out.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.processes = []
        for rank in range(ranks):
            with open(out / f"rank{rank}.log", "wb") as log:
                self.processes.append(subprocess.Popen(
                    [sys.executable, str(HERE / "worker.py"), name, str(out)], stdout=log, stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL, start_new_session=True, env=environment(
                        RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1",
                        MASTER_PORT=self.port, **env)))

    def wait(self, seconds: float = 400) -> "Group":
        """Until all have ended; a group that hangs is killed, and its cases that did not report count as failed."""
        end = time.monotonic() + seconds
        try:
            while time.monotonic() < end and any(process.poll() is None for process in self.processes):
                time.sleep(0.05)
                if any(process.poll() for process in self.processes):  # one crashed: the others wait for it in vain
                    end = min(end, time.monotonic() + 30)
        finally:
            self.kill()
        return self

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{self.port}_*"):
            left.unlink(missing_ok=True)  # what DeepSpeed's CPU all-reduce cannot unlink when it is killed

    def log(self, rank: int, lines: int = 60) -> str:
        return "\n".join((self.out / f"rank{rank}.log").read_text(errors="replace").splitlines()[-lines:])

    def check(self, case: str) -> list:
        """What `case` returned on each rank; fails with the traceback, or the log of a rank that never got there."""
        results = []
        for rank in range(self.ranks):
            path = self.out / f"{case}.rank{rank}.json"
            assert path.exists(), f"{case}: rank {rank} did not report. Its log:\n{self.log(rank)}"
            result = json.loads(path.read_text())
            assert result["error"] is None, f"{case}, rank {rank}:\n{result['error']}\nIts log:\n{self.log(rank, 15)}"
            results.append(result["returned"])
        return results
