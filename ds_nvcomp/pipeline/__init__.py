"""Pipelines from tensors to payloads and back: on the GPU for bytes that are there or many, on CPU threads for the others."""
from __future__ import annotations

from typing import Iterator

import torch

from ..encoding import codecs, format
from ..errors import CodecUnavailableError, TableError, UntrustedCodecError
from . import cpu, memory
from .available import gpu_missing
from .payload import Payload, Source, Weights

__all__ = ["Payload", "Source", "Weights", "encode", "parse_payload", "decode_payload"]

# Raw bytes for which a process that uses the GPU already takes the way there and back: 9 GB/s with ANS, measured, against 1.4 GB/s on 16 cores.
WORTH_THE_WAY = 64 << 20


def encode(sources: list[Source], config, progress=lambda raw_bytes: None) -> Iterator[tuple[int, Payload]]:
    """Encode sources, each on the device that the configuration and its bytes suggest, to host memory: (index, payload) as they are
    done, in any order. A source may change only when all are done.

    Raises `EncodeError`, `CodecUnavailableError`.
    """
    much = sum(source.data.nbytes for source in sources if not source.data.is_cuda) >= WORTH_THE_WAY
    here = {i for i, source in enumerate(sources) if _encode_on_gpu(source, config, much)}
    if here:
        members = sorted(here)
        for position, payload in _gpu_encode([sources[i] for i in members], config, progress):
            yield members[position], payload
    members = [i for i in range(len(sources)) if i not in here]
    for position, payload in cpu.encode([sources[i].on_host() for i in members], config, progress):
        yield members[position], payload


def _encode_on_gpu(source: Source, config, much: bool) -> bool:
    """`much` says whether the bytes on the host are worth the way to the GPU and back."""
    if config.device == "cpu":
        return False
    codec = codecs.BY_NAME[config.codec]
    if config.device == "gpu" or source.data.is_cuda:
        wanted = True
    elif codec is codecs.NONE:
        wanted = False  # nothing to gain there
    else:
        wanted = codec.cpu is None or much and torch.cuda.is_initialized()
    if not wanted:
        return False
    missing = gpu_missing()
    if missing and config.device == "gpu":
        raise CodecUnavailableError(f"nvcomp_checkpoint.device is 'gpu', but {missing}.")
    return missing is None


def _gpu_encode(sources, config, progress):
    from . import gpu
    return gpu.encode(sources, config, progress)


def parse_payload(data: torch.Tensor):
    """Validate everything of a payload but its chunk data: (header, table, codec). `data` is uint8 [bytes] on any device.

    Raises `TruncatedError`, `HeaderError`, `TableError`, `UnsupportedVersionError`; allocates no more than `data` has bytes.
    """
    header = format.parse_header(data[:format.HEADER.size].cpu().numpy().tobytes(), data.numel())
    codec = codecs.resolve(header.codec_id, header.codec_revision)
    table = format.parse_table(data[format.HEADER.size:header.data_start].cpu().numpy().tobytes(), header)
    if codec is codecs.NONE and (table.mode == format.CODED).any():
        raise TableError("A chunk is marked as coded in a payload whose codec is none. The file is damaged.")
    return header, table, codec


def decode_payload(data: torch.Tensor, parsed, *, device: torch.device | None = None, trusted: bool = True) -> torch.Tensor:
    """Decode a payload to uint8 [header.raw_bytes] on `device`, by default that of `data`.

    On the GPU where either is there, where only that can, and for much data in a process that uses the GPU already. nvCOMP's decoders
    are not made for hostile streams. With `trusted` false they see only what is checked first: what has a decoder on the CPU is decoded
    there, wherever it is.

    Raises `ChecksumError`, `DecodeError`, `CodecUnavailableError`, `UntrustedCodecError`, and where there is no room for what the
    header announces, `NotEnoughMemoryError`, or torch's OutOfMemoryError on a GPU.
    """
    header, table, codec = parsed
    device = device or data.device
    coded = bool((table.mode == format.CODED).any())
    if coded and not (trusted or codec.safe):
        raise UntrustedCodecError(
            f"The only decoder of codec {codec.name!r}, nvCOMP's, can be made to overwrite GPU memory, so it is not used on a file that is "
            "not trusted. If you trust this one, load it with weights_only=False, or convert it with `ds-nvcomp pack --codec deflate`.")
    on_gpu = data.is_cuda or device.type == "cuda" or coded and codec.cpu is None or \
        header.raw_bytes >= WORTH_THE_WAY and torch.cuda.is_initialized()
    on_gpu = on_gpu and gpu_missing() is None and (trusted or not coded or codec.checked)
    if device.type == "cpu" or not on_gpu:
        memory.expect_room(header.raw_bytes)
    if on_gpu:
        from . import gpu
        return gpu.decode(data, header, table, codec, device)
    if coded:
        codecs.cpu(codec)  # before anything is allocated
    out = torch.empty(header.raw_bytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
    cpu.decode(data.cpu().numpy(), header, table, codec, out.numpy())
    return out.to(device)
