"""Payloads to break: built by the implementation, changed by offsets of FORMAT.md and not by the implementation's structs."""
import struct
import zlib

import numpy as np
import torch

from conformance import CHUNK_BYTES, in_order, joined, make
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import transforms
from ds_nvcomp.pipeline import Source, cpu, decode_payload, parse_payload

FIELDS = {"magic": (0, "8s"), "version": (8, "H"), "features": (10, "H"), "transform": (12, "B"), "codec": (13, "B"), "revision": (14, "B"),
          "planes": (15, "B"), "chunk_elements": (16, "I"), "reserved_1": (20, "I"), "elements": (24, "Q"), "chunks": (32, "Q"),
          "data_bytes": (40, "Q"), "reserved_2": (48, "Q"), "table_crc": (56, "I"), "header_crc": (60, "I")}


def payload(dtype="bfloat16", content="normal", elements=2 * CHUNK_BYTES + 33, codec="deflate", chunk_bytes=CHUNK_BYTES) -> bytearray:
    transform = transforms.for_dtype(dtype)
    source = Source(torch.from_numpy(make(dtype, content, elements * transform.width).copy()), transform)
    [encoded] = in_order(cpu.encode([source], Config(codec=codec, chunk_bytes=chunk_bytes)))
    return bytearray(joined(encoded).tobytes())


def get(data, field):
    offset, kind = FIELDS[field]
    return struct.unpack_from("<" + kind, data, offset)[0]


def put(data, seal=True, **fields) -> bytearray:
    """A copy with header fields replaced; with `seal`, the header's checksum is right again."""
    data = bytearray(data)
    for field, value in fields.items():
        offset, kind = FIELDS[field]
        struct.pack_into("<" + kind, data, offset, value)
    return sealed(data) if seal else data


def sealed(data) -> bytearray:
    struct.pack_into("<I", data, 60, zlib.crc32(data[:60]))
    return data


def table_of(data):
    """(offsets of the crc, size [planes][n] and mode [planes][n] columns, end of the table); `decoded_of` has the column between."""
    n, planes = get(data, "chunks"), get(data, "planes")
    at = 64
    crc = [at + 4 * c for c in range(n)]
    size = [[at + 8 * n + 4 * (p * n + c) for c in range(n)] for p in range(planes)]
    mode = [[at + 8 * n + 4 * n * planes + p * n + c for c in range(n)] for p in range(planes)]
    return crc, size, mode, at + n * (8 + 5 * planes)


def decoded_of(data):
    """Offsets of the column `decoded`."""
    n = get(data, "chunks")
    return [64 + 4 * n + 4 * c for c in range(n)]


def plane_crc(raw) -> int:
    """What `decoded` has to be for a plane of these bytes."""
    raw = bytes(raw)
    return zlib.crc32(raw.ljust(-(-len(raw) // 16) * 16, b"\0"))


def change_table(data, crc=(), size=(), mode=(), decoded=()) -> bytearray:
    """A copy with `crc` and `decoded` ((chunk, value), ...), `size` and `mode` ((plane, chunk, value), ...) replaced and both checksums right
    again."""
    data = bytearray(data)
    crcs, sizes, modes, end = table_of(data)
    for c, value in crc:
        struct.pack_into("<I", data, crcs[c], value)
    for c, value in decoded:
        struct.pack_into("<I", data, decoded_of(data)[c], value)
    for p, c, value in size:
        struct.pack_into("<I", data, sizes[p][c], value)
    for p, c, value in mode:
        data[modes[p][c]] = value
    return put(data, table_crc=zlib.crc32(data[64:end]))


def spans(data):
    """[(start, stop)] of each chunk's stored bytes."""
    _, sizes, _, end = table_of(data)
    at, result = -(-end // 16) * 16, []
    for c in range(get(data, "chunks")):
        start = at
        for p in range(len(sizes)):
            at += -(-struct.unpack_from("<I", data, sizes[p][c])[0] // 16) * 16
        result.append((start, at))
    return result


def reseal_chunk(data, chunk) -> bytearray:
    """A copy with the checksum of a chunk made right for what is there: what a faulty or hostile writer would give."""
    start, stop = spans(data)[chunk]
    return change_table(data, crc=[(chunk, zlib.crc32(data[start:stop]))])


def decode(data) -> bytes:
    tensor = torch.from_numpy(np.frombuffer(bytes(data), np.uint8).copy())
    return decode_payload(tensor, parse_payload(tensor)).numpy().tobytes()
