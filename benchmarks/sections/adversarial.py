"""GB/s and ratio of the encoder, to host memory, by kind of data: what it is made for, what does not shrink, what shrinks to nothing."""
from __future__ import annotations

import torch

from .data import PinnedCopy, like_trained, to_host, total

CODECS = ("deflate", "ans", "zstd", "none")


def random_bits(nbytes, device):
    """Not one bit to save."""
    return torch.randint(-1 << 63, (1 << 63) - 1, (max(1, int(nbytes) // 8),), device=device).view(torch.float32)


def zeros(nbytes, device):
    return torch.zeros(int(nbytes) // 4, device=device)


def sparse_experts(nbytes, device):
    """Moments of a mixture of experts of which seven in eight were never routed to."""
    values = like_trained(nbytes, device, std=1e-4)
    experts = values[:values.numel() // 64 * 64].view(64, -1)
    experts[torch.arange(64, device=device) % 8 != 0] = 0
    return values


KINDS = {
    "like trained fp32": like_trained,
    "like trained bf16": lambda nbytes, device: like_trained(nbytes, device, torch.bfloat16),
    "squares fp32": lambda nbytes, device: like_trained(nbytes, device, std=1e-4).square_(),
    "random bits": random_bits, "all zeros": zeros, "experts, 7 of 8 zero": sparse_experts,
}


def run(bench) -> None:
    for kind, make in KINDS.items():
        measure(bench, kind, [make(bench.args.bytes / 4, bench.device) for _ in range(4)])
        bench.release()


def measure(bench, kind, group) -> None:
    for codec in CODECS:
        bench.case(f"{kind}, {codec}", lambda: to_host(bench, group, codec), nbytes=total(group))
    if kind == next(iter(KINDS)):
        bench.case("copy to pinned memory", PinnedCopy(bench, group), nbytes=total(group))
