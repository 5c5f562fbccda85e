"""The CPU codecs alone: round trips, hostile streams, and what happens where a codec cannot run."""
import builtins
import importlib
import struct
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from conformance import CPU_CODECS, make
from ds_nvcomp.encoding import codecs
from ds_nvcomp.errors import CodecUnavailableError, UnsupportedVersionError

CODED = [name for name in CPU_CODECS if name != "none"]
each_codec = pytest.mark.parametrize("name", CODED)


def bounded(coder, stream, raw_bytes):
    """The contract of `CpuCodec.decode`: any exception, or no more than one byte too many."""
    try:
        raw = coder.decode(stream, raw_bytes)
    except Exception as err:
        assert not isinstance(err, MemoryError)
        return None
    assert len(raw) <= raw_bytes + 1
    return bytes(raw)


@each_codec
@pytest.mark.parametrize("exponents", [True, False])
@given(data=st.one_of(st.binary(min_size=1, max_size=3000), st.integers(1, 70000).map(lambda n: bytes(n))))
@settings(max_examples=40, deadline=None)
def test_round_trip(name, exponents, data):
    coder = codecs.cpu(codecs.BY_NAME[name])
    coded = coder.encode(np.frombuffer(data, np.uint8), exponents=exponents)
    assert bytes(coder.decode(np.frombuffer(coded, np.uint8), len(data))) == data


@each_codec
@given(data=st.binary(max_size=300), raw_bytes=st.integers(1, 5000))
@settings(max_examples=150, deadline=None)
def test_garbage_stays_in_bounds(name, data, raw_bytes):
    bounded(codecs.cpu(codecs.BY_NAME[name]), np.frombuffer(data, np.uint8), raw_bytes)


@each_codec
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_flipped_bits_stay_in_bounds(name, at, bit):
    coder, raw = codecs.cpu(codecs.BY_NAME[name]), make("int32", "normal", 2000)
    coded = bytearray(coder.encode(raw, exponents=False))
    coded[at % len(coded)] ^= 1 << bit
    bounded(coder, np.frombuffer(bytes(coded), np.uint8), len(raw))


@each_codec
def test_truncated_streams_are_never_whole(name):
    coder, raw = codecs.cpu(codecs.BY_NAME[name]), make("int32", "normal", 1000)
    coded = np.frombuffer(coder.encode(raw, exponents=False), np.uint8)
    for length in range(len(coded)):
        found = bounded(coder, coded[:length], len(raw))
        assert found is None or len(found) != len(raw), f"{length} of {len(coded)} bytes decoded to the whole chunk"


@each_codec
def test_streams_of_another_length_are_not_taken(name):
    coder = codecs.cpu(codecs.BY_NAME[name])
    for length in (99, 101, 5000, 1 << 20):
        coded = np.frombuffer(coder.encode(np.zeros(length, np.uint8), exponents=False), np.uint8)
        found = bounded(coder, coded, 100)
        assert found is None or len(found) != 100


BOMBS = {
    "deflate": lambda coder: coder.encode(np.zeros(64 << 20, np.uint8), exponents=False),
    # Single segment, 8-byte content size of 2^62, one raw block.
    "zstd": lambda coder: b"\x28\xb5\x2f\xfd" + bytes([0xE0]) + struct.pack("<Q", 1 << 62) + b"\x01\x00\x00",
    "lz4": lambda coder: b"\x1f\x00\x01\x00" + b"\xff" * 4000 + b"\x00",                          # one match of a million bytes
    "snappy": lambda coder: b"\xff\xff\xff\xff\x0f" + b"\x00a" + b"\xfe\x01\x00" * 1000,          # announces 4 GiB - 1
}


@each_codec
def test_announced_sizes_are_not_believed(name):
    import resource
    coder = codecs.cpu(codecs.BY_NAME[name])
    bomb = np.frombuffer(BOMBS[name](coder), np.uint8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for raw_bytes in (1, 100, 65536):
        found = bounded(coder, bomb, raw_bytes)
        assert found is None or len(found) != raw_bytes
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 << 10, f"decoding {len(bomb)} hostile bytes took {grown} KiB"


@each_codec
def test_threads_share_no_state(name):
    from concurrent.futures import ThreadPoolExecutor
    coder = codecs.cpu(codecs.BY_NAME[name])

    def one(i):
        raw = make("float32", "normal", 4096 + i, str(i))
        return bytes(coder.decode(np.frombuffer(coder.encode(raw, exponents=bool(i % 2)), np.uint8), len(raw))) == raw.tobytes()

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(one, range(64)))


