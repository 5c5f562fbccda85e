"""What encoding a shard to host memory takes, by its size: seconds, and the most GPU and host memory beside the shard itself."""
from __future__ import annotations

import torch

from .data import like_trained, to_host

PIECE = 1 << 30  # bytes of one tensor


def run(bench) -> None:
    for codec in ("deflate", "ans"):
        for nbytes in bench.args.shards:
            state = {}

            def prepare():
                if not state:
                    state["shard"] = [like_trained(min(PIECE, nbytes - at), bench.device) for at in range(0, int(nbytes), PIECE)]
                    bench.sync()
                    state["free"] = torch.cuda.mem_get_info()[0] if bench.gpu else 0
            bench.case(f"{codec}, {nbytes / 1e9:g} GB", nbytes=nbytes, prepare=prepare,
                       action=lambda: measured(bench, state["free"], lambda: to_host(bench, state["shard"], codec)))
            state.clear()
            bench.release()


def measured(bench, free, action) -> dict:
    """`action`, and the peaks of memory in its time, in GB: `gpu_work` is what torch knows of, `gpu_taken` what is gone of `free` after it,
    `rss` what the process has after it; pinned memory may not count there."""
    if not bench.gpu:
        return {**action(), "rss_GB": rss() / 1e9}
    torch.cuda.reset_peak_memory_stats()
    getattr(torch.cuda, "reset_peak_host_memory_stats", lambda: None)()
    before = torch.cuda.memory_allocated()
    result = action()
    torch.cuda.synchronize()
    result["gpu_work_GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    result["gpu_taken_GB"] = (free - torch.cuda.mem_get_info()[0]) / 1e9
    for key, value in getattr(torch.cuda, "host_memory_stats", dict)().items():
        if key.endswith("_bytes.peak"):
            result[f"pinned_{key.split('_')[0]}_GB"] = value / 1e9
    return {**result, "rss_GB": rss() / 1e9}


def rss() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))
