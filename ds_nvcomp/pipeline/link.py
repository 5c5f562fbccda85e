"""What was encoded as a difference from 16-bit weights becomes fp32 again; and how weights are told from others."""
from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from isal.isal_zlib import crc32

from ..encoding import checksums, link
from . import threads
from .available import gpu_missing
from .payload import Weights

PART = 1 << 20  # bytes at once: on a CPU thread, and of a checksum on the GPU
SAMPLED = 1 << 16


def restore(data: torch.Tensor, weights: Weights) -> None:
    """Inverse of `link.difference`, in place: `data` uint8 [4 n], and `weights` on its device."""
    if data.is_cuda and gpu_missing() is None:
        from ..encoding import kernels
        kernels.unlink(torch.cuda.current_stream(data.device), data, weights.data, weights.kind)
        return
    here, ours = data.cpu().numpy(), weights.to("cpu")
    parts = [(at, at + PART) for at in range(0, len(here), PART)]
    list(threads.pool().map(lambda part: link.restore(here[slice(*part)], ours.part(*part).numpy(), ours.kind), parts))
    if data.is_cuda:
        data.copy_(torch.from_numpy(here))


def fits(master: torch.Tensor, weights: Weights) -> bool:
    """Whether `weights` are what `master` (uint8 [4 n]) was rounded to, by a sample: nearly all differences have 17 bits or less.

    Where they are not, a link would be as exact, and larger than none.
    """
    count = weights.data.numel() // 2
    if not count:
        return False
    at = torch.linspace(0, count - 1, min(count, SAMPLED), dtype=torch.float64, device=master.device).long()
    sample = [tensor.view(torch.int32 if width == 4 else torch.int16)[at.to(tensor.device)].cpu().numpy().view(np.uint8)
              for tensor, width in ((master, 4), (weights.data, 2))]
    coded = link.difference(*sample, weights.kind).view(np.uint32) >> 16
    return np.count_nonzero(coded) <= len(coded) // 64


class Digest:
    """CRC-32 of uint8 [n] on any device. On a GPU it is computed behind what is asked for next; `value` waits for it."""

    def __init__(self, data: torch.Tensor):
        self._data, self._found = data, None
        if data.is_cuda and gpu_missing() is None:
            self._begin(data)

    def _begin(self, data: torch.Tensor) -> None:
        from ..encoding import kernels
        from .device import upload
        whole = data.numel() // 16 * 16
        starts = np.arange(0, whole, PART, dtype=np.int64)
        lengths = np.minimum(whole - starts, PART)
        stream = torch.cuda.Stream(data.device)
        stream.wait_stream(torch.cuda.current_stream(data.device))
        with torch.cuda.stream(stream):
            crcs = torch.zeros(len(starts), dtype=torch.int32, device=data.device)
            if whole:
                aligned = data if data.data_ptr() % 4 == 0 else data.clone()
                kernels.checksum(stream, aligned, *upload(data.device, starts, lengths), crcs)
            self._found = stream, crcs, data[whole:], lengths

    @cached_property
    def value(self) -> int:
        if self._found is None:
            return crc32(self._data.cpu().numpy())
        stream, crcs, tail, lengths = self._found
        with torch.cuda.stream(stream):
            crcs, tail = crcs.cpu().numpy().view(np.uint32), tail.cpu().numpy()
        return checksums.join(np.append(crcs, np.uint32(crc32(tail))), np.append(lengths, len(tail)))


def digest(data: torch.Tensor) -> int:
    """CRC-32 of uint8 [n] on any device."""
    return Digest(data).value
