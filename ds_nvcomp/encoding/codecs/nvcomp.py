"""Every codec id on the GPU, by nvCOMP 6's Python API; the only file that imports it.

Batches are carved out of one buffer at fixed strides, so a tile costs a handful of Python calls however many chunks it has. Raw
bitstreams only: sizes, checksums and the rest are FORMAT.md's business.
"""
from __future__ import annotations

import functools
import threading

import torch
from nvidia import nvcomp

from ...errors import CodecUnavailableError
from . import CodecId

if not hasattr(nvcomp, "as_arrays"):
    raise CodecUnavailableError("ds_nvcomp needs nvCOMP 6 (nvidia-nvcomp-cu12 or -cu13 >= 6, < 7); the one installed is older.")

# Entropy coding alone for exponents: on them matches cost time and bytes. Other bytes get the fast match finder.
_OPTIONS = {
    "Deflate": lambda exponents: dict(algorithm_type=0 if exponents else 1),
    "GDeflate": lambda exponents: dict(algorithm_type=0 if exponents else 1),
    "ANS": lambda exponents: dict(data_type="|u1"),
    "LZ4": lambda exponents: dict(data_type="|u1"),
    "Bitcomp": lambda exponents: dict(data_type="|u1"),
    "Cascaded": lambda exponents: dict(data_type="|u1"),
}


def _on_device(method):
    """nvCOMP works on CUDA's current device, whatever its codec was made for: on a second one it refused all (seen with two GPUs)."""
    @functools.wraps(method)
    def function(self, *args, **kwargs):
        with torch.cuda.device(self.device):
            return method(self, *args, **kwargs)
    return function


class Batch:
    """Coded chunks in slots, a stride apart; `sizes()` waits for the coder."""

    def __init__(self, arrays, device: torch.device):
        self._arrays, self.device = arrays, device

    @_on_device
    def sizes(self) -> list[int]:
        return self._arrays.buffer_sizes


class GpuCodec:
    """A codec bound to one stream; calls are asynchronous on it. Raises whatever nvCOMP raises.

    Arrays are wrapped without naming the stream: everything here is ordered on the codec's own, and nvCOMP waits on the host for an
    array that names one (measured: an encode behind a 20 ms kernel then takes 20 ms to call, else 0.1).
    """

    def __init__(self, codec: CodecId, chunk_bytes: int, stream: torch.cuda.Stream, *, exponents: bool):
        self.device = stream.device
        with torch.cuda.device(self.device):
            self._codec = nvcomp.Codec(algorithm=codec.nvcomp, device_id=stream.device.index, cuda_stream=stream.cuda_stream,
                                       uncomp_chunk_size=chunk_bytes, bitstream_kind=nvcomp.BitstreamKind.RAW,
                                       **_OPTIONS.get(codec.nvcomp, lambda exponents: {})(exponents))
        self._encoding = self._decoding = (None,)

    @_on_device
    def slot_bytes(self, raw: torch.Tensor) -> int:
        """What a slot must hold for a chunk like `raw` (uint8), a multiple of 16: nvCOMP's bound, with the room that it asks for."""
        bound = self._codec.get_max_comp_buffer_size(nvcomp.as_array(raw))
        return -(-(bound + 4096) // 256) * 256

    @_on_device
    def encode(self, raw: torch.Tensor, raw_stride: int, sizes: list[int], slots: torch.Tensor, slot_bytes: int) -> Batch:
        """Code `sizes` bytes at each stride of `raw` into the slots."""
        key = raw.data_ptr(), raw_stride, slots.data_ptr(), slot_bytes, sizes
        if self._encoding[0] != key:  # the same for all full tiles of a tensor
            starts = range(len(sizes))
            self._encoding = (key, nvcomp.as_arrays(raw, [i * raw_stride for i in starts], sizes),
                              nvcomp.as_arrays(slots, [i * slot_bytes for i in starts], [slot_bytes] * len(sizes)),
                              self._codec.compression_config(sizes))
        _, source, out, config = self._encoding
        return Batch(self._codec.encode(source, out=out, compression_config=config), self.device)

    def release(self) -> None:
        """Let go of the buffers of the last calls."""
        self._encoding = self._decoding = (None,)

    @_on_device
    def decode(self, data: torch.Tensor, offsets: list[int], sizes: list[int], out: torch.Tensor, out_offsets: list[int],
               raw_sizes: list[int]):
        """Decode pieces of `data` to their places in `out`. What is returned must be kept until that is done.

        nvCOMP does not tell whether the pieces were what they should be.
        """
        key = out.data_ptr(), out_offsets, raw_sizes
        if self._decoding[0] != key:
            # From the sizes, or nvCOMP walks every stream for its configuration.
            self._decoding = (key, nvcomp.as_arrays(out, out_offsets, raw_sizes),
                              self._codec.decompression_config(self._codec.compression_config(raw_sizes)))
        _, target, config = self._decoding
        source = nvcomp.as_arrays(data, offsets, sizes)
        return self._codec.decode(source, out=target, decompression_config=config), source, config


_local = threading.local()


def codec_for(codec: CodecId, chunk_bytes: int, stream: torch.cuda.Stream, *, exponents: bool) -> GpuCodec:
    """A `GpuCodec` for this thread, stream and setting, made once: making one costs milliseconds."""
    cache = _local.__dict__.setdefault("codecs", {})
    key = codec.name, chunk_bytes, stream.cuda_stream, stream.device.index, exponents
    if key not in cache:
        cache[key] = GpuCodec(codec, chunk_bytes, stream, exponents=exponents)
    return cache[key]
