"""A decoder of payloads that follows FORMAT.md, section by section, and shares nothing with the implementation.

It is slow and plain on purpose: what it and the implementation agree on is in the document. It needs `struct`, `zlib` and NumPy; LZ4 and
Snappy are written out below, and zstd is read through `zstandard` where that is installed. Usable by hand:

    unzip -p checkpoint.pt 'checkpoint/data/0' | python reference_decoder.py > storage.bin

`tensors` reads whole files, links included, without torch.
"""
import json
import os
import pickle
import struct
import sys
import zipfile
import zlib

import numpy as np


class Refused(ValueError):
    """The payload is not what FORMAT.md says; `step` is the row of its section 8. `tensors` has those of section 9.2 as `link`."""

    link = None

    def __init__(self, step, why):
        super().__init__(f"step {step}: {why}")
        self.step = step


class NotSupportedHere(Exception):
    """The payload is sound, but this decoder lacks what its codec needs."""


# Section 4: id -> bytes an element, and planes as (bits, codable, signed).
TRANSFORMS = {
    0: (1, [(8, True, False)]),
    1: (1, [(4, True, False), (4, False, True)]),
    2: (2, [(8, True, False), (8, False, True)]),
    3: (4, [(8, True, False), (8, False, True), (16, False, False)]),
    4: (8, [(8, True, False), (8, False, True), (48, False, False)]),
}
# Section 6: (id, revision).
CODECS = {(0, 0): "none", (1, 0): "deflate", (2, 0): "zstd", (3, 0): "lz4", (4, 0): "snappy",
          (16, 6): "ans", (17, 6): "gdeflate", (18, 6): "bitcomp", (19, 6): "cascaded"}
ZERO, RAW, CODED, UNSIGNED = range(4)


def align16(n):
    return (n + 15) // 16 * 16


def packed(elements, bits):
    return (elements * bits + 7) // 8


def decode(payload) -> bytes:
    """The storage's bytes. Raises `Refused` or `NotSupportedHere`."""
    payload = bytes(payload)
    size = len(payload)

    # Section 3.1, in the order of section 8.
    if size < 64:
        raise Refused(1, "no room for a header")
    if payload[0:8] != b"DSNVCOMP":
        raise Refused(2, "magic")
    version, features, transform, codec, revision, planes = struct.unpack_from("<HHBBBB", payload, 8)
    chunk_elements, = struct.unpack_from("<I", payload, 16)
    elements, chunks, data_bytes = struct.unpack_from("<QQQ", payload, 24)
    table_crc, header_crc = struct.unpack_from("<II", payload, 56)
    if version != 1:
        raise Refused(3, "version")
    if zlib.crc32(payload[0:60]) != header_crc:
        raise Refused(4, "header checksum")
    if features != 0:
        raise Refused(5, "features")
    if transform not in TRANSFORMS:
        raise Refused(6, "transform")
    width, layout = TRANSFORMS[transform]
    if planes != len(layout):
        raise Refused(7, "planes")
    if chunk_elements == 0 or chunk_elements > (2**21 if transform == 1 else 2**20) or chunk_elements % 16 != 0:
        raise Refused(8, "elements per chunk")
    if chunks != (elements + chunk_elements - 1) // chunk_elements:
        raise Refused(9, "chunks")
    table_bytes = chunks * (8 + 5 * planes)
    data_start = align16(64 + table_bytes)
    if data_start + data_bytes > size:
        raise Refused(10, "cut off")
    if data_start + data_bytes < size:
        raise Refused(11, "bytes behind the payload")
    if (codec, revision) not in CODECS:
        raise Refused(12, "codec")
    codec = CODECS[codec, revision]

    # Section 3.2.
    if zlib.crc32(payload[64:64 + table_bytes]) != table_crc:
        raise Refused(13, "table checksum")
    if payload[64 + table_bytes:data_start].strip(b"\0"):
        raise Refused(14, "padding behind the table")
    crcs = struct.unpack_from(f"<{chunks}I", payload, 64)
    decoded_crcs = struct.unpack_from(f"<{chunks}I", payload, 64 + 4 * chunks)
    sizes = struct.unpack_from(f"<{planes * chunks}I", payload, 64 + 8 * chunks)
    modes = struct.unpack_from(f"<{planes * chunks}B", payload, 64 + 8 * chunks + 4 * chunks * planes)
    total = 0
    for c in range(chunks):
        count = min(chunk_elements, elements - c * chunk_elements)
        for p, (bits, codable, signed) in enumerate(layout):
            piece_size, mode, raw = sizes[p * chunks + c], modes[p * chunks + c], packed(count, bits)
            if not (mode == ZERO and piece_size == 0 or mode == RAW and piece_size == raw
                    or mode == CODED and codable and 0 < piece_size < raw
                    or mode == UNSIGNED and signed and piece_size == packed(count, bits - 1)):
                raise Refused(15, f"mode {mode} with {piece_size} bytes")
            total += align16(piece_size)
    for c in range(chunks):
        if modes[c] != CODED and decoded_crcs[c] != 0:
            raise Refused(16, f"checksum of a coded plane in chunk {c}, which has none")
    if total != data_bytes:
        raise Refused(17, "sum of sizes")
    if codec == "none" and CODED in modes:
        raise Refused(18, "coded by no codec")
    if CODED in modes:
        stream_decoder(codec)  # step 20, before any chunk

    # Section 3.3.
    out, at = [], data_start
    for c in range(chunks):
        count = min(chunk_elements, elements - c * chunk_elements)
        mine = [(sizes[p * chunks + c], modes[p * chunks + c]) for p in range(planes)]
        end = at + sum(align16(piece_size) for piece_size, _ in mine)
        if zlib.crc32(payload[at:end]) != crcs[c]:
            raise Refused(21, f"checksum of chunk {c}")
        values = []
        for (piece_size, mode), (bits, _, _) in zip(mine, layout):
            piece = payload[at:at + piece_size]
            at += align16(piece_size)
            values.append(plane_values(piece, mode, bits, count, codec, decoded_crcs[c]))
        out.append(merge(transform, values, width))
    return b"".join(out)


