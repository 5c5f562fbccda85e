"""Seconds to load a shard whose file is in the page cache: ours, and torch.load of what torch.save wrote.

torch.load with mmap of a plain file to the CPU reads nothing: its seconds are due later.
"""
from __future__ import annotations

import torch

import ds_nvcomp

from .data import adam_state, needs, same, tensors, total


def run(bench) -> None:
    directory = bench.fresh()
    state = adam_state(bench.args.bytes, bench.device)
    expected = tensors(state)
    torch.save(state, directory / "plain.pt")
    ways = {"torch.load, plain": (lambda: directory / "plain.pt", torch.load)}
    for codec in ("deflate", "ans"):
        ways[f"ds_nvcomp.load, {codec}"] = (lambda codec=codec: written(bench, directory / f"{codec}.pt", state, codec)), ds_nvcomp.load
    for to in ("cuda", "cpu") if bench.gpu else ("cpu",):
        for mmap in (False, True):
            for name, (path, load) in ways.items():
                kept = {}

                def prepare():
                    kept["path"], kept["state"] = path(), None

                def action():
                    kept["state"] = load(kept["path"], map_location=to, weights_only=False, mmap=mmap)
                entry = bench.case(f"{name}, to {to}{', mmap' if mmap else ''}", action, nbytes=total(expected), prepare=prepare)
                if kept.get("state") is not None:
                    entry["bit_identical"] = same(expected, tensors(kept["state"]))


def written(bench, path, state, codec):
    """Through the page cache, so not durable: what is durable is written past it."""
    needs(bench, codec)
    if not path.exists():
        ds_nvcomp.save(state, path, {"codec": codec, "fsync": False})
    return path
