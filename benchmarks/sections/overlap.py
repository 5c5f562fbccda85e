"""A training that saves every few steps: seconds per step, and whether its state is bit for bit that of one that never saves.

The last checkpoint is loaded again and compared with what the state was when it was saved: training went on while it was written.
"""
from __future__ import annotations

import statistics
import time

import torch

import ds_nvcomp

from . import training
from .data import same, tensors

NO_SAVES = "no saves"
RUNS = {
    "no saves, warming up": None,  # all others are compared with it
    NO_SAVES: None,
    "ds_nvcomp, deflate": {"codec": "deflate"},
    "ds_nvcomp async, deflate": {"codec": "deflate", "async": True},
    "ds_nvcomp async, ans": {"codec": "ans", "async": True},
    "ds_nvcomp overlap, deflate": {"codec": "deflate", "overlap": True},
    "ds_nvcomp overlap, ans": {"codec": "ans", "overlap": True},
    "DeepSpeed's torch engine": "torch",
}


def run(bench) -> None:
    deterministic(True)
    reference = {}
    try:
        for name, keys in RUNS.items():
            entry = bench.case(name, lambda: train(bench, keys, reference), repeats=0)
            if name == NO_SAVES:
                reference.update(entry.get("median", {}))
            bench.release()
    finally:
        deterministic(False)


def train(bench, keys, reference) -> dict:
    engine = training.build(bench)
    try:
        return trained(bench, engine, keys, reference)
    finally:
        engine.destroy()


def trained(bench, engine, keys, reference) -> dict:
    """`seconds` are those of the mean step, saves included; `step` is the median of steps alone; `stall`, of save_checkpoint alone;
    `drain` is the wait at the end. An interval is --every steps and the save before them: `interval` is the median of those after the
    first save, which also takes and pins its memory (`first_interval`)."""
    directory = bench.fresh()
    if keys == "torch":
        training.torchs(engine)
    elif keys is not None:
        training.ours(bench, engine, **keys)
    steps, saves, then = [], [], None
    for number in range(1, bench.args.steps + 1):
        began = time.perf_counter()
        training.step(bench, engine, number)
        steps.append(time.perf_counter() - began)
        if keys is not None and number % bench.args.every == 0:
            if number + bench.args.every > bench.args.steps:
                then = [tensor.clone() for tensor in tensors(training.recorded(engine, directory))]
                training.training_stream(bench)
            began = time.perf_counter()
            engine.save_checkpoint(str(directory), tag="step")
            training.training_stream(bench)
            saves.append(time.perf_counter() - began)
    began = time.perf_counter()
    training.wait(engine)
    every = bench.args.every
    intervals = [sum(steps[at:at + every]) for at in range(every, len(steps) - every + 1, every)]
    intervals = [seconds + stall for seconds, stall in zip(intervals, saves or [0] * len(intervals))]
    result = {"seconds": (sum(steps) + sum(saves)) / len(steps), "step": statistics.median(steps), "slowest_step": max(steps),
              "drain": time.perf_counter() - began, "first_interval": intervals[0], "interval": statistics.median(intervals[1:] or intervals)}
    if saves:
        result.update(first_stall=saves[0], stall=statistics.median(saves))
    now = tensors(training.recorded(engine, bench.fresh("recorded")))
    if saves and reference.get("interval"):
        result["slowdown"] = result["interval"] / reference["interval"] - 1
        result["slowdown_with_the_first"] = result["seconds"] / reference["seconds"] - 1
    if "state" not in reference:
        reference["state"] = [tensor.clone() for tensor in now]
    result["bit_identical"] = same(reference["state"], now)
    if then is not None:
        files = sorted((directory / "step").glob("*_states.pt"))
        loaded = [ds_nvcomp.load(path, map_location=bench.device, weights_only=False) for path in files]
        result["checkpoint_is_the_state"] = same(by_content(then), by_content(tensors(loaded)))
    return result


def by_content(group) -> list:
    """In an order that does not depend on that of the files: which of two saved the tensor first is no matter."""
    return sorted(group, key=lambda t: (str(t.dtype), tuple(t.shape), float(t.double().sum()), float(t.double().abs().sum())))


def deterministic(on: bool) -> None:
    torch.use_deterministic_algorithms(on)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill the encoder's work memory, too
    torch.backends.cuda.enable_cudnn_sdp(not on)  # its backward pass is not deterministic