def plane_values(piece, mode, bits, count, codec, decoded_crc):
    """Section 5: a piece to one number an element (planes of up to 8 bits), or to rows of bytes (wider ones)."""
    raw = packed(count, bits)
    if mode == UNSIGNED:
        return bit_stream(piece, bits - 1, count)
    if mode == ZERO:
        piece = bytes(raw)
    elif mode == CODED:
        try:
            piece = stream_decoder(codec)(piece, raw)
        except Exception as err:
            raise Refused(22, f"{codec}: {err}") from err
        if len(piece) != raw:
            raise Refused(22, f"{codec}: {len(piece)} bytes for {raw}")
        if zlib.crc32(piece + bytes(align16(raw) - raw)) != decoded_crc:
            raise Refused(23, f"{codec}: other bytes than were coded")
    if bits > 8:
        return np.frombuffer(piece, np.uint8).reshape(count, bits // 8)
    return bit_stream(piece, bits, count)  # nibbles and whole bytes are such streams as well


def bit_stream(data, bits, count):
    """Bit k of element i is bit `bits * i + k` of the stream, which begins at the lowest bit of the first byte."""
    stream = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[:bits * count].reshape(count, bits)
    return (stream.astype(np.uint8) << np.arange(bits, dtype=np.uint8)).sum(axis=1, dtype=np.uint8)


def merge(transform, values, width):
    """Section 4."""
    if transform == 0:
        return values[0].tobytes()
    if transform == 1:
        x, h = values
        return ((h & 0x08) << 4 | x << 3 | h & 0x07).astype(np.uint8).tobytes()
    x, h = values[0].astype(np.uint16), values[1].astype(np.uint16)
    top = (h & 0x80) << 8 | x << 7 | h & 0x7f
    element = np.empty((len(x), width), np.uint8)
    element[:, width - 2], element[:, width - 1] = top & 0xff, top >> 8
    if width > 2:
        element[:, :width - 2] = values[2]
    return element.tobytes()


def stream_decoder(codec):
    """Section 6: a function of (stream, raw bytes) for a codec."""
    if codec == "zstd":
        try:
            import zstandard
        except ImportError as err:
            raise NotSupportedHere("codec zstd needs the package zstandard") from err
        return lambda stream, raw: unzstd(zstandard, stream, raw)
    if codec in ("deflate", "lz4", "snappy"):
        return {"deflate": inflate, "lz4": unlz4, "snappy": unsnappy}[codec]
    raise NotSupportedHere(f"codec {codec} has no decoder outside nvCOMP")


def inflate(stream, raw):
    decoder = zlib.decompressobj(wbits=-15)
    out = decoder.decompress(stream, raw + 1)
    if not decoder.eof or decoder.unused_data.strip(b"\0"):
        raise ValueError("the stream does not end where the piece does")
    return out


def unzstd(zstandard, stream, raw):
    if zstandard.frame_content_size(stream) != raw:
        raise ValueError("content size")
    return zstandard.ZstdDecompressor().decompress(stream, max_output_size=raw, allow_extra_data=False)


def copy_match(out, distance, length, raw):
    """Append `length` bytes from `distance` bytes back; what is copied may be what this copy wrote."""
    if not 0 < distance <= len(out) or len(out) + length > raw:
        raise ValueError("a match outside the chunk")
    pattern = bytes(out[-distance:])[:length]
    out += (pattern * (length // len(pattern) + 1))[:length]


def unlz4(stream, raw):
    """LZ4 block format: token, literals, and (but for the last sequence) an offset and a match."""
    out, at = bytearray(), 0

    def extended(length):
        nonlocal at
        if length == 15:
            while True:
                byte = stream[at]
                at += 1
                length += byte
                if byte != 255:
                    break
        return length

    while True:
        token = stream[at]
        at += 1
        literals = extended(token >> 4)
        if at + literals > len(stream) or len(out) + literals > raw:
            raise ValueError("literals outside the chunk")
        out += stream[at:at + literals]
        at += literals
        if at == len(stream):
            return bytes(out)
        distance = stream[at] | stream[at + 1] << 8
        at += 2
        copy_match(out, distance, extended(token & 15) + 4, raw)


def unsnappy(stream, raw):
    """Raw Snappy: the length as a varint, then literals and copies by the low two bits of a tag."""
    announced, at = 0, 0
    while True:
        byte = stream[at]
        announced |= (byte & 0x7f) << 7 * at
        at += 1
        if byte < 0x80:
            break
        if at == 5:
            raise ValueError("length in front")
    if announced != raw:
        raise ValueError("length in front")
    out = bytearray()
    while at < len(stream):
        tag = stream[at]
        at += 1
        if tag & 3 == 0:
            length = tag >> 2
            if length >= 60:
                extra = length - 59
                length = int.from_bytes(stream[at:at + extra], "little")
                at += extra
            length += 1
            if at + length > len(stream) or len(out) + length > raw:
                raise ValueError("literals outside the chunk")
            out += stream[at:at + length]
            at += length
        elif tag & 3 == 1:
            copy_match(out, (tag >> 5) << 8 | stream[at], (tag >> 2 & 7) + 4, raw)
            at += 1
        else:
            size = 2 if tag & 3 == 2 else 4
            copy_match(out, int.from_bytes(stream[at:at + size], "little"), (tag >> 2) + 1, raw)
            at += size
    return bytes(out)


# -- section 9: files ------------------------------------------------------------------------------------------------------------

def refuse_link(step, why):
    err = Refused(19, why)
    err.link = step
    raise err


class Global:
    """A class or function of the pickle; calling it only notes that it was called."""

    def __init__(self, module, name):
        self.name = f"{module}.{name}"

    def __call__(self, *args):
        return Called(self.name, args)


class Called:
    def __init__(self, name, args):
        self.name, self.args = name, args


class Unpickler(pickle.Unpickler):
    find_class = staticmethod(Global)
    persistent_load = staticmethod(lambda pid: pid)


WIDTHS = {"FloatStorage": ("float32", 4), "BFloat16Storage": ("bfloat16", 2), "HalfStorage": ("float16", 2)}


def tensors(path):
    """{name: (dtype, bytes)} of the contiguous tensors of float32 and 16-bit floats in a file."""
    return {name: (dtype, contents(path, zipped, storage)[width * first:width * (first + count)])
            for zipped, name, dtype, width, storage, first, count in found_in(path)}


def found_in(path):
    """(the zip, name, dtype, bytes an element, storage as the pickle has it, first element, elements) of each such tensor."""
    with zipfile.ZipFile(path) as zipped:
        root = zipped.namelist()[0].partition("/")[0]
        with zipped.open(f"{root}/data.pkl") as file:
            _, obj = Unpickler(file).load().args  # of `sealed`
        stack = [("", obj)]
        while stack:
            name, value = stack.pop()
            if isinstance(value, (dict, list, tuple)):
                items = value.items() if isinstance(value, dict) else enumerate(value)
                stack += [(f"{name}.{key}" if name else str(key), item) for key, item in items]
            elif isinstance(value, Called) and value.name == "torch._utils._rebuild_parameter":
                stack.append((name, value.args[0]))
            elif isinstance(value, Called) and value.name == "torch._utils._rebuild_tensor_v2":
                storage, first, shape, stride = value.args[:4]
                if isinstance(storage, Called):
                    meta = storage.args[1]
                    dtype, width = meta.get("dtype"), 4 if meta.get("dtype") == "float32" else 2
                    if dtype not in ("float32", "bfloat16", "float16") and not {"link"} & set(meta):
                        continue
                elif storage[1].name.rpartition(".")[2] in WIDTHS:
                    dtype, width = WIDTHS[storage[1].name.rpartition(".")[2]]
                else:
                    continue
                contiguous, expected = True, 1
                for size, step in zip(reversed(shape), reversed(stride)):
                    contiguous, expected = contiguous and (size == 1 or step == expected), expected * size
                if contiguous:
                    yield zipped, name, dtype, width, storage, first, expected


def contents(path, zipped, storage):
    """A storage's bytes. Section 9.2 in its order, for those that are linked."""
    root = zipped.namelist()[0].partition("/")[0]
    if not isinstance(storage, Called):
        return zipped.read(f"{root}/data/{storage[2]}")
    (_, _, key, _, _), meta = storage.args
    if meta["version"] not in (1, 2):
        refuse_link(1, "meta version")
    if (meta["version"] == 2) != ("link" in meta) or "link" in meta and (type(meta["link"]) is not str or meta["dtype"] != "float32"):
        refuse_link(2, "version, link and dtype")
    data = decode(zipped.read(f"{root}/data/{key}"))
    if len(data) != meta["bytes"]:
        raise Refused(19, "bytes")
    return follow(path, meta["link"], data) if "link" in meta else data


def follow(path, text, data):
    count = len(data) // 4
    try:
        link = json.loads(text)
        file, kind, crc = link["file"], link["kind"], link["crc"]
        fragments = [(name, first, numbers) for name, first, numbers in link["fragments"]]
        sound = type(file) is str and file not in ("", ".", "..") and not set("/\\") & set(file) and min(file) >= " " \
            and len(file.encode()) <= 255 and kind in ("bfloat16", "float16") and type(crc) is int and 0 <= crc < 2 ** 32 \
            and fragments and all(
                type(name) is str and type(first) is int and type(numbers) is int and 0 <= first < 2 ** 62 and 0 < numbers
                for name, first, numbers in fragments) and sum(numbers for _, _, numbers in fragments) <= count
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        refuse_link(4, "not a link")
    beside = os.path.join(os.path.dirname(path), file)
    if not os.path.isfile(beside):
        refuse_link(5, "no such file")
    there, weights = {}, []
    for zipped, name, dtype, width, storage, first, elements in found_in(beside):
        is_linked = isinstance(storage, Called) and "link" in storage.args[1]
        there[name] = dtype, elements, is_linked
    for name, first, numbers in fragments:
        if name not in there or there[name][0] != kind or there[name][2] or first + numbers > there[name][1]:
            refuse_link(7, f"no {numbers} elements from {first} in {name}")
    try:
        found = tensors(beside)
    except (Refused, zipfile.BadZipFile) as err:
        refuse_link(6, str(err))
    for name, first, numbers in fragments:
        weights.append(found[name][1][2 * first:2 * (first + numbers)])
    weights = b"".join(weights)
    if zlib.crc32(weights) != crc:
        refuse_link(8, "other weights")
    return numbers_from(data, weights, kind)


def numbers_from(data, weights, kind):
    """What section 9.2 makes of differences and weights, one element after another."""
    out = []
    halves = struct.unpack(f"<{len(weights) // 2}H", weights) + (0,) * (len(data) // 4 - len(weights) // 2)
    for x, half in zip(struct.unpack(f"<{len(data) // 4}I", data), halves):
        z = x & 0x8000ffff | (x >> 23 & 0xff) << 16 | (x >> 16 & 0x7f) << 24
        d = z // 2 if z % 2 == 0 else -(z + 1) // 2
        out.append((widen(half, kind) + d) % 2 ** 32)
    return struct.pack(f"<{len(out)}I", *out)


def widen(half, kind):
    """The bits of a 16-bit float as float32."""
    if kind == "bfloat16":
        return half << 16
    sign, exponent, mantissa = half >> 15, half >> 10 & 31, half & 1023
    if exponent == 31:
        exponent, mantissa = 255, mantissa << 13
    elif exponent:
        exponent, mantissa = exponent + 112, mantissa << 13
    elif mantissa:
        top = mantissa.bit_length() - 1  # the value is mantissa times 2^-24
        exponent, mantissa = top + 103, (mantissa << 23 - top) - (1 << 23)
    return sign << 31 | exponent << 23 | mantissa


if __name__ == "__main__":
    sys.stdout.buffer.write(decode(sys.stdin.buffer.read()))
