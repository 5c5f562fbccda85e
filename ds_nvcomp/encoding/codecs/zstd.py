"""Zstandard (RFC 8878), one frame a chunk with its content size."""
import threading

import zstandard

_local = threading.local()  # contexts are not thread-safe and costly to make

# Long minimum matches leave exponent planes to the literal coder: 0.353 against 0.371 at level 1's own (measured as in deflate.py).
_EXPONENTS = zstandard.ZstdCompressionParameters.from_level(1, min_match=7, write_content_size=True)
_BYTES = zstandard.ZstdCompressionParameters.from_level(3, write_content_size=True)


def _context(name, make):
    if not hasattr(_local, name):
        setattr(_local, name, make())
    return getattr(_local, name)


def encode(chunk, *, exponents):
    params = _EXPONENTS if exponents else _BYTES
    name = "exponents" if exponents else "bytes"
    return _context(name, lambda: zstandard.ZstdCompressor(compression_params=params)).compress(chunk)


def decode(coded, raw_bytes):
    # The size a frame announces is what the library allocates: hold it against the table first.
    announced = zstandard.frame_content_size(coded)
    if announced != raw_bytes:
        raise ValueError(f"the Zstandard frame announces {announced} bytes")
    return _context("decoder", zstandard.ZstdDecompressor).decompress(coded, max_output_size=raw_bytes, allow_extra_data=False)
