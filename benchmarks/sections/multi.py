"""All ranks at once: GB/s of their snapshots together, and what save_checkpoint costs with ZeRO-2 and ZeRO-3. Run it under torchrun."""
from __future__ import annotations

import torch

from . import training
from .data import PinnedCopy, adam_state, tensors, to_host, total
from .stall import OURS, engine_case

OURS = {name: OURS[name] for name in ("ds_nvcomp, deflate", "ds_nvcomp, ans", "ds_nvcomp async, deflate", "ds_nvcomp async, ans",
                                   "ds_nvcomp overlap, ans")}


def run(bench) -> None:
    snapshots(bench, tensors(adam_state(bench.args.bytes, bench.device)))
    bench.release()
    for stage in (2, 3):
        engine = training.build(bench, stage)
        try:
            saves(bench, stage, engine)
        finally:
            engine.destroy()
        del engine
        bench.release()


def snapshots(bench, group) -> None:
    nbytes = total(group) * bench.world
    bench.case("copy to pinned memory", PinnedCopy(bench, group), nbytes=nbytes)
    for codec in ("deflate", "ans", "none"):
        bench.case(f"encode to host memory, {codec}", lambda: to_host(bench, group, codec), nbytes=nbytes)


def saves(bench, stage, engine) -> None:
    nbytes = together(bench, total(tensors(training.recorded(engine, bench.fresh()))))
    for name, keys in OURS.items():
        engine_case(bench, engine, f"ZeRO-{stage}: {name}", nbytes, lambda: training.ours(bench, engine, **keys))
    engine_case(bench, engine, f"ZeRO-{stage}: DeepSpeed's torch engine", nbytes, lambda: training.torchs(engine))


def together(bench, number) -> int:
    """The sum over the ranks."""
    if bench.world == 1:
        return number
    result = torch.tensor([number], device=bench.device)
    torch.distributed.all_reduce(result)
    return int(result)
