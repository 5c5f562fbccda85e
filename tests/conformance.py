"""One suite for every codec and every implementation of it: a subclass says how to encode and how to decode, nothing else.

Bits are compared, never values: NaN payloads, -0.0 and denormals have to come back as they were.
"""
from __future__ import annotations

import hashlib
import os
import warnings

import numpy as np
import pytest
import torch

import reference_decoder
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import codecs, format, transforms
from ds_nvcomp.pipeline import Source, parse_payload
from ds_nvcomp.pipeline.available import gpu_missing

CHUNK_BYTES = 4096
CODECS = tuple(codecs.BY_NAME)
CPU_CODECS = tuple(name for name, codec in codecs.BY_NAME.items() if codec.cpu or codec is codecs.NONE)

# Name -> bits of (exponent, mantissa) for floats, None for what goes through whole.
DTYPES = {
    "float64": (11, 52), "float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2),
    "complex64": (8, 23), "int64": None, "int32": None, "int8": None, "uint8": None, "bool": None,
}
CONTENTS = ("normal", "squared", "special", "zero", "random", "one", "constant")


def sizes(transform, chunk_bytes):
    """In elements of the transform: the edges of vector groups of 16 and of chunks."""
    chunk = transform.chunk_elements(chunk_bytes)
    return 0, 1, 2, 15, 16, 17, chunk - 1, chunk, chunk + 1, 3 * chunk + 33


def noise(seed: str, count: int) -> np.ndarray:
    """uint8 [count], the same for a seed in every version of everything: golden files depend on it."""
    return np.frombuffer(hashlib.shake_256(seed.encode()).digest(count), np.uint8)