def test_deflate_may_be_followed_by_zeros_only():
    """FORMAT.md section 6; anything else behind the final block is not ours."""
    coder = codecs.cpu(codecs.BY_NAME["deflate"])
    raw = make("float32", "normal", 999)
    coded = coder.encode(raw, exponents=True)
    assert bytes(coder.decode(np.frombuffer(coded + bytes(5), np.uint8), 999)) == raw.tobytes()
    with pytest.raises(ValueError, match="does not end where its chunk does"):
        coder.decode(np.frombuffer(coded + b"\0x", np.uint8), 999)


@pytest.mark.parametrize("name,decode", [
    ("deflate", lambda coded, n: __import__("zlib").decompress(coded, -15)),
    ("zstd", lambda coded, n: __import__("zstandard").ZstdDecompressor().decompress(coded)),
    ("lz4", lambda coded, n: bytes(__import__("cramjam").lz4.decompress_block(coded, output_len=n))),
    ("snappy", lambda coded, n: bytes(__import__("cramjam").snappy.decompress_raw(coded))),
])
def test_streams_are_those_of_the_specifications(name, decode):
    raw = make("int32", "normal", 5000)
    for exponents in (True, False):
        assert decode(bytes(codecs.cpu(codecs.BY_NAME[name]).encode(raw, exponents=exponents)), len(raw)) == raw.tobytes()


def test_numbers_and_revisions_are_the_documented_ones():
    """They are in files: none may ever change. A revision moves with nvCOMP's major version, with its own id in the table."""
    assert {c.number: (c.name, c.revision) for c in codecs.BY_NUMBER.values()} == {
        0: ("none", 0), 1: ("deflate", 0), 2: ("zstd", 0), 3: ("lz4", 0), 4: ("snappy", 0),
        16: ("ans", 6), 17: ("gdeflate", 6), 18: ("bitcomp", 6), 19: ("cascaded", 6)}


def test_config_and_registry_know_the_same_names():
    from ds_nvcomp.config import CODECS
    assert set(CODECS) == set(codecs.BY_NAME)


@pytest.mark.parametrize("number", [5, 15, 20, 255])
def test_unknown_codec(number):
    with pytest.raises(UnsupportedVersionError, match=f"codec {number}, known are .*Install a ds_nvcomp"):
        codecs.resolve(number, 0)


@pytest.mark.parametrize("codec", codecs.BY_NAME.values(), ids=lambda c: c.name)
def test_other_revision(codec):
    for revision in {0, 5, 6, 7, 255} - {codec.revision}:
        with pytest.raises(UnsupportedVersionError, match=f"{codec.name} of nvCOMP {revision}.*nvCOMP {codec.revision}"):
            codecs.resolve(codec.number, revision)
    assert codecs.resolve(codec.number, codec.revision) is codec


@pytest.mark.parametrize("name", ["ans", "gdeflate", "bitcomp", "cascaded"])
def test_gpu_codec_without_a_gpu_says_what_to_do(name):
    with pytest.raises(CodecUnavailableError) as caught:
        codecs.cpu(codecs.BY_NAME[name])
    for words in (f"'{name}'", "NVIDIA GPU only", "ds_nvcomp[cu13]", "ds-nvcomp pack --codec deflate"):
        assert words in str(caught.value)


@pytest.mark.parametrize("name,package", [("deflate", "isal"), ("zstd", "zstandard"), ("lz4", "cramjam"), ("snappy", "cramjam")])
def test_missing_library_is_named(name, package, monkeypatch):
    real = builtins.__import__

    def without(wanted, *args, **kwargs):
        if wanted.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)
        return real(wanted, *args, **kwargs)

    module = f"ds_nvcomp.encoding.codecs.{codecs.BY_NAME[name].cpu}"
    loaded = sys.modules.pop(module, None)
    monkeypatch.setattr(builtins, "__import__", without)
    try:
        with pytest.raises(CodecUnavailableError, match=f"'{name}' needs the package '{package}'.*pip install {package}"):
            codecs.cpu(codecs.BY_NAME[name])
    finally:
        monkeypatch.undo()
        if loaded is not None:
            sys.modules[module] = loaded
        importlib.import_module(module)
