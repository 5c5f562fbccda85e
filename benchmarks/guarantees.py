"""What the guarantees cost: a committed save with each of them on and off, on this machine.

    python benchmarks/guarantees.py [--gib 1] [--device cpu|cuda] [--dir DIR] [--out RESULTS_DIR]

Saves the same tensors (fp32 values like trained weights) through the DeepSpeed engine into --dir: plainly by torch.save, by us with
everything on, and with one guarantee off at a time. "Without checksums" replaces the checksum functions by ones that do nothing, for
this measurement only: there is no such switch. Medians of five, in seconds; and the time of one agreement among two gloo processes.
"""
from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from unittest import mock

import torch

from ds_nvcomp import Config, __version__
from ds_nvcomp.deepspeed_engine import NvcompCheckpointEngine

REPEATS = 5
FILE = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def committed(state, directory, **config):
    """One save as DeepSpeed does it; returns seconds."""
    engine = NvcompCheckpointEngine(config=Config(**config))
    began = time.perf_counter()
    engine.create(type("Info", (), {"tag": "step", "save_dir": str(directory)}))
    engine.save(state, str(Path(directory, "step", FILE)))
    engine.save_latest = "step"
    engine.commit("step")
    return time.perf_counter() - began


def plain(state, directory):
    began = time.perf_counter()
    torch.save(state, Path(directory, "plain.pt"))
    return time.perf_counter() - began


@contextlib.contextmanager
def no_checksums(device):
    with contextlib.ExitStack() as stack:
        for module in ("ds_nvcomp.pipeline.cpu", "ds_nvcomp.archive.container"):
            stack.enter_context(mock.patch(f"{module}.crc32", lambda data, crc=0: 0))
        if device == "cuda":
            stack.enter_context(mock.patch("ds_nvcomp.encoding.kernels.checksum", lambda *args: None))
        yield


def agreement_worker(rank, world, store, queue):
    import torch.distributed as dist
    from ds_nvcomp.checkpoint.ranks import Ranks
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    ranks = Ranks(60)
    ranks.agree(None, "warm up")
    began = time.perf_counter()
    for _ in range(100):
        ranks.agree(None, "measure")
    if rank == 0:
        queue.put((time.perf_counter() - began) / 100)
    dist.destroy_process_group()


def agreement() -> float:
    import torch.multiprocessing as mp
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        mp.spawn(agreement_worker, (2, str(Path(scratch, "store")), queue), nprocs=2)
    return queue.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dir", default=None)
    parser.add_argument("--out", default=None)
    args = parser.parse_args()
    logging.getLogger("ds_nvcomp").setLevel(logging.WARNING)
    state = {"w": torch.randn(int(args.gib * (1 << 28)), device=args.device) * 0.02, "step": 1}
    codecs = ["deflate", "ans"] if args.device == "cuda" else ["deflate"]
    rows = {}
    scratch = Path(tempfile.mkdtemp(dir=args.dir))
    try:
        runs = {"torch.save (no guarantee)": (contextlib.nullcontext, lambda: plain(state, scratch))}
        for codec in codecs:
            base = dict(codec=codec, verify="none")
            for name, guard, config in (("all but verify", contextlib.nullcontext, base),
                                        ("all, verify: encode", contextlib.nullcontext, {**base, "verify": "encode"}),
                                        ("all but verify and fsync", contextlib.nullcontext, {**base, "fsync": False}),
                                        ("none: no fsync, no checksums", lambda: no_checksums(args.device), {**base, "fsync": False})):
                runs[f"{codec}, {name}"] = guard, lambda config=config: committed(state, scratch, **config)
        times = {name: [] for name in runs}
        for repeat in range(REPEATS + 1):  # in turn, so that a drift of the machine meets all of them
            for name, (guard, action) in runs.items():
                with guard():
                    seconds = action()
                if repeat:
                    times[name].append(seconds)
        rows = {name: statistics.median(values) for name, values in times.items()}
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    rows["one agreement of 2 ranks"] = agreement()
    machine = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "CPU"
    result = {"date": str(date.today()), "machine": machine, "cpus": os.cpu_count(), "torch": torch.__version__, "ds_nvcomp": __version__,
              "GiB": args.gib, "seconds": rows}
    print(f"{machine}, {os.cpu_count()} CPUs, {args.gib} GiB of fp32")
    for name, seconds in rows.items():
        rate = "" if "agreement" in name else f"{args.gib * 1.073741824 / seconds:8.2f} GB/s"
        print(f"{name:45}{seconds:10.4f} s {rate}")
    if args.out:
        Path(args.out, f"guarantees_{args.device}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