def make(dtype: str, content: str, nbytes: int, seed: str = "") -> np.ndarray:
    """uint8 [nbytes] that are (the beginning of) numbers of `dtype` with a kind of content."""
    kind = getattr(torch, dtype)
    count = -(-nbytes // kind.itemsize)
    seed = f"{dtype} {content} {seed}"
    raw = np.zeros(count * kind.itemsize, np.uint8)
    if content in ("normal", "squared") and count:
        raw = _numbers(kind, content, count, seed)
    elif content == "special":
        pool = _special(dtype).reshape(-1, kind.itemsize // (2 if kind.is_complex else 1))
        raw = pool[noise(seed, 4 * len(raw) // pool.shape[1]).view(np.uint32) % len(pool)].reshape(-1)
    elif content == "random":
        raw = noise(seed, len(raw)) & 1 if dtype == "bool" else noise(seed, len(raw))
    elif content == "one" and count:
        at = int(noise(seed, 8).view(np.uint64)[0] % count) * kind.itemsize
        raw[at:at + kind.itemsize] = _numbers(kind, "squared", 1, seed) | 1
    elif content == "constant" and count:
        raw = np.tile(_numbers(kind, "normal", 1, seed) | 1, count)
    return np.ascontiguousarray(raw[:nbytes])


def _numbers(kind, content, count, seed):
    real = 2 * count if kind.is_complex else count
    wide = noise(seed, 16 * real).view(np.uint32).reshape(real, 4).sum(axis=1, dtype=np.float64)
    values = (wide / 2.0**32 - 2.0) * 0.034          # a sum of four uniforms, about N(0, 0.02)
    if content == "squared":
        values *= values
    values = torch.from_numpy(values)
    if kind is torch.bool:
        result = values > 0.01
    elif not (kind.is_floating_point or kind.is_complex):
        result = (values * 1000).to(torch.int64).to(kind)
    elif kind.is_complex:
        result = torch.view_as_complex(values.to(torch.float32).reshape(-1, 2)).to(kind)
    else:
        result = values.to(torch.float32).to(kind) if kind.itemsize < 4 else values.to(kind)
    return result.contiguous().view(torch.uint8).numpy().copy()


def _special(dtype) -> np.ndarray:
    """Every kind of corner of a dtype, both signs, as bytes."""
    if DTYPES[dtype] is None:
        kind = getattr(torch, dtype)
        if kind is torch.bool:
            return np.array([0, 1], np.uint8)
        info = torch.iinfo(kind)
        return torch.tensor([info.min, info.max, 0, 1, info.max // 2], dtype=kind).view(torch.uint8).numpy()
    exponent, mantissa = DTYPES[dtype]
    ones, full = (1 << exponent) - 1, (1 << mantissa) - 1
    quiet = 1 << (mantissa - 1)
    positive = [
        0, 1, full, quiet,                                    # +0 and denormals
        1 << mantissa, (ones - 1) << mantissa | full,         # smallest normal, largest finite
        ones << mantissa,                                     # infinity
        ones << mantissa | quiet, ones << mantissa | full,    # quiet NaNs, one with a payload
        ones << mantissa | 1, ones << mantissa | quiet - 1,   # signalling NaNs
        (ones >> 1) << mantissa,                              # 1.0
    ]
    both = positive + [value | 1 << exponent + mantissa for value in positive]
    return np.array(both, f"<u{(1 + exponent + mantissa) // 8}").view(np.uint8)


def joined(payload) -> np.ndarray:
    """The bytes of a `Payload` as the file would have them."""
    data = np.frombuffer(b"".join(bytes(memoryview(part).cast("B")) for part in payload.parts), np.uint8)
    assert len(data) == payload.nbytes
    return data


def in_order(encoded) -> list:
    """The payloads of an `encode`, in the order of its sources."""
    return [payload for _, payload in sorted(encoded, key=lambda one: one[0])]


class Conformance:
    """Subclasses set `codec` and define `encode` and `decoders`."""
    codec: str

    def encode(self, sources: list[Source], config: Config, *progress) -> list:
        """`Payload`s of host sources."""
        raise NotImplementedError

    def decoders(self) -> dict:
        """Name -> function from a payload, uint8 [bytes] on the host, to uint8 [raw bytes]: all that must agree."""
        raise NotImplementedError

    def prepare(self, sources):
        """Where the sources lie when they are encoded."""
        return sources

    # ------------------------------------------------------------------------------------------------------------------

    def _config(self, **keys):
        return Config(codec=self.codec, **{"chunk_bytes": CHUNK_BYTES, **keys})

    def _round_trip(self, sources, config):
        """Encode, check every decoder against the sources, and return the parsed tables."""
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a codec that gives up warns and stores raw: the bytes would be right and the codec untested
            payloads = self.encode(self.prepare(sources), config)
        assert len(payloads) == len(sources)
        parsed = []
        for source, payload in zip(sources, payloads):
            stored, expected = joined(payload), source.data.numpy()
            for name, decode in self.decoders().items():
                found = np.frombuffer(decode(stored), np.uint8)
                assert np.array_equal(found, expected), f"{name} gives other bytes for {source.name}"
            header, table, _ = parse_payload(torch.from_numpy(stored.copy()))
            assert header.elements == source.elements and header.transform is source.transform
            assert header.codec_id == codecs.BY_NAME[self.codec].number
            assert header.data_bytes <= len(expected) + 16 * 3 * header.chunks, "a chunk grew by more than its padding"
            parsed.append((header, table))
        return parsed

    def _sources(self, dtype, content, chunk_bytes=CHUNK_BYTES, counts=None):
        transform = transforms.for_dtype(dtype)
        return [Source(torch.from_numpy(make(dtype, content, n * transform.width, str(n)).copy()), transform, f"{dtype}-{content}-{n}")
                for n in counts or sizes(transform, chunk_bytes)]

    @pytest.mark.parametrize("content", CONTENTS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_bits_survive(self, dtype, content):
        self._round_trip(self._sources(dtype, content), self._config())

    @pytest.mark.parametrize("content", ("normal", "squared", "zero"))
    @pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float8_e4m3fn", "int8"))
    def test_default_chunks(self, dtype, content):
        chunk_bytes = codecs.BY_NAME[self.codec].chunk_bytes
        self._round_trip(self._sources(dtype, content, chunk_bytes), self._config(chunk_bytes=0))

    @pytest.mark.parametrize("dtype", ("float32", "float8_e5m2"))
    def test_largest_chunks(self, dtype):
        transform = transforms.for_dtype(dtype)
        chunk = transform.chunk_elements(1 << 20)
        [(header, _)] = self._round_trip(self._sources(dtype, "normal", counts=[chunk + 5]), self._config(chunk_bytes=1 << 20))
        assert header.chunk_elements == chunk and header.chunks == 2

    @pytest.mark.parametrize("dtype", ("float64", "bfloat16", "float8_e4m3fn", "complex64", "uint8"))
    def test_verified_while_encoding(self, dtype):
        for content in ("normal", "special", "zero"):
            self._round_trip(self._sources(dtype, content), self._config(verify="encode"))

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_zeros_cost_a_table_row(self, dtype):
        for header, table in self._round_trip(self._sources(dtype, "zero"), self._config()):
            assert header.data_bytes == 0 and not table.mode.any() and not table.crc.any() and not table.decoded.any()

    @pytest.mark.parametrize("dtype", [name for name, bits in DTYPES.items() if bits])
    def test_sign_is_dropped_where_none_is_set(self, dtype):
        transform = transforms.for_dtype(dtype)
        for header, table in self._round_trip(self._sources(dtype, "squared"), self._config()):
            if dtype != "complex64":
                assert np.isin(table.mode[1], (format.UNSIGNED, format.ZERO)).all()
        # One negative number in the second chunk keeps the sign there, and there only.
        chunk = transform.chunk_elements(CHUNK_BYTES)
        [source] = self._sources("float32" if dtype == "complex64" else dtype, "squared", counts=[3 * chunk])
        source.data[(chunk + 7) * transform.width + transform.width - 1] |= 0x80
        [(_, table)] = self._round_trip([source], self._config())
        assert table.mode[1].tolist() == [format.UNSIGNED, format.RAW, format.UNSIGNED]

    def test_exponents_are_coded(self):
        for dtype in ("float64", "float32", "bfloat16", "float16", "complex64"):
            [(header, table)] = self._round_trip(self._sources(dtype, "normal", counts=[4096 * 3]), self._config())
            if self.codec == "none":
                assert (table.mode[0] == format.RAW).all()
            elif self.codec not in ("lz4", "snappy", "cascaded", "bitcomp"):  # those may find nothing in noise-like exponents
                assert (table.mode[0] == format.CODED).all()
        [(header, table)] = self._round_trip(self._sources("int64", "constant", counts=[4096 * 3]), self._config())
        assert (table.mode[0] == format.CODED).all() or self.codec not in ("deflate", "zstd", "lz4", "snappy", "gdeflate")

    def test_random_bytes_are_stored_raw(self):
        [(header, table)] = self._round_trip(self._sources("uint8", "random", counts=[4096 * 3]), self._config())
        assert (table.mode[0] == format.RAW).all() and header.data_bytes == 4096 * 3

    def test_many_sources_at_once(self):
        """Different transforms, sizes and contents in one call come back in order."""
        mixed = [source for dtype in ("float32", "int8", "bfloat16", "float8_e5m2", "float64")
                 for content in ("normal", "random") for source in self._sources(dtype, content)]
        self._round_trip(mixed[::2] + mixed[1::2], self._config())

    def test_no_source(self):
        assert list(self.encode([], self._config())) == []

    def test_only_empty_sources(self):
        for source in self._sources("float32", "zero", counts=[0]) + self._sources("uint8", "zero", counts=[0]):
            [(header, _)] = self._round_trip([source], self._config())
            assert header.chunks == 0

    def test_progress_adds_up(self):
        sources = self._sources("float32", "normal") + self._sources("int8", "normal")
        seen = []
        self.encode(self.prepare(sources), self._config(), seen.append)
        assert sum(seen) == sum(source.data.numel() for source in sources)


def reference(payload: np.ndarray) -> bytes:
    """The decoder that knows only the document."""
    return reference_decoder.decode(payload)


def gpu_or_skip() -> None:
    """For the top of a GPU test file: skips it where the GPU pipeline cannot run, with the reason.

    DS_NVCOMP_REQUIRE_GPU=1, set where GPU tests are run on purpose, makes that an error: a gate must not pass by skipping.
    """
    missing = gpu_missing()
    if missing:
        if os.environ.get("DS_NVCOMP_REQUIRE_GPU") == "1":
            raise RuntimeError(f"GPU tests are required here, but {missing}")
        pytest.skip(f"GPU tests: {missing}", allow_module_level=True)
