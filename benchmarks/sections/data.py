"""Tensors to measure on, and the two ways to the host: a plain copy, and the encoder."""
from __future__ import annotations

import torch

from ds_nvcomp import Config
from ds_nvcomp.encoding import codecs, transforms
from ds_nvcomp.pipeline import Source, encode

from .bench import Skip

SLAB = 64 << 20


def like_trained(nbytes, device, dtype=torch.float32, std=0.02) -> torch.Tensor:
    """Weights as an initialisation leaves them and a training keeps them, near enough for their exponents."""
    return torch.empty(max(1, int(nbytes) // dtype.itemsize), dtype=dtype, device=device).normal_(std=std)


def adam_state(nbytes, device) -> dict:
    """A ZeRO shard: fp32 masters, both moments, bf16 weights; tensors of at most a gigabyte."""
    params = int(nbytes) // 14
    state, at = {"step": 7, "layers": []}, 0
    while at < params:
        count = min(params - at, 1 << 28)
        master = like_trained(4 * count, device)
        state["layers"].append({"master": master, "exp_avg": like_trained(4 * count, device, std=1e-4),
                                "exp_avg_sq": like_trained(4 * count, device, std=1e-4).square_(), "weight": master.bfloat16()})
        at += count
    return state


def tensors(value) -> list[torch.Tensor]:
    """The tensors in dicts and lists, each memory once."""
    found = {}

    def walk(item):
        if isinstance(item, torch.Tensor):
            found.setdefault((item.data_ptr(), item.numel(), item.dtype), item.detach())
        elif isinstance(item, dict):
            list(map(walk, item.values()))
        elif isinstance(item, (list, tuple)):
            list(map(walk, item))
    walk(value)
    return [tensor for tensor in found.values() if tensor.numel()]


def total(group) -> int:
    return sum(tensor.nbytes for tensor in group)


def as_bytes(tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def same(group, other) -> bool:
    """Bit for bit."""
    return len(group) == len(other) and all(torch.equal(as_bytes(a), as_bytes(b.to(a.device))) for a, b in zip(group, other))


def needs(bench, codec) -> None:
    if codec != "none" and codecs.BY_NAME[codec].cpu is None and not bench.gpu:
        raise Skip("needs an NVIDIA GPU")


def to_host(bench, group, codec, whole=False, **keys) -> dict:
    """Encode tensors to host memory. `whole`: codec over the bytes as they are, which is the published nvCOMP recipe."""
    needs(bench, codec)
    sources = [Source(as_bytes(t), transforms.WHOLE if whole else transforms.for_dtype(str(t.dtype).removeprefix("torch.")))
               for t in group]
    payloads = [payload for _, payload in encode(sources, Config(codec=codec, **keys))]  # all of them stay, as in a snapshot
    return {"ratio": sum(payload.nbytes for payload in payloads) / total(group)}


class PinnedCopy:
    """The least that a snapshot can cost: the bytes as they are, into pinned slabs that are there already."""

    def __init__(self, bench, group):
        self.group = [as_bytes(tensor) for tensor in group]
        self.slabs = [torch.empty(SLAB, dtype=torch.uint8, pin_memory=bench.gpu) for _ in range(-(-total(self.group) // SLAB))]

    def __call__(self):
        end = 0
        for tensor in self.group:
            at = 0
            while at < tensor.numel():
                number, inside = divmod(end, SLAB)
                count = min(SLAB - inside, tensor.numel() - at)
                self.slabs[number][inside:inside + count].copy_(tensor[at:at + count], non_blocking=True)
                at, end = at + count, end + count
