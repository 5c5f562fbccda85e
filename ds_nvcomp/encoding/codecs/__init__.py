"""Codecs by id. An id means mutual decodability: what one implementation of it wrote, every other one reads.

A codec module has the CPU implementation; nvcomp.py has the GPU one of every id. To add a codec, add a file and a row here.
"""
from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Protocol

from ...errors import CodecUnavailableError, UnsupportedVersionError

KIB = 1024


@dataclass(frozen=True)
class CodecId:
    """`number` and `revision` are in the file. `nvcomp` is the algorithm's name there, None where nothing is coded.

    `cpu` is the module with the CPU implementation, None where only the GPU can. `revision` is nvCOMP's major version where the
    bitstream is nvCOMP's own and may change with it (ANS did, in 6.0), and 0 where a public specification fixes it.

    nvCOMP's decoders do not bound what they read and write by what they are told: of streams changed at random, with every checksum
    made right, Snappy's, GDeflate's, Bitcomp's and Cascaded's faulted the device within tens, Zstd's hung at the first, Deflate's and
    LZ4's wrote behind their output (6.0.0, H200). `checked` are streams whose head is verified first; of 2,000 such none did harm.
    """
    number: int
    name: str
    revision: int
    chunk_bytes: int
    cpu: str | None
    nvcomp: str | None
    checked: bool = False

    @property
    def safe(self) -> bool:
        """Whether there is a decoder for streams from a stranger: one on the CPU, or nvCOMP's behind a check."""
        return self.cpu is not None or self.checked or self.nvcomp is None


NONE = CodecId(0, "none", 0, 64 * KIB, None, None)

_ALL = (
    NONE,
    CodecId(1, "deflate", 0, 64 * KIB, "deflate", "Deflate"),        # RFC 1951, raw
    CodecId(2, "zstd", 0, 64 * KIB, "zstd", "Zstd"),                 # RFC 8878, one frame a chunk
    CodecId(3, "lz4", 0, 64 * KIB, "lz4", "LZ4"),                    # LZ4 block format, no size prefix
    CodecId(4, "snappy", 0, 64 * KIB, "snappy", "Snappy"),           # raw snappy
    CodecId(16, "ans", 6, 256 * KIB, None, "ANS", checked=True),
    CodecId(17, "gdeflate", 6, 64 * KIB, None, "GDeflate"),
    CodecId(18, "bitcomp", 6, 64 * KIB, None, "Bitcomp"),
    CodecId(19, "cascaded", 6, 64 * KIB, None, "Cascaded"),
)
BY_NAME = {codec.name: codec for codec in _ALL}
BY_NUMBER = {codec.number: codec for codec in _ALL}


class CpuCodec(Protocol):
    """One chunk at a time, both called from many threads at once; both release the GIL while they work."""

    def encode(self, chunk, *, exponents: bool) -> bytes:
        """Code a buffer of bytes. `exponents` tells that the bytes are a noise-like plane in which matches are useless."""

    def decode(self, coded, raw_bytes: int):
        """A buffer of at most `raw_bytes` + 1 bytes, or an exception of any kind. Never more, whatever `coded` says."""


def resolve(number: int, revision: int) -> CodecId:
    """The codec that a payload header names. Raises `UnsupportedVersionError`."""
    codec = BY_NUMBER.get(number)
    if codec is None:
        raise UnsupportedVersionError(f"The payload is coded with codec {number}, known are {sorted(BY_NUMBER)}. "
                                      "Install a ds_nvcomp that is at least as new as the one that wrote it.")
    if revision != codec.revision:
        raise UnsupportedVersionError(
            f"The payload is coded with {codec.name} of nvCOMP {revision}, this ds_nvcomp reads that of nvCOMP {codec.revision}. "
            f"Install a ds_nvcomp and an nvidia-nvcomp of major version {revision} to read it, or to convert it with "
            "`ds-nvcomp unpack`.")
    return codec


def cpu(codec: CodecId) -> CpuCodec:
    """The CPU implementation. Raises `CodecUnavailableError` where there is none, or where its library is not installed."""
    if codec.cpu is None:
        raise CodecUnavailableError(
            f"Codec {codec.name!r} runs on an NVIDIA GPU only, and no usable one was found here (it takes torch with CUDA, and "
            "`pip install ds_nvcomp[cu13]` or [cu12] for CuPy and nvCOMP). To save here, choose codec 'deflate'. To read a file "
            "that has it, load it on a machine with a GPU, or convert it there with `ds-nvcomp pack --codec deflate`.")
    try:
        return importlib.import_module(f".{codec.cpu}", __name__)
    except ImportError as err:
        raise CodecUnavailableError(f"Codec {codec.name!r} needs the package {err.name!r} on a CPU: pip install {err.name}") from err
