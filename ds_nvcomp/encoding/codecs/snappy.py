"""Raw Snappy, no framing."""
import cramjam
import numpy as np


def encode(chunk, *, exponents):
    return cramjam.snappy.compress_raw(chunk)


def decode(coded, raw_bytes):
    # The length that a stream starts with is what a decoder allocates: hold it against the table first.
    announced = cramjam.snappy.decompress_raw_len(coded)
    if announced != raw_bytes:
        raise ValueError(f"the Snappy stream announces {announced} bytes")
    raw = np.empty(raw_bytes, np.uint8)
    cramjam.snappy.decompress_raw_into(coded, raw)
    return raw
