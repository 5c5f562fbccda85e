"""How long a training waits for a save, and all around it: ds_nvcomp beside the alternatives, in one run, on the same data.

    python benchmarks/saves.py --limit 1500                           # all sections of one process; an NVIDIA GPU, about 15 minutes
    python benchmarks/saves.py --only stall,overlap --params 5e8      # some of them, on a smaller model
    torchrun --nproc_per_node=4 benchmarks/saves.py                   # section multi, on 4 GPUs
    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 python benchmarks/saves.py --tiny    # on the CPU, a minute: does the harness work?
    python benchmarks/plots.py benchmarks/results/saves_*.json        # figures

A section is a file in benchmarks/sections; its docstring says what it measures:

    stall        seconds that save_checkpoint blocks a DeepSpeed ZeRO-2 training, and seconds until the checkpoint is durable
    writer       GB/s of the file writer alone, beside plain parallel writes, on --dir and on /dev/shm
    resume       seconds of a load from the page cache
    linear       seconds, GPU and host memory of the encoder, by the size of the shard
    adversarial  GB/s and ratio of the encoder on data that it is not made for
    overlap      seconds per step of a training that saves; whether its weights are, bit for bit, those of one that does not
    multi        all ranks at once: snapshots, and save_checkpoint with ZeRO-2 and ZeRO-3

A case is measured once apart ("first"), then up to --repeats times, but not longer than --budget seconds in all once it has one
repeat. What fails is recorded with its error, and the rest goes on. After --limit seconds no case is begun; 40 seconds later the run
ends, telling where it hangs. The JSON has all samples and is rewritten after every case: a run that is killed keeps what it has.
"""
from __future__ import annotations

import argparse
import faulthandler
import importlib
import logging
import os
import signal
import sys
import time
import warnings

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
logging.disable(logging.INFO)  # DeepSpeed's, from its import on
warnings.simplefilter("ignore")

from sections.bench import HERE, Bench  # noqa: E402
from sections.report import table  # noqa: E402

SINGLE = ["stall", "writer", "resume", "linear", "adversarial", "overlap"]
TINY = dict(params=2e6, shards=[1e6, 4e6, 16e6], bytes=8e6, slow_bytes=2e6, repeats=2, budget=5.0, steps=12, every=4, batch=2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    parser.add_argument("--only", default="multi" if under_torchrun else ",".join(SINGLE), help="sections, with commas (%(default)s)")
    parser.add_argument("--match", default="", help="only cases in whose names this regular expression is found")
    parser.add_argument("--params", type=float, default=1e9, help="parameters of the trained model (%(default)g)")
    parser.add_argument("--bytes", type=float, default=4e9, help="of writer, resume, adversarial, and of each rank in multi (%(default)g)")
    parser.add_argument("--slow-bytes", type=float, default=1e9, help="of what is compressed on one CPU thread (%(default)g)")
    parser.add_argument("--shards", type=float, nargs="+", default=[1e9, 4e9, 16e9], help="sizes for linear, bytes")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--budget", type=float, default=12, help="seconds per case (%(default)g)")
    parser.add_argument("--limit", type=float, default=500, help="seconds in all (%(default)g)")
    parser.add_argument("--steps", type=int, default=40, help="of overlap's trainings (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between saves in overlap (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences of 512 tokens per step (%(default)s)")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per step (%(default)s)")
    parser.add_argument("--dir", default=None, help="where files are written; the temporary directory")
    parser.add_argument("--out", default=str(HERE / "results"), help="a directory, or a file that ends in .json (%(default)s)")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: " + ", ".join(f"{k} {v}" for k, v in TINY.items()))
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)
    first = parser.parse_args()
    if first.tiny:
        parser.set_defaults(**TINY)  # what is given on the command line wins
    args = parser.parse_args()
    unknown = set(args.only.split(",")) - {*SINGLE, "multi"}
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join([*SINGLE, 'multi'])}")
    return args


def main() -> None:
    bench = Bench(arguments())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    faulthandler.dump_traceback_later(bench.args.limit + 40, exit=True)  # what hangs says where
    try:
        for name in bench.args.only.split(","):
            began = time.perf_counter()
            with bench.section(name):
                importlib.import_module(f"sections.{name}").run(bench)
            bench.say(f"{name}: {time.perf_counter() - began:.0f} s")
    finally:
        bench.close()
        bench.say(table(bench.result))


if __name__ == "__main__":
    main()
    os._exit(0)  # what a library's threads still do at the end must not cost the machine's time
