"""Pipelines from tensors to payloads and back: on the GPU for bytes that are there, on CPU threads for the others."""
from __future__ import annotations

from dataclasses import replace

import torch

from ..encoding import codecs, format
from ..errors import CodecUnavailableError, TableError
from . import cpu
from .available import gpu_missing
from .payload import Payload, Source

__all__ = ["Payload", "Source", "encode", "parse_payload", "decode_payload"]


def encode(sources: list[Source], config, progress=lambda raw_bytes: None) -> list[Payload]:
    """Encode sources, each on the device that the configuration and its bytes suggest; payloads come back in order, on the host.

    Raises `EncodeError`, `CodecUnavailableError`.
    """
    on_gpu = [_encode_on_gpu(source, config) for source in sources]
    if not any(on_gpu):
        return cpu.encode([_on_host(source) for source in sources], config, progress)
    from . import gpu
    done = iter(gpu.encode([source for source, here in zip(sources, on_gpu) if here], config, progress))
    left = [_on_host(source) for source, here in zip(sources, on_gpu) if not here]
    rest = iter(cpu.encode(left, config, progress) if left else ())
    return [next(done if here else rest) for here in on_gpu]


def _encode_on_gpu(source: Source, config) -> bool:
    if config.device == "cpu":
        return False
    needs_gpu = config.device == "gpu" or codecs.BY_NAME[config.codec].cpu is None and config.codec != "none"
    if not needs_gpu and not source.data.is_cuda:
        return False
    missing = gpu_missing()
    if missing and config.device == "gpu":
        raise CodecUnavailableError(f"nvcomp_checkpoint.device is 'gpu', but {missing}.")
    return missing is None


def _on_host(source: Source) -> Source:
    return replace(source, data=source.data.cpu()) if source.data.is_cuda else source


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


def decode_payload(data: torch.Tensor, parsed) -> torch.Tensor:
    """Decode a payload on its own device to uint8 [header.raw_bytes]. A codec without a CPU implementation goes through the GPU.

    Raises `ChecksumError`, `DecodeError`, `CodecUnavailableError`.
    """
    header, table, codec = parsed
    coded = bool((table.mode == format.CODED).any())
    if gpu_missing() is None and (data.is_cuda or coded and codec.cpu is None):
        from . import gpu
        return gpu.decode(data, header, table, codec)
    if coded:
        codecs.cpu(codec)  # before anything is allocated
    out = torch.empty(header.raw_bytes, dtype=torch.uint8, device="cpu")  # whatever the default device is
    cpu.decode(data.cpu().numpy(), header, table, codec, out.numpy())
    return out.to(data.device)
