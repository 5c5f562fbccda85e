"""Train a small GPT with DeepSpeed. How its checkpoints are stored is the JSON's business; this script knows nothing of it.

    torchrun --nproc_per_node 2 train.py --config zero2.json --checkpoints DIR --save-every 30 --steps 40
"""
from __future__ import annotations

import argparse
import json
import os
import struct
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import corpus
import fingerprint
from model import GPT


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, help="DeepSpeed JSON")
    parser.add_argument("--events", type=Path, required=True, help="directory for a line of JSON per step and rank")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoints", help="directory to save to and, if it has a checkpoint, to resume from")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1234)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()

    model = GPT(args.width, args.layers, heads=args.width // 64, length=args.length)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=args.config)
    torch.manual_seed(1000 + rank)  # dropout differs between the ranks
    text = corpus.load()
    log = Log(args.events, rank)

    step = 0
    if args.checkpoints and os.path.exists(os.path.join(args.checkpoints, "latest")):
        began = time.perf_counter()
        _, client_state = engine.load_checkpoint(args.checkpoints)
        log(event="load", seconds=time.perf_counter() - began)
        step = client_state["step"]
        fingerprint.set_rng_state(client_state["rng"][rank], engine.device)

    while step < args.steps:
        inputs, targets = (part.to(engine.device) for part in corpus.batch(text, step, rank, args.batch, args.length))
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        step += 1
        log(event="step", step=step, loss=loss.item())
        if args.save_every and step % args.save_every == 0:
            rng = [None] * dist.get_world_size()
            dist.all_gather_object(rng, fingerprint.rng_state(engine.device))
            began = time.perf_counter()
            engine.save_checkpoint(args.checkpoints, client_state={"step": step, "rng": rng})
            log(event="save", seconds=time.perf_counter() - began)

    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    log(event="end", state=fingerprint.of(engine), parameters=parameters)
    dist.barrier()
    dist.destroy_process_group()


class Log:
    """One line of JSON per event; a loss is also written as its bits."""

    def __init__(self, directory: Path, rank: int):
        directory.mkdir(parents=True, exist_ok=True)
        self.file = open(directory / f"rank{rank}.jsonl", "w", buffering=1)

    def __call__(self, **event):
        if "loss" in event:
            event["bits"] = struct.pack(">f", event["loss"]).hex()
        self.file.write(json.dumps(event) + "\n")


if __name__ == "__main__":
    main()
