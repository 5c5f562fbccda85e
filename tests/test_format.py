"""The format: what is written reads back, and each way to be wrong is refused, with its own error, at its step of FORMAT.md section 8.

The reference decoder has to refuse at the same step: the two were written apart from each other.
"""
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import payloads
import reference_decoder
from conformance import CHUNK_BYTES, in_order, joined, make
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import format, transforms
from ds_nvcomp.errors import (ChecksumError, CodecUnavailableError, DecodeError, FormatError, HeaderError, TableError, TruncatedError,
                              UnsupportedVersionError)
from ds_nvcomp.pipeline import Source, cpu
from payloads import change_table, get, payload, put, reseal_chunk

TRANSFORMS = st.sampled_from(list(transforms.BY_ID.values()))


def refused(data, error, match, step):
    with pytest.raises(error, match=match) as caught:
        payloads.decode(data)
    assert type(caught.value) is error
    with pytest.raises(reference_decoder.Refused) as reference:
        reference_decoder.decode(data)
    assert reference.value.step == step
    return caught.value


def payload_of(raw, transform=transforms.SPLIT16) -> bytes:
    [encoded] = in_order(cpu.encode([Source(torch.from_numpy(raw), transform)], Config(chunk_bytes=CHUNK_BYTES)))
    return joined(encoded).tobytes()


@pytest.fixture(scope="module")
def good():
    data = payload()
    assert get(data, "chunks") == 3
    return data


# --- round trips ------------------------------------------------------------------------------------------------------

@st.composite
def tables(draw):
    transform = draw(TRANSFORMS)
    chunk_elements = 16 * draw(st.integers(1, 40))
    elements = draw(st.integers(0, 6 * chunk_elements))
    header = format.Header(transform, draw(st.integers(0, 255)), draw(st.integers(0, 255)), chunk_elements, elements, 0)
    table = format.Table.empty(transform, header.chunks)
    for c in range(header.chunks):
        table.crc[c] = draw(st.integers(0, 2**32 - 1))
        count = min(chunk_elements, elements - c * chunk_elements)
        for p, plane in enumerate(transform.planes):
            raw = plane.raw_bytes(count)
            choices = [(format.ZERO, 0), (format.RAW, raw)]
            if plane.codable and raw > 1:
                choices.append((format.CODED, draw(st.integers(1, raw - 1))))
            if plane.has_sign:
                choices.append((format.UNSIGNED, plane.unsigned_bytes(count)))
            table.mode[p, c], table.size[p, c] = draw(st.sampled_from(choices))
        if table.mode[0, c] == format.CODED:
            table.decoded[c] = draw(st.integers(0, 2**32 - 1))
    return format.Header(transform, header.codec_id, header.codec_revision, chunk_elements, elements, int(table.chunk_bytes.sum())), table


@given(tables())
@settings(max_examples=100, deadline=None)
def test_header_and_table_round_trip(pair):
    header, table = pair
    head = format.preamble(header, table)
    assert len(head) == header.data_start and len(head) % 16 == 0
    parsed = format.parse_header(head[:64], len(head) + header.data_bytes)
    assert (parsed.transform, parsed.codec_id, parsed.codec_revision, parsed.chunk_elements, parsed.elements, parsed.data_bytes) == (
        header.transform, header.codec_id, header.codec_revision, header.chunk_elements, header.elements, header.data_bytes)
    found = format.parse_table(head[64:], parsed)
    for column in ("crc", "decoded", "size", "mode"):
        assert np.array_equal(getattr(found, column), getattr(table, column))


