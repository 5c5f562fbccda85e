"""LZ4 block format without a size prefix."""
import cramjam
import numpy as np


def encode(chunk, *, exponents):
    return cramjam.lz4.compress_block(chunk, store_size=False)


def decode(coded, raw_bytes):
    raw = np.empty(raw_bytes, np.uint8)
    written = cramjam.lz4.decompress_block_into(coded, raw, output_len=raw_bytes)
    return raw[:written]
