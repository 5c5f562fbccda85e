"""One training run of the demo: its processes, what they log, and their end, natural or by SIGKILL."""
from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("train.py")
# Seconds without a step before a run counts as stuck; DeepSpeed compiles for up to a minute before the first one.
SILENCE = 240.0


class RunError(RuntimeError):
    """A run did not go as it should; the message has the end of the log of the process that failed."""


class Run:
    """`ranks` processes of the training script on this machine, each the leader of a process group of its own.

    They are started one by one, not by torchrun, so that nothing stands between them and a SIGKILL.
    """

    def __init__(self, directory: Path, ranks: int, environment: dict[str, str], arguments: list[str]):
        self.directory, self.ranks = directory, ranks
        directory.mkdir(parents=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.began = time.perf_counter()
        self.processes = []
        try:
            for rank in range(ranks):
                env = {**os.environ, **environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port),
                       "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
                with open(self._log(rank), "wb") as log:
                    self.processes.append(subprocess.Popen(
                        [sys.executable, str(SCRIPT), "--events", str(directory), *arguments], env=env,
                        stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
        except BaseException:
            self.kill()
            raise

    def _log(self, rank: int) -> Path:
        return self.directory / f"rank{rank}.log"

    def events(self, rank: int) -> list[dict]:
        """What this rank has logged so far. The last line of a killed process may be cut off."""
        path = self.directory / f"rank{rank}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def step(self) -> int:
        """The last step that rank 0 has logged."""
        return max((event["step"] for event in self.events(0) if event["event"] == "step"), default=0)

    def wait(self, kill_after: int | None = None, progress=lambda step: None) -> None:
        """Until all processes have ended well; or until step `kill_after` is logged, and then kill them. Raises `RunError`."""
        last, changed = 0, time.monotonic()
        try:
            while True:
                step = self.step()
                if step != last:
                    last, changed = step, time.monotonic()
                    progress(step)
                if kill_after is not None and step >= kill_after:
                    if any(process.poll() is not None for process in self.processes):
                        raise RunError(f"The run had ended before it could be killed after step {kill_after}; use more "
                                       "--steps.")
                    return
                codes = [process.poll() for process in self.processes]
                for rank, code in enumerate(codes):
                    if code:
                        raise RunError(f"Rank {rank} ended with code {code}. The end of its log:\n{self._tail(rank)}")
                if all(code == 0 for code in codes):
                    return
                if time.monotonic() - changed > SILENCE:
                    raise RunError(f"No step for {SILENCE:.0f} s. The end of rank 0's log:\n{self._tail(0)}")
                time.sleep(0.005 if kill_after is not None else 0.05)
        finally:
            self.kill()
            self.seconds = time.perf_counter() - self.began

    def kill(self) -> None:
        """SIGKILL to the group of every process that still runs, and what such an end leaves in shared memory with it."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        # DeepSpeed's CPU all-reduce unlinks these 69 MB a process at exit, which a killed process does not reach.
        for left in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{self.port}_*"):
            left.unlink(missing_ok=True)

    def _tail(self, rank: int, lines: int = 30) -> str:
        return "\n".join(self._log(rank).read_text(errors="replace").splitlines()[-lines:])