@given(tables())
@settings(max_examples=60, deadline=None)
def test_pieces_follow_one_another_aligned(pair):
    _, table = pair
    at = 0
    for c in range(len(table.crc)):
        for p in range(len(table.size)):
            assert table.piece_offsets[p, c] == at and at % 16 == 0
            at += -(-int(table.size[p, c]) // 16) * 16
    assert table.chunk_bytes.sum() == at


@given(st.integers(0, 2**40))
def test_aligned(size):
    assert format.aligned(size) == -(-size // 16) * 16


def test_the_documents_example():
    """FORMAT.md 12.1, byte for byte."""
    data = bytes.fromhex("""
        44 53 4e 56 43 4f 4d 50  01 00 00 00 02 00 00 02    00 00 01 00 00 00 00 00  03 00 00 00 00 00 00 00
        01 00 00 00 00 00 00 00  20 00 00 00 00 00 00 00    00 00 00 00 00 00 00 00  04 b2 3e b9 33 68 ba a0
        59 f9 e7 cd 00 00 00 00  03 00 00 00 03 00 00 00    01 03 00 00 00 00 00 00  00 00 00 00 00 00 00 00
        7f 7d 80 00 00 00 00 00  00 00 00 00 00 00 00 00    40 00 10 00 00 00 00 00  00 00 00 00 00 00 00 00""")
    raw = bytes.fromhex("c0 3f 80 3e 40 40")
    assert payloads.decode(data) == raw == reference_decoder.decode(data)
    [encoded] = in_order(cpu.encode([Source(torch.frombuffer(bytearray(raw), dtype=torch.uint8), transforms.SPLIT16)], Config(codec="none")))
    assert joined(encoded).tobytes() == data


def test_the_documents_hex_is_the_same_as_the_tests():
    text = (Path(__file__).resolve().parent.parent / "FORMAT.md").read_text()
    lines = [line.strip()[6:55] for line in text.splitlines() if line.startswith("    00") and line[8:10] == "  "]
    dump = bytes.fromhex(" ".join(lines))
    assert len(dump) == 128 and reference_decoder.decode(dump) == bytes.fromhex("c03f803e4040")


# --- each way to be wrong ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("length", [0, 1, 8, 63])
def test_step_1_no_room_for_a_header(good, length):
    refused(good[:length], TruncatedError, f"header of 64 bytes, found {length}.*restore it", 1)


def test_step_2_magic(good):
    refused(put(good, magic=b"DSNVCOMQ"), HeaderError, "starts with b'DSNVCOMP', found b'DSNVCOMQ'", 2)


@pytest.mark.parametrize("version", [0, 2, 0xFFFF])
def test_step_3_version(good, version):
    refused(put(good, version=version), UnsupportedVersionError, f"format version {version}.*reads version 1.*Install", 3)


def test_step_3_comes_before_the_checksum(good):
    refused(put(good, seal=False, version=2), UnsupportedVersionError, "version 2", 3)


@pytest.mark.parametrize("at", [at for at in range(10, 64)])
def test_step_4_every_header_byte_is_guarded(good, at):
    data = bytearray(good)
    data[at] ^= 0x10
    refused(data, HeaderError, "header's checksum", 4)


@pytest.mark.parametrize("bit", range(16))
def test_step_5_features_must_be_refused(good, bit):
    refused(put(good, features=1 << bit), UnsupportedVersionError, f"features {1 << bit:#06x}.*Install", 5)


@pytest.mark.parametrize("transform", [5, 16, 255])
def test_step_6_transform(good, transform):
    refused(put(good, transform=transform), UnsupportedVersionError, f"transform {transform}, known are .*Install", 6)


@pytest.mark.parametrize("planes", [0, 1, 3, 255])
def test_step_7_planes(good, planes):
    refused(put(good, planes=planes), HeaderError, f"split16 has 2 planes, the header says {planes}", 7)


@pytest.mark.parametrize("count", [0, 1, 8, 17, 4095, (1 << 20) + 16, 1 << 21, 0xFFFFFFF0])
def test_step_8_elements_per_chunk(good, count):
    refused(put(good, chunk_elements=count), HeaderError, f"multiple of 16 from 16 to 1048576, found {count}", 8)


@pytest.mark.parametrize("chunks", [0, 2, 4, 2**64 - 1])
def test_step_9_chunks(good, chunks):
    refused(put(good, chunks=chunks), HeaderError, f"are 3 chunks, the header says {chunks}", 9)


@pytest.mark.parametrize("elements", [0, 2**32, 2**63, 2**64 - 1])
def test_step_9_elements(good, elements):
    refused(put(good, elements=elements), HeaderError, "the header says 3", 9)


@pytest.mark.parametrize("missing", [1, 16, 100])
def test_step_10_cut_off(good, missing):
    refused(good[:-missing], TruncatedError, f"announces {len(good)} bytes of payload, found {len(good) - missing}", 10)


@pytest.mark.parametrize("data_bytes", [2**40, 2**63, 2**64 - 16])
def test_step_10_announced_sizes_allocate_nothing(good, data_bytes):
    refused(put(good, data_bytes=data_bytes), TruncatedError, "announces", 10)


def test_step_10_consistent_but_enormous(good):
    """Counts that agree with one another still have to agree with the bytes that are there, before a table of them is made."""
    elements = 2**60
    tracemalloc.start()
    refused(put(good, elements=elements, chunks=-(-elements // CHUNK_BYTES)), TruncatedError, "announces", 10)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("extra", [1, 16, 4096])
def test_step_11_bytes_behind(good, extra):
    refused(good + bytes(extra), HeaderError, f"announces {len(good)} bytes of payload, found {len(good) + extra}", 11)


@pytest.mark.parametrize("codec", [5, 15, 20, 255])
def test_step_12_codec(good, codec):
    refused(put(good, codec=codec), UnsupportedVersionError, f"codec {codec}, known are", 12)


@pytest.mark.parametrize("codec,revision", [(1, 6), (0, 1), (16, 0), (16, 5), (16, 7), (19, 255)])
def test_step_12_revision(good, codec, revision):
    refused(put(good, codec=codec, revision=revision), UnsupportedVersionError, f"of nvCOMP {revision}, this ds_nvcomp reads", 12)


def test_step_13_every_table_byte_is_guarded(good):
    end = payloads.table_of(good)[3]
    for at in range(64, end):
        data = bytearray(good)
        data[at] ^= 0x01
        refused(data, TableError, "table's checksum", 13)


def test_step_14_padding_behind_the_table(good):
    end, start = payloads.table_of(good)[3], payloads.spans(good)[0][0]
    assert end < start
    for at in range(end, start):
        data = bytearray(good)
        data[at] = 1
        refused(data, TableError, "padding behind the chunk table", 14)


@pytest.mark.parametrize("mode", [4, 5, 128, 255])
def test_step_15_unknown_mode(good, mode):
    err = refused(change_table(good, mode=[(1, 2, mode)]), TableError, f"'sign.mantissa' is stored in mode {mode}", 15)
    assert err.chunk == 2


def test_step_15_sign_plane_cannot_be_coded(good):
    err = refused(change_table(good, mode=[(1, 1, format.CODED)], size=[(1, 1, 100)]), TableError, "mode 2 with 100 bytes", 15)
    assert err.chunk == 1


def test_step_15_low_plane_is_raw_or_zero():
    data = payload("float32")
    for mode in (format.CODED, format.UNSIGNED):
        refused(change_table(data, mode=[(2, 0, mode)]), TableError, f"'low' is stored in mode {mode}", 15)


def test_step_15_exponents_have_no_sign(good):
    refused(change_table(good, mode=[(0, 0, format.UNSIGNED)], size=[(0, 0, CHUNK_BYTES * 7 // 8)]), TableError,
            "'exponent' is stored in mode 3", 15)
    refused(change_table(payload("int8", "random"), mode=[(0, 0, format.UNSIGNED)]), TableError, "'bytes' is stored in mode 3", 15)


@pytest.mark.parametrize("mode,size", [
    (format.ZERO, 1), (format.ZERO, CHUNK_BYTES), (format.RAW, 0), (format.RAW, CHUNK_BYTES - 1), (format.RAW, CHUNK_BYTES + 1),
    (format.CODED, 0), (format.CODED, CHUNK_BYTES), (format.CODED, CHUNK_BYTES + 1), (format.CODED, 2**32 - 1)])
def test_step_15_size_of_a_mode(good, mode, size):
    refused(change_table(good, mode=[(0, 0, mode)], size=[(0, 0, size)]), TableError, f"mode {mode} with {size} bytes", 15)


@pytest.mark.parametrize("size", [0, 7 * CHUNK_BYTES // 8 - 1, 7 * CHUNK_BYTES // 8 + 1, CHUNK_BYTES])
def test_step_15_size_without_signs(size):
    data = payload("bfloat16", "squared")
    assert data[payloads.table_of(data)[2][1][0]] == format.UNSIGNED
    refused(change_table(data, size=[(1, 0, size)]), TableError, f"mode 3 with {size} bytes", 15)


def test_step_15_last_chunk_is_measured_by_its_own_elements(good):
    refused(change_table(good, mode=[(1, 2, format.RAW)], size=[(1, 2, CHUNK_BYTES)]), TableError, "not possible for 33 raw bytes", 15)


@pytest.mark.parametrize("value", [1, 2**32 - 1])
@pytest.mark.parametrize("dtype,content,mode", [("bfloat16", "zero", format.ZERO), ("uint8", "random", format.RAW)])
def test_step_16_decoded_checksum_of_what_is_not_coded(dtype, content, mode, value):
    data = payload(dtype, content)
    assert {data[at] for at in payloads.table_of(data)[2][0]} == {mode}
    assert {data[at] for first in payloads.decoded_of(data) for at in range(first, first + 4)} == {0}
    err = refused(change_table(data, decoded=[(1, value)]), TableError, "not coded has a checksum of its decoded plane", 16)
    assert err.chunk == 1


def test_step_16_where_other_chunks_are_coded():
    """Each chunk by its own mode: between coded ones as well."""
    chunk = CHUNK_BYTES
    raw = make("bfloat16", "normal", 6 * chunk).copy()
    raw[2 * chunk:4 * chunk] = 0
    data = bytearray(payload_of(raw))
    assert [data[at] for at in payloads.table_of(data)[2][0]] == [format.CODED, format.ZERO, format.CODED]
    assert payloads.decode(data) == raw.tobytes() == reference_decoder.decode(data)
    refused(change_table(data, decoded=[(1, 5)]), TableError, "not coded", 16)


@pytest.mark.parametrize("by", [-16, 16])
def test_step_17_sum_of_sizes(good, by):
    data = put(good + bytes(16) if by > 0 else good[:-16], data_bytes=get(good, "data_bytes") + by)
    refused(data, TableError, "pieces are .* bytes, the header says", 17)


def test_step_17_data_bytes_off_by_less_than_the_alignment(good):
    refused(put(good[:-1], data_bytes=get(good, "data_bytes") - 1), TableError, "the header says", 17)


def test_step_18_coded_by_no_codec(good):
    refused(put(good, codec=0), TableError, "coded in a payload whose codec is none", 18)


@pytest.mark.parametrize("codec", [16, 17, 18, 19])
def test_step_20_codec_cannot_run_here(good, codec):
    if torch.cuda.is_available():
        pytest.skip("this machine may have what it takes")
    data = put(good, codec=codec, revision=6)
    with pytest.raises(CodecUnavailableError, match="NVIDIA GPU only"):
        payloads.decode(data)
    with pytest.raises(reference_decoder.NotSupportedHere):
        reference_decoder.decode(data)


def test_a_gpu_codec_that_coded_nothing_needs_no_gpu():
    data = payload("uint8", "random", codec="none")
    data = put(data, codec=16, revision=6)
    assert payloads.decode(data) == reference_decoder.decode(data) == make("uint8", "random", 2 * CHUNK_BYTES + 33).tobytes()


def test_step_21_every_byte_of_chunk_data_is_guarded(good):
    for c, (start, stop) in enumerate(payloads.spans(good)):
        for at in {*range(start, stop, 97), start, stop - 1}:
            data = bytearray(good)
            data[at] ^= 0x80
            err = refused(data, ChecksumError, "stored bytes of a chunk have checksum .*, expected", 21)
            assert err.chunk == c


def test_step_21_padding_behind_pieces_is_guarded(good):
    start, stop = payloads.spans(good)[-1]
    size = struct.unpack_from("<I", good, payloads.table_of(good)[1][1][2])[0]
    assert size % 16
    data = bytearray(good)
    data[stop - 1] ^= 1
    refused(data, ChecksumError, "checksum", 21)


def test_step_21_chunk_without_bytes_has_checksum_zero():
    data = payload("bfloat16", "zero")
    refused(change_table(data, crc=[(1, 1)]), ChecksumError, "checksum 0x00000000, expected 0x00000001", 21)


def test_step_21_chunks_cannot_change_places(good):
    data, (a, b) = bytearray(good), payloads.spans(good)[:2]
    if a[1] - a[0] == b[1] - b[0]:
        data[a[0]:a[1]], data[b[0]:b[1]] = data[b[0]:b[1]], data[a[0]:a[1]]
    else:
        data[a[0]:b[1]] = data[b[0]:b[1]] + data[a[0]:a[1]]
    refused(data, ChecksumError, "checksum", 21)


def test_step_21_comes_before_any_decoder(good, monkeypatch):
    from ds_nvcomp.encoding.codecs import deflate
    monkeypatch.setattr(deflate, "decode", lambda *_: pytest.fail("a decoder saw damaged bytes"))
    data = bytearray(payload(elements=100, content="normal"))
    data[-1] ^= 1
    with pytest.raises(ChecksumError):
        payloads.decode(data)


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lz4", "snappy"])
def test_step_22_decoder_refuses(codec):
    data = payload("int32", "constant", codec=codec)
    start, stop = payloads.spans(data)[1]
    data[start:stop] = b"\xff" * (stop - start)
    err = refused(reseal_chunk(data, 1), DecodeError, "checksum is right|decodes to", 22)
    assert err.chunk == 1


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lz4", "snappy"])
@pytest.mark.parametrize("length", [CHUNK_BYTES - 1, CHUNK_BYTES + 1, CHUNK_BYTES // 2, 16 * CHUNK_BYTES])
def test_step_22_stream_of_another_length(codec, length):
    """The stream is sound and its checksum right, but it is not the chunk's length: too long must not overflow, too short not pass."""
    from ds_nvcomp.encoding import codecs
    data = payload("uint8", "constant", codec=codec)
    stream = codecs.cpu(codecs.BY_NAME[codec]).encode(np.full(length, 7, np.uint8), exponents=False)
    start, stop = payloads.spans(data)[1]
    padded = bytes(stream).ljust(-(-len(stream) // 16) * 16, b"\0")
    data[start:stop] = padded
    data = change_table(data, size=[(0, 1, len(stream))], mode=[(0, 1, format.CODED)])
    data = reseal_chunk(put(data, data_bytes=get(data, "data_bytes") + len(padded) - (stop - start)), 1)
    err = refused(data, DecodeError, "decodes to|refused a chunk", 22)
    assert err.chunk == 1


def decoded_crcs(data):
    return [struct.unpack_from("<I", data, at)[0] for at in payloads.decoded_of(data)]


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lz4", "snappy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "float32", "uint8"])
def test_decoded_is_the_checksum_of_the_first_plane(dtype, codec):
    """By the transform of FORMAT.md section 4, written out; the last chunk's plane ends inside 16 bytes."""
    transform = transforms.for_dtype(dtype)
    chunk = transform.chunk_elements(CHUNK_BYTES)
    data = payload(dtype, "constant", elements=2 * chunk + 333, codec=codec)
    assert {data[at] for at in payloads.table_of(data)[2][0]} == {format.CODED}
    raw = np.frombuffer(payloads.decode(data), np.uint8).reshape(-1, transform.width)
    for c, found in enumerate(decoded_crcs(data)):
        part = raw[c * chunk:(c + 1) * chunk].astype(np.uint16)
        if dtype == "uint8":
            plane = part[:, 0]
        elif dtype == "float8_e5m2":
            x = np.append(part[:, 0] >> 3 & 0x0f, np.zeros(len(part) % 2, np.uint16))
            plane = x[0::2] | x[1::2] << 4
        else:
            plane = (part[:, -1] << 8 | part[:, -2]) >> 7 & 0xff
        assert found == payloads.plane_crc(plane.astype(np.uint8))


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lz4", "snappy"])
@pytest.mark.parametrize("wrong", [lambda crc: crc ^ 1, lambda crc: crc ^ 1 << 31, lambda crc: 0], ids=["low bit", "high bit", "zero"])
def test_step_23_decoded_checksum(codec, wrong):
    data = payload("int32", "constant", codec=codec)
    crc = decoded_crcs(data)[1]
    assert crc
    err = refused(change_table(data, decoded=[(1, wrong(crc))]), DecodeError, "do not decode to what they were made from.*earlier checkpoint", 23)
    assert err.chunk == 1


@pytest.mark.parametrize("codec", ["deflate", "zstd", "lz4", "snappy"])
def test_step_23_sound_stream_of_other_bytes(codec):
    """What a faulty encoder gives, and only this checksum finds: a stream of the right length, of other bytes."""
    from ds_nvcomp.encoding import codecs
    data = payload("uint8", "constant", codec=codec)
    plane = bytearray(make("uint8", "constant", CHUNK_BYTES).tobytes())
    plane[1234] ^= 4
    stream = bytes(codecs.cpu(codecs.BY_NAME[codec]).encode(np.frombuffer(plane, np.uint8), exponents=False))
    start, stop = payloads.spans(data)[1]
    padded = stream.ljust(-(-len(stream) // 16) * 16, b"\0")
    data[start:stop] = padded
    data = change_table(data, size=[(0, 1, len(stream))])
    data = reseal_chunk(put(data, data_bytes=get(data, "data_bytes") + len(padded) - (stop - start)), 1)
    err = refused(data, DecodeError, "do not decode to what they were made from", 23)
    assert err.chunk == 1
    data = change_table(data, decoded=[(1, payloads.plane_crc(plane))])  # and with that the forgery is complete
    assert payloads.decode(data) == reference_decoder.decode(data) != payloads.decode(payload("uint8", "constant", codec=codec))


def test_step_23_comes_after_the_stored_bytes(good):
    data = change_table(good, decoded=[(0, decoded_crcs(good)[0] ^ 1)])
    data[payloads.spans(data)[0][0]] ^= 1
    refused(data, ChecksumError, "stored bytes of a chunk", 21)


# --- what must not be refused -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("reserved", ["reserved_1", "reserved_2"])
def test_reserved_fields_are_ignored(good, reserved):
    assert get(good, reserved) == 0
    data = put(good, **{reserved: 0xFFFFFFFF})
    assert payloads.decode(data) == payloads.decode(good) == reference_decoder.decode(data)


def test_padding_behind_pieces_may_hold_anything_with_its_checksum(good):
    data = bytearray(good)
    data[-1] = 0xFF
    data = reseal_chunk(data, 2)
    assert payloads.decode(data) == payloads.decode(good) == reference_decoder.decode(data)


def test_padding_bits_are_ignored():
    for dtype, content in (("float8_e5m2", "random"), ("bfloat16", "squared"), ("float8_e5m2", "squared")):
        data = payload(dtype, content, elements=33, codec="none")
        _, sizes, _, _ = payloads.table_of(data)
        at = payloads.spans(data)[0][0] + -(-struct.unpack_from("<I", data, sizes[0][0])[0] // 16) * 16
        last = at + struct.unpack_from("<I", data, sizes[1][0])[0] - 1
        data[last] |= 0xF0 if dtype == "float8_e5m2" else 0x80
        expected = make(dtype, content, 33 * transforms.for_dtype(dtype).width).tobytes()
        assert payloads.decode(reseal_chunk(data, 0)) == expected == reference_decoder.decode(reseal_chunk(data, 0))


def test_modes_that_are_not_the_smallest_are_taken():
    """Zeros stored raw: a writer's choice, not damage."""
    raw = bytes(16)
    head = struct.pack("<8sHHBBBBIIQQQQ", b"DSNVCOMP", 1, 0, 0, 1, 0, 1, 16, 0, 16, 1, 16, 0)
    table = struct.pack("<IIIB", zlib.crc32(raw), 0, 16, format.RAW)
    head += struct.pack("<I", zlib.crc32(table))
    data = head + struct.pack("<I", zlib.crc32(head)) + table.ljust(16, b"\0") + raw
    assert payloads.decode(data) == raw == reference_decoder.decode(data)


def test_empty_payload():
    data = payload(elements=0)
    assert len(data) == 64 and payloads.decode(data) == b"" == reference_decoder.decode(data)


# --- everything else that a byte can do -------------------------------------------------------------------------------

@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_change_is_noticed(good, data):
    """No byte of a payload may change without an error: each is covered by a checksum or checked to be zero."""
    at, value = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(0, 255))
    assume(good[at] != value)
    broken = bytearray(good)
    broken[at] = value
    with pytest.raises(FormatError):
        payloads.decode(broken)


@given(st.binary(max_size=400), st.booleans())
@settings(max_examples=150, deadline=None)
def test_garbage_is_a_format_error(garbage, seal):
    """Garbage behind a right magic and version, with its checksum right or wrong, is refused by the tree's errors and no others."""
    data = bytearray(b"DSNVCOMP\x01\0" + garbage)
    if seal and len(data) >= 64:
        payloads.sealed(data)
    with pytest.raises(FormatError):
        payloads.decode(data)


@given(fields=st.fixed_dictionaries({}, optional={name: st.integers(0, 2 ** (8 * struct.calcsize(kind)) - 1)
                                                  for name, (_, kind) in payloads.FIELDS.items() if kind != "8s"}))
@settings(max_examples=150, deadline=None)
def test_headers_of_a_liar(good, fields):
    """Sealed headers with any fields: an error of the tree, or the right bytes."""
    data = put(good, **fields)
    try:
        found = payloads.decode(data)
    except (FormatError, CodecUnavailableError):
        return
    assert found == payloads.decode(good)
