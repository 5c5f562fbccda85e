"""Checksums of joined pieces are those that zlib computes from the bytes."""
import zlib

import numpy as np
import torch
from hypothesis import given, strategies as st

from conformance import CHUNK_BYTES, in_order, make
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import checksums, transforms
from ds_nvcomp.pipeline import Source, encode


@given(st.lists(st.binary(max_size=300), max_size=12))
def test_join(pieces):
    crcs = np.array([zlib.crc32(piece) for piece in pieces], np.uint32)
    assert checksums.join(crcs, np.array([len(piece) for piece in pieces], np.int64)) == zlib.crc32(b"".join(pieces))


@given(st.binary(max_size=50), st.integers(0, 100_000))
def test_join_over_long_pieces(piece, zeros):
    crcs = np.array([zlib.crc32(piece), zlib.crc32(bytes(zeros))], np.uint32)
    assert checksums.join(crcs, np.array([len(piece), zeros])) == zlib.crc32(piece + bytes(zeros))


def test_shift_by_more_than_32_bits():
    """x^(8 (a + b)) = x^(8 a) x^(8 b): lengths of terabytes, which no test can have the bytes of."""
    a, b = np.array([1 << 40, 5]), np.array([(1 << 41) + 12345, 1 << 33])
    assert np.array_equal(checksums.shift(a + b), checksums.multiply(checksums.shift(a), checksums.shift(b)))


def test_payloads_know_their_checksum():
    for dtype, content in (("float32", "normal"), ("bfloat16", "squared"), ("float32", "zero"), ("uint8", "random")):
        transform = transforms.for_dtype(dtype)
        raw = torch.from_numpy(make(dtype, content, (3 * CHUNK_BYTES + 33) * transform.width).copy())
        [payload] = in_order(encode([Source(raw, transform)], Config(chunk_bytes=CHUNK_BYTES)))
        assert payload.checksum() == zlib.crc32(b"".join(bytes(part) for part in payload.parts)), (dtype, content)
