"""`ds-nvcomp demo`: train, kill, resume, and compare every bit with the run that nobody interrupted."""
from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import shutil
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .processes import Run, RunError

BLOCK = {"nvcomp_checkpoint": {"enabled": True}}
LEAST_STEPS = 12
SHAPES = {"cpu": dict(width=256, layers=6, length=64, batch=4), "gpu": dict(width=768, layers=12, length=256, batch=8)}
KINDS = (("model states", "model_states.pt"), ("optimizer states", "optim_states.pt"), ("other files", ""))


def run(out: Path | None = None, steps: int = 40, device: str = "auto", ranks: int = 2, keep: bool = False) -> int:
    """The demo; returns the exit code, 0 only if all runs agree in every bit.

    `out` is where the runs are put (a new directory in it, removed at the end unless `keep`), None for the system's temporary
    directory. `device` is auto, cpu or gpu; `ranks` the number of processes, at most one a GPU.
    """
    console = Console()
    try:
        device, ranks = _choose(device, ranks, steps)
    except RunError as err:
        console.print(f"[red]{escape(str(err))}[/]")
        return 1
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="ds-nvcomp-demo-", dir=out))
    began = time.perf_counter()
    try:
        differences = []
        for stage in (2, 3):
            differences += _Stage(stage, home / f"zero{stage}", steps, device, ranks, console).run()
        seconds = time.perf_counter() - began
        if differences:
            console.print(f"[red]Not identical ({seconds:.0f} s):[/]")
            for difference in differences:
                console.print(f"  {escape(difference)}")
            return 1
        console.print("[green]Identical in every bit: the run resumed from compressed checkpoints, the one resumed from plain "
                      f"ones, and the one that was never interrupted.[/] {seconds:.0f} s in all.")
        return 0
    except RunError as err:
        console.print(f"[red]{escape(str(err))}[/]")
        return 1
    finally:
        if keep:
            console.print(f"Kept: {home}")
        else:
            shutil.rmtree(home, ignore_errors=True)


def _choose(device: str, ranks: int, steps: int) -> tuple[str, int]:
    """Device and number of processes for this machine; raises `RunError` where the demo cannot run."""
    if device not in ("auto", "cpu", "gpu"):
        raise RunError(f"device: {device!r} is not one of auto, cpu, gpu.")
    if ranks < 1:
        raise RunError(f"ranks: {ranks} is below 1.")
    if steps < LEAST_STEPS:
        raise RunError(f"steps: {steps} leaves no room to save, be killed and resume; at least {LEAST_STEPS} are needed.")
    if importlib.util.find_spec("deepspeed") is None:
        raise RunError("The demo trains with DeepSpeed, which is not installed: pip install 'ds_nvcomp[deepspeed]'.")
    if not any(point.name == "ds_nvcomp" for point in importlib.metadata.entry_points(group="torch.backends")):
        raise RunError("ds_nvcomp runs from a source tree without being installed, so torch does not know of it. Run "
                       "pip install -e . there first.")
    import torch
    gpus = torch.cuda.device_count() if torch.cuda.is_available() and torch.version.cuda else 0
    if device == "gpu" and not gpus:
        raise RunError("device: 'gpu' was asked for, and torch sees no CUDA device. Use --device cpu.")
    if device == "cpu" or not gpus:
        return "cpu", ranks
    return "gpu", min(ranks, gpus)  # NCCL wants a GPU for each process


@dataclass
class _Saved:
    """One of the two ways to store checkpoints, killed and resumed."""
    killed: Run
    resumed: Run
    checkpoint: Path
    sizes: dict[str, int]

    def seconds(self, event: str) -> float:
        """How long the slowest rank took to save or load."""
        logs = [(self.killed if event == "save" else self.resumed).events(rank) for rank in range(self.killed.ranks)]
        return max(entry["seconds"] for log in logs for entry in log if entry["event"] == event)


