"""Launches kernels.cu through CuPy, the only file that imports it. Buffers are torch tensors, so that one allocator serves both."""
from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import cupy
import numpy as np
import torch

from .checksums import ONE, POLYNOMIAL
from .transforms import Transform

THREADS = 256
_GROUP = 16


@lru_cache(maxsize=None)
def _module(device: int) -> cupy.RawModule:
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=Path(__file__).with_name("kernels.cu").read_text(), options=("-std=c++17",))
        module.compile()
        return module


def _launch(name: str, grid, tensors_and_scalars, stream: torch.cuda.Stream) -> None:
    device = stream.device.index
    args = tuple(np.uint64(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in tensors_and_scalars)
    with cupy.cuda.Device(device), _borrow(stream):
        _kernel(name, device)(grid, (THREADS,), args)


class _Borrowed:
    """A torch stream under the CUDA stream protocol, which older torch versions do not speak themselves."""

    def __init__(self, stream):
        self._pointer = stream.cuda_stream

    def __cuda_stream__(self):
        return 0, self._pointer


def _borrow(stream):
    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Borrowed(stream))
    return cupy.cuda.ExternalStream(stream.cuda_stream, stream.device.index)  # CuPy < 14


@lru_cache(maxsize=None)
def _kernel(name: str, device: int):
    return _module(device).get_function(name)


def _chunk_grid(chunk_elements: int, chunks: int):
    return -(-chunk_elements // (THREADS * _GROUP)), chunks


def split(transform: Transform, stream, chunk_elements: int, src, elements, weights, slots, slot_stride: int, flags) -> None:
    """First planes of the chunks at addresses `src` (uint64 [n]) with `elements` (int32 [n]) to `slots` (uint8, a stride apart).

    `weights` are the addresses of the first 16-bit weights that each chunk is encoded as its difference from (uint64 [n], 0 for none), and
    how many there are, with the top bit for fp16 (int32 [n]). `flags` (int32 [3, n], zeroed) gets the OR of each plane's bytes.
    """
    chunks = len(src)
    _launch(f"split_{transform.name}", _chunk_grid(chunk_elements, chunks),
            (src, elements, *weights, slots, np.uint64(slot_stride), flags, np.uint32(chunks)), stream)


def publish(stream, values, host) -> None:
    """Copy `values` (int32 [n]) to `host` (int32 [n], pinned memory) from the device, past the queue of copies."""
    _launch("publish", (-(-values.numel() // THREADS),), (values, host, np.uint32(values.numel())), stream)


def pack(transform: Transform, stream, chunk_elements: int, src, elements, weights, raw, raw_stride: int, coded, coded_stride: int, modes,
         offsets, sizes, out) -> None:
    """Pieces to `out`: `modes` uint8, `offsets` int64, `sizes` int32, each [planes, n]; the padding behind pieces is zeroed."""
    chunks, pieces = len(src), modes.numel()
    _launch("clear_tails", (-(-pieces // THREADS),), (out, offsets, sizes, np.uint32(pieces)), stream)
    _launch(f"pack_{transform.name}", _chunk_grid(chunk_elements, chunks),
            (src, elements, *weights, raw, np.uint64(raw_stride), coded, np.uint64(coded_stride), modes, offsets, sizes, out,
             np.uint32(chunks)), stream)


def merge(transform: Transform, stream, chunk_elements: int, data, elements, slots, slot_stride: int, modes, offsets, out) -> None:
    """Inverse of split and pack: chunks to `out`, one after the other; `offsets` count from the start of `data`."""
    chunks = len(elements)
    _launch(f"merge_{transform.name}", _chunk_grid(chunk_elements, chunks),
            (data, elements, slots, np.uint64(slot_stride), modes, offsets, out, np.uint64(chunk_elements * transform.width),
             np.uint32(chunks)), stream)


def compare(stream, a, a_stride: int, b, b_stride: int, sizes, largest: int, differ) -> None:
    """`differ` (int32 [n], zeroed) becomes 1 where the first `sizes` bytes (at most `largest`) of two slots are not the same."""
    _launch("compare", (-(-largest // (THREADS * 16)), len(sizes)),
            (a, np.uint64(a_stride), b, np.uint64(b_stride), sizes, differ), stream)


def ans_stream_bytes(stream, data, offsets, raw_bytes, limits, found) -> None:
    """`found` (int32 [n]): the bytes of the ANS stream at each of `offsets` (int64 [n]) of `data` by its own head, for a plane of
    `raw_bytes` (int32 [n]); 0 for one that no encoder makes or that is longer than `limits` (int32 [n])."""
    _launch("ans_stream_bytes", (-(-len(offsets) // THREADS),),
            (data, offsets, raw_bytes, limits, found, np.uint32(len(offsets))), stream)


def checksum(stream, data, offsets, lengths, crc) -> None:
    """CRC-32 of each `data[offset : offset + length]` (int64 [n], multiples of 16) to `crc` (int32 [n], bits of a uint32)."""
    steps, finals = _crc_tables(stream.device.index)
    _launch("checksum", (len(offsets),), (data, offsets, lengths, steps, finals, crc), stream)


def unlink(stream, data, weights, kind: str) -> None:
    """`link.restore`: `data` uint8 [4 n], in place, `weights` uint8 [2 k]."""
    count = data.numel() // 4
    _launch("unlink", (-(-count // THREADS),),
            (data, weights, np.uint64(count), np.uint64(weights.numel() // 2), np.uint32(kind == "float16")), stream)


@lru_cache(maxsize=None)
def _crc_tables(device: int):
    """Multiplication by x^(32 * THREADS), byte by byte, and x^(32 * (THREADS - t)) for each thread t; reflected, mod CRC-32's P."""
    def times_x(a):
        return a >> 1 ^ (POLYNOMIAL if a & 1 else 0)

    power, powers = ONE, []
    for _ in range(THREADS):
        for _ in range(32):
            power = times_x(power)
        powers.append(power)              # x^(32 * (i + 1))
    step = [powers[-1]]                   # step[i] = x^i * x^(32 * THREADS): what bit 31 - i of a reflected word becomes
    for _ in range(31):
        step.append(times_x(step[-1]))
    table = np.zeros((4, 256), np.uint32)
    for byte in range(4):
        for bit in range(8):
            for value in range(256):
                if value >> bit & 1:
                    table[byte, value] ^= np.uint32(step[31 - (8 * byte + bit)])
    as_tensor = lambda array: torch.from_numpy(array.view(np.int32)).to(f"cuda:{device}")  # noqa: E731
    return as_tensor(table), as_tensor(np.array(powers[::-1], np.uint32))
