"""What was encoded as a difference from 16-bit weights becomes fp32 again; and how weights are told from others."""
from __future__ import annotations

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
        kernels.link(torch.cuda.current_stream(data.device), data, weights.data, weights.kind, undo=True)
        return
    here, ours = data.cpu().numpy(), weights.to("cpu")
    list(threads.pool().map(lambda at: link.restore(here[at:at + PART], ours.part(at, at + PART).numpy(), ours.kind), range(0, len(here), PART)))
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


def digest(weights: torch.Tensor) -> int:
    """CRC-32 of uint8 [n] on any device."""
    if not weights.is_cuda or gpu_missing() is not None:
        return crc32(weights.cpu().numpy())
    from ..encoding import kernels
    from .device import upload
    whole = weights.numel() // 16 * 16
    starts = np.arange(0, whole, PART, dtype=np.int64)
    lengths = np.minimum(whole - starts, PART)
    found = torch.zeros(len(starts), dtype=torch.int32, device=weights.device)
    if whole:
        aligned = weights if weights.data_ptr() % 4 == 0 else weights.clone()
        kernels.checksum(torch.cuda.current_stream(weights.device), aligned, *upload(weights.device, starts, lengths), found)
    tail = weights[whole:].cpu().numpy()
    return checksums.join(np.append(found.cpu().numpy().view(np.uint32), np.uint32(crc32(tail))), np.append(lengths, len(tail)))