class _Stage:
    """The five runs of one ZeRO stage, and what came of them."""

    def __init__(self, stage: int, home: Path, steps: int, device: str, ranks: int, console: Console):
        self.stage, self.home, self.steps, self.device, self.ranks, self.console = stage, home, steps, device, ranks, console
        self.save_at = steps * 3 // 4
        self.kill_after = self.save_at + max(2, steps // 16)
        home.mkdir(parents=True)

    def run(self) -> list[str]:
        """Do it all, print the tables; returns what differs, in words."""
        self.console.rule(f"ZeRO-{self.stage}, {self.ranks} process{'es' * (self.ranks > 1)} on {self.device.upper()}")
        with Progress(TextColumn("{task.description:34}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"),
                      TimeElapsedColumn(), console=self.console, transient=True) as progress:
            self.progress = progress
            uninterrupted = self._train("uninterrupted", {}, "uninterrupted")
            saved = {"plain": self._kill_and_resume("plain", {}), "compressed": self._kill_and_resume("compressed", BLOCK)}
        self.console.print(self._sizes(saved))
        return self._compare(uninterrupted, saved)

    def _train(self, name: str, block: dict, what: str, *options: str, kill_after: int | None = None) -> Run:
        """One run to its end, or to its being killed."""
        shape = SHAPES[self.device]
        config = self.home / f"ds_config_{'compressed' if block else 'plain'}.json"
        config.write_text(json.dumps({**self._config(shape["batch"]), **block}, indent=2))
        # What is to be killed has steps before it up to its next save, so that the kill does not come late on a fast machine.
        steps = self.steps if kill_after is None else max(self.steps, 2 * self.save_at - 1)
        arguments = ["--config", str(config), "--steps", str(steps), *options]
        for key, value in shape.items():
            arguments += [f"--{key}", str(value)]
        task = self.progress.add_task(what, total=self.steps)
        run = Run(self.home / name, self.ranks, self._environment(), arguments)
        run.wait(kill_after, lambda step: self.progress.update(task, completed=step))
        self.progress.remove_task(task)
        end = f"killed with SIGKILL after step {run.step()}" if kill_after else f"ended at step {run.step()}"
        self.console.print(f"  {what:34} {end}, {run.seconds:.1f} s")
        return run

    def _kill_and_resume(self, name: str, block: dict) -> _Saved:
        checkpoints = self.home / name / "checkpoints"
        options = ["--checkpoints", str(checkpoints), "--save-every", str(self.save_at)]
        killed = self._train(f"{name}/killed", block, f"{name}, saving at step {self.save_at}", *options,
                             kill_after=self.kill_after)
        checkpoint = checkpoints / (checkpoints / "latest").read_text().strip()
        sizes = dict.fromkeys((kind for kind, _ in KINDS), 0)
        for path in checkpoint.rglob("*"):
            if path.is_file():
                sizes[next(kind for kind, suffix in KINDS if path.name.endswith(suffix))] += path.stat().st_size
        if _mentions_us(checkpoint) != bool(block):
            wrong = "should be compressed, and is not" if block else "should not be compressed, and is"
            raise RunError(f"{checkpoint} {wrong}; see the logs in {killed.directory} (--keep keeps them).")
        return _Saved(killed, self._train(f"{name}/resumed", block, f"{name}, resumed", *options), checkpoint, sizes)

    def _config(self, batch: int) -> dict:
        return {
            "train_micro_batch_size_per_gpu": batch,
            "bf16": {"enabled": True},
            # DeepSpeed's default buckets of a gigabyte are for larger models.
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 5_000_000, "allgather_bucket_size": 5_000_000},
            "optimizer": {"type": "AdamW",
                          "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 2 * self.steps, "warmup_num_steps": 10}},
            "gradient_clipping": 1.0,
        }

    def _environment(self) -> dict[str, str]:
        """What makes two runs of one script the same run; the rest is up to ours."""
        env = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
               "NCCL_NVLS_ENABLE": "0"}
        if self.device == "cpu":
            return {**env, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        return {**env, "DS_ACCELERATOR": "cuda"}

    def _sizes(self, saved: dict[str, _Saved]) -> Table:
        plain, ours = saved["plain"], saved["compressed"]
        table = Table(title=f"ZeRO-{self.stage} checkpoint at step {self.save_at}", title_justify="left")
        for column in ("", "plain", "compressed", "of plain", "factor"):
            table.add_column(column, justify="right" if column else "left")

        def row(name, a, b, show, style=None):
            table.add_row(name, show(a), show(b), f"{b / a:.3f}" if a else "", f"{a / b:.2f}x" if b else "", style=style)

        for kind, _ in KINDS:
            if plain.sizes[kind]:
                row(kind, plain.sizes[kind], ours.sizes[kind], _megabytes)
        row("total", sum(plain.sizes.values()), sum(ours.sizes.values()), _megabytes, "bold")
        row("save (compressed ones fsync)", plain.seconds("save"), ours.seconds("save"), lambda seconds: f"{seconds:.2f} s")
        row("load", plain.seconds("load"), ours.seconds("load"), lambda seconds: f"{seconds:.2f} s")
        return table

    def _compare(self, uninterrupted: Run, saved: dict[str, _Saved]) -> list[str]:
        """Print the table of losses and final states side by side; returns what differs."""
        differences = []
        losses = [_losses(uninterrupted, rank) for rank in range(self.ranks)]
        states = [_state(uninterrupted, rank) for rank in range(self.ranks)]
        for name, way in saved.items():
            for rank in range(self.ranks):
                where = f"ZeRO-{self.stage}, {name}, rank {rank}"
                killed, resumed = _losses(way.killed, rank), _losses(way.resumed, rank)
                if not killed or sorted(resumed) != list(range(self.save_at + 1, self.steps + 1)):
                    differences.append(f"{where}: killed after step {max(killed, default=0)} it resumed for the steps "
                                       f"{sorted(resumed)}")
                compared = {step: bits for step, bits in killed.items() if step <= self.steps}
                for what, mine in (("before the kill", compared), ("after the resumption", resumed)):
                    differences += [f"{where}: the loss of step {step} {what} is {bits}, uninterrupted {losses[rank].get(step)}"
                                    for step, bits in mine.items() if bits != losses[rank].get(step)]
                state = _state(way.resumed, rank)
                differences += [f"{where}: the final {part} differ" for part in sorted(states[rank] | state)
                                if state.get(part) != states[rank].get(part)]

        table = Table(title=f"ZeRO-{self.stage} after {self.steps} steps: bits of the losses, sha256 of the states (all ranks)",
                      title_justify="left")
        for column in ("", "uninterrupted", "plain, resumed", "compressed, resumed", ""):
            table.add_column(column)
        runs = [uninterrupted, saved["plain"].resumed, saved["compressed"].resumed]

        def row(name, values):
            table.add_row(name, *values, "[green]identical[/]" if len(set(values)) == 1 else "[red]differ[/]")

        for step in (self.save_at + 1, self.steps):
            row(f"fp32 loss, step {step}", [_losses(run, 0).get(step, "missing") for run in runs])
        both = range(self.save_at + 1, self.steps + 1)  # the steps that all three took
        row(f"losses, steps {both[0]}-{both[-1]}", [self._digest(
            [_losses(run, rank).get(step) for step in both] for rank in range(self.ranks)) for run in runs])
        for part in states[0]:
            row(part, [self._digest(_state(run, rank).get(part) for rank in range(self.ranks)) for run in runs])
        self.console.print(table)
        curve = [event["loss"] for event in uninterrupted.events(0) if event["event"] == "step"]
        few = max(1, len(curve) // 8)
        self.console.print(f"{_end(uninterrupted, 0)['parameters']:,} parameters; mean loss of the first {few} steps "
                           f"{sum(curve[:few]) / few:.3f}, of the last {few} {sum(curve[-few:]) / few:.3f}.\n")
        return differences

    @staticmethod
    def _digest(values) -> str:
        return hashlib.sha256(json.dumps(list(values)).encode()).hexdigest()[:12]


def _losses(run: Run, rank: int) -> dict[int, str]:
    return {event["step"]: event["bits"] for event in run.events(rank) if event["event"] == "step"}


def _end(run: Run, rank: int) -> dict:
    return next(event for event in run.events(rank) if event["event"] == "end")


def _state(run: Run, rank: int) -> dict[str, str]:
    return _end(run, rank)["state"]


def _mentions_us(checkpoint: Path) -> bool:
    """Whether the state files of a checkpoint need ds_nvcomp to be read."""
    found = set()
    for path in checkpoint.rglob("*_states.pt"):
        with zipfile.ZipFile(path) as archive:
            pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            found.add(b"ds_nvcomp" in archive.read(pickled))
    return found == {True}


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
