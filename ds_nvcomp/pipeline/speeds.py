"""How fast, and how small, each codec is on this machine: measured through the pipelines that saves and loads use."""
from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import Iterable, Iterator

import numpy as np
import torch

from ..config import CODECS, Config
from ..encoding import codecs, transforms
from ..errors import CodecUnavailableError, DecodeError
from . import decode_payload, encode, parse_payload
from .available import gpu_missing
from .payload import Source
from .threads import count

GB = 1e9
MIB = 1 << 20
CHUNKS = (64 << 10, 256 << 10)  # bytes; of interest on a GPU besides a codec's own size
SPREAD = 0.02                   # standard deviation of the sample: that of trained weights
LEAST, MOST = 28 * MIB, 1024 * MIB  # bytes of the sample
AGAIN = 8         # times the sample is encoded in one go at most, so that a pipeline's beginning and end do not count for much
A_RUN = 0.1       # seconds; a sample that takes longer is encoded once
RUNS, ENOUGH = 3, 0.3  # runs at most, and the seconds after which there is no further one


@dataclass(frozen=True)
class Speed:
    """One measured setting. `ratio` is stored / raw bytes; `encode` and `decode` are GB (1e9 bytes) of raw tensors a second: into host
    memory, and from a payload that is on the tensors' device already. `threads` are the configuration's, 0 being all of its share."""
    codec: str
    chunk_bytes: int
    threads: int
    ratio: float
    encode: float
    decode: float


def default_device(config: Config) -> torch.device:
    """Where tensors are that this configuration saves at its best here."""
    return torch.device("cuda" if config.device != "cpu" and gpu_missing() is None else "cpu")


def settings(config: Config, device: torch.device, names: Iterable[str] = CODECS, tuned: Iterable[str] = ()) -> list[Config]:
    """The configurations worth measuring for tensors on `device`: one of each codec of `names` that can run here, with the codec's own
    chunk size. For those `tuned`, then other chunk sizes on a GPU, and half of the threads on a CPU, where `config` does not fix them."""
    found = []
    for name in names:
        codec = codecs.BY_NAME[name]
        if not _runs(codec, config, device):
            continue
        own = replace(config, codec=name)
        found.append(own)
        if codec is codecs.NONE or name not in tuned:
            continue
        if device.type == "cuda" and not config.chunk_bytes:
            found += [replace(own, chunk_bytes=size) for size in CHUNKS if size != codec.chunk_bytes]
        if device.type == "cpu" and codec.cpu is not None and not config.threads and count(0) >= 4:
            found.append(replace(own, threads=count(0) // 2))
    return found


def _runs(codec, config, device) -> bool:
    on_gpu = config.device != "cpu" and gpu_missing() is None
    if codec is codecs.NONE or on_gpu and (device.type == "cuda" or codec.cpu is None):
        return True
    try:
        codecs.cpu(codec)
    except CodecUnavailableError:
        return False
    return True


def measure(configs: Iterable[Config], device: torch.device, *, sample_bytes: int = 0) -> Iterator[Speed]:
    """Encode and decode a sample on `device` by each of `configs`: a `Speed` each, the medians of a few runs after some that warm up.

    `sample_bytes` 0 takes what is enough to be measured in well under a second a codec. Raises `CodecUnavailableError`,
    `EncodeError`, and `DecodeError` should a codec not give back what it was given.
    """
    device = torch.device(device)
    sources = _sample(device, sample_bytes or _enough(device))
    raw = sum(source.data.numel() for source in sources)
    for config in configs:
        payloads = [_joined(payload, device) for _, payload in sorted(encode(sources, config), key=lambda found: found[0])]
        for source, again in zip(sources, map(_decoded, payloads)):
            if not torch.equal(again, source.data):
                raise DecodeError(f"Codec {config.codec!r} did not give back the bytes of a sample on {device}. Do not use it on this "
                                  "machine, and report it.")
        size = config.chunk_bytes or codecs.BY_NAME[config.codec].chunk_bytes
        yield Speed(config.codec, size, config.threads, sum(payload.numel() for payload in payloads) / raw,
                    raw / GB / _seconds(lambda times: _exhaust(encode(sources * times, config)), device),
                    raw / GB / _seconds(lambda times: _exhaust(map(_decoded, payloads * times)), device))


def copy_speed(device: torch.device) -> float | None:
    """GB/s of plain copies from `device` to pinned host memory; None where tensors are on the host already."""
    device = torch.device(device)
    if device.type == "cpu":
        return None
    there = torch.zeros(_enough(device) // 4, dtype=torch.uint8, device=device)
    here = torch.empty(there.numel(), dtype=torch.uint8, device="cpu", pin_memory=True)
    here.copy_(there)
    return there.numel() / GB / _seconds(lambda times: [here.copy_(there, non_blocking=True) for _ in range(times)], device)


def _enough(device) -> int:
    """Bytes of the sample: enough to keep a GPU or all threads busy, and no more than a part of the GPU memory that is free."""
    if device.type == "cpu":
        return min(MOST // 8, max(LEAST, 14 * MIB * count(0)))
    return min(MOST, max(LEAST, torch.cuda.mem_get_info(device)[0] // 8))


def _sample(device, nbytes) -> list[Source]:
    """Normal values, six bytes of fp32 for one of bf16, as in a checkpoint of Adam's state. A block is repeated, farther than any codec
    looks back."""
    sources = []
    generator = torch.Generator("cpu").manual_seed(0)
    for dtype, part in ((torch.float32, nbytes * 6 // 7), (torch.bfloat16, nbytes // 7)):
        block = torch.empty(2 * MIB, dtype=torch.float32, device="cpu").normal_(0, SPREAD, generator=generator).to(dtype).to(device)
        elements = max(1, part // dtype.itemsize)
        data = block.repeat(-(-elements // block.numel()))[:elements].clone()
        sources.append(Source(data.view(torch.uint8), transforms.for_dtype(str(dtype).removeprefix("torch.")), "sample"))
    return sources


def _joined(payload, device) -> torch.Tensor:
    """A payload in one piece on `device`, as a load has it."""
    whole, at = torch.empty(payload.nbytes, dtype=torch.uint8, device=device), 0
    for part in payload.parts:
        part = np.frombuffer(part, np.uint8)
        whole[at:at + part.size].copy_(torch.from_numpy(part if part.flags.writeable else part.copy()))
        at += part.size
    return whole


def _decoded(payload: torch.Tensor) -> torch.Tensor:
    return decode_payload(payload, parse_payload(payload))


def _exhaust(results) -> None:
    """Let each result go before the next, as a save does that writes it."""
    for _ in results:
        pass


def _seconds(work, device) -> float:
    """The median of what doing it once takes, where `work(times)` does it several times in one go."""
    def timed(times):
        _wait(device)
        began = time.perf_counter()
        work(times)
        _wait(device)
        return time.perf_counter() - began

    times = max(1, min(AGAIN, int(A_RUN / max(timed(1), 1e-6))))
    if times > 1:
        timed(times)  # what it takes of pinned memory is slow to get, and kept
    found = []
    while len(found) < RUNS and sum(found) < ENOUGH:
        found.append(timed(times))
    return statistics.median(found) / times


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)
