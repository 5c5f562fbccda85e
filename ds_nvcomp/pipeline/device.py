"""What encoder and decoder on a GPU share: this thread's streams, codecs on them, and small arrays on their way there."""
from __future__ import annotations

import threading

import numpy as np
import torch

from ..encoding import codecs
from ..encoding.codecs import nvcomp
from ..encoding.format import ALIGN, aligned
from ..encoding.transforms import WHOLE

SLOTS = 2  # tiles at a time

_local = threading.local()


def streams(device: torch.device, *, priority: int = 0) -> list[torch.cuda.Stream]:
    """This thread's streams, one a slot and one for copies: made once, since codecs and the allocator's blocks are bound to them."""
    cache = _local.__dict__.setdefault("streams", {})
    if (device, priority) not in cache:
        cache[device, priority] = [torch.cuda.Stream(device, priority=priority) for _ in range(SLOTS + 1)]
    return cache[device, priority]


def coders(codec, transform, chunk_bytes: int, of_slots: list[torch.cuda.Stream]) -> list[nvcomp.GpuCodec | None]:
    """What codes and decodes chunks of the first plane on each stream; None for the codec that does nothing."""
    return [None if codec is codecs.NONE else nvcomp.codec_for(codec, chunk_bytes, stream, exponents=transform is not WHOLE)
            for stream in of_slots]


def upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copies of small arrays on the device, in one transfer."""
    places, end = [], 0
    for array in arrays:
        places.append(slice(end, end + array.nbytes))
        end = int(aligned(end + array.nbytes))
    together = np.empty(max(end, ALIGN), np.uint8)  # views of an empty tensor have no stride to speak of
    for array, place in zip(arrays, places):
        together[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.from_numpy(together).to(device, non_blocking=True)
    return [there[place].view(_TORCH[array.dtype.name]).view(array.shape) for array, place in zip(arrays, places)]


_TORCH = {"uint8": torch.uint8, "int32": torch.int32, "uint32": torch.int32, "int64": torch.int64}
