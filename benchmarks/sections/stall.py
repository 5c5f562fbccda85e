"""Seconds that a save blocks a DeepSpeed ZeRO-2 bf16 training, and until it is durable; beside other ways to save the same tensors."""
from __future__ import annotations

import time

import torch

from . import training
from .bench import Skip
from .data import PinnedCopy, tensors, to_host, total

OURS = {
    "ds_nvcomp, deflate": dict(codec="deflate"), "ds_nvcomp, ans": dict(codec="ans"), "ds_nvcomp, none": dict(codec="none"),
    "ds_nvcomp, deflate, no fsync": dict(codec="deflate", fsync=False),
    "ds_nvcomp async, deflate": {"codec": "deflate", "async": True}, "ds_nvcomp async, ans": {"codec": "ans", "async": True},
    "ds_nvcomp async, deflate, no links": {"codec": "deflate", "async": True, "link_master_weights": "off"},
    "ds_nvcomp async, ans, no links": {"codec": "ans", "async": True, "link_master_weights": "off"},
    # The rest of these two's stall is in the optimizer step: section overlap has it.
    "ds_nvcomp overlap, deflate": {"codec": "deflate", "overlap": True}, "ds_nvcomp overlap, ans": {"codec": "ans", "overlap": True},
}


def run(bench) -> None:
    engine = training.build(bench)
    try:
        measure(bench, engine)
    finally:
        engine.destroy()


def measure(bench, engine) -> None:
    states = training.recorded(engine, bench.fresh())
    group = tensors(states)
    nbytes = total(group)

    for name, keys in OURS.items():
        engine_case(bench, engine, name, nbytes, lambda: training.ours(bench, engine, **keys))
    engine_case(bench, engine, "DeepSpeed's torch engine", nbytes, lambda: training.torchs(engine))
    training.torchs(engine)  # lets go of what ours holds
    bench.release()

    for codec in ("deflate", "ans", "none"):
        bench.case(f"encode to host memory, {codec}", lambda: to_host(bench, group, codec), nbytes=nbytes)
    bench.case("encode to host memory, ans, verify none", lambda: to_host(bench, group, "ans", verify="none"), nbytes=nbytes)
    bench.case("nvCOMP Zstd on raw bytes, to host memory", lambda: to_host(bench, group, "zstd", whole=True), nbytes=nbytes)
    bench.release()
    copy = []  # the slabs are made before it is timed
    bench.case("copy to pinned memory", lambda: copy[0](), nbytes=nbytes, prepare=lambda: copy or copy.append(PinnedCopy(bench, group)))
    copy.clear()
    bench.release()

    files_case(bench, "torch.save", nbytes, lambda path: [torch.save(state, path / name) for name, state in states.items()])
    files_case(bench, "torch.distributed.checkpoint", nbytes, lambda path: distributed_checkpoint(path, group))
    part = first(group, bench.args.slow_bytes)
    files_case(bench, "torch.distributed.checkpoint, zstd, a part", total(part), lambda path: distributed_checkpoint(path, part, zstd=True))


def engine_case(bench, engine, name, nbytes, choose) -> None:
    """`save_checkpoint`, into a new directory each time, by the checkpoint engine that `choose` puts in place."""
    chosen, place = [], {}

    def prepare():
        if not chosen:
            choose()
            chosen.append(True)
        place["at"] = bench.fresh()
    bench.case(name, lambda: training.save(bench, engine, place["at"]), nbytes=nbytes, prepare=prepare)


def files_case(bench, name, nbytes, write) -> None:
    place = {}

    def action():
        began = time.perf_counter()
        write(place["at"])
        seconds = time.perf_counter() - began
        training.sync_files(place["at"])
        return {"seconds": seconds, "durable": time.perf_counter() - began, "stored_GB": training.size(place["at"]) / 1e9}
    bench.case(name, action, nbytes=nbytes, prepare=lambda: place.update(at=bench.fresh()))


def distributed_checkpoint(path, group, zstd=False) -> None:
    from torch.distributed import checkpoint
    extensions = {}
    if zstd:
        try:
            from torch.distributed.checkpoint._extension import ZStandard
            extensions = {"_extensions": [ZStandard()]}
        except (ImportError, ValueError) as err:
            raise Skip(f"unavailable: {err}") from None
    checkpoint.save({f"tensor{i}": tensor for i, tensor in enumerate(group)}, no_dist=True,
                    storage_writer=checkpoint.FileSystemWriter(path, **extensions))


def first(group, nbytes) -> list:
    """The beginnings of tensors, alike, together about `nbytes`."""
    share = min(1.0, nbytes / total(group))
    return [tensor.reshape(-1)[:max(1, int(tensor.numel() * share))].clone() for tensor in group]
