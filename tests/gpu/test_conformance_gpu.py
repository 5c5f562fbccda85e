"""Every codec on the GPU by the same suite as on the CPU, each side reading what the other wrote, and archives of CUDA tensors."""
import io
import subprocess
import sys
import threading
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conformance import CHUNK_BYTES, CODECS, CPU_CODECS, DTYPES, Conformance, gpu_or_skip, in_order, joined, make, reference, sizes

gpu_or_skip()

import payloads  # noqa: E402
import test_archive as archive  # noqa: E402
from ds_nvcomp.archive import save  # noqa: E402
from ds_nvcomp.config import Config  # noqa: E402
from ds_nvcomp.encoding import codecs, format, transforms  # noqa: E402
from ds_nvcomp.encoding.codecs import nvcomp  # noqa: E402
from ds_nvcomp.errors import ChecksumError, CodecUnavailableError, DecodeError, UntrustedCodecError  # noqa: E402
from ds_nvcomp.pipeline import Source, cpu, decode_payload, encode, gpu, gpu_decode as gpu_decode_module, parse_payload  # noqa: E402

DEVICE = torch.device("cuda", torch.cuda.current_device())
GPU_ONLY = [name for name in CODECS if name not in CPU_CODECS]
MIB = 1 << 20


def gpu_decode(payload):
    data = torch.from_numpy(payload.copy()).to(DEVICE)
    out = gpu.decode(data, *parse_payload(data))
    assert out.device == data.device
    return out.cpu().numpy()


def host_decode_by_gpu(payload):
    data = torch.from_numpy(payload.copy())
    out = gpu.decode(data, *parse_payload(data))
    assert out.device.type == "cpu"
    return out.numpy()


def cpu_decode(payload):
    header, table, codec = parse_payload(torch.from_numpy(payload.copy()))
    out = np.full(header.raw_bytes, 0xA5, np.uint8)
    cpu.decode(payload, header, table, codec, out)
    return out


class GpuConformance(Conformance):
    """CUDA sources through the GPU; read by the GPU, and by the CPU and the reference decoder where those can."""

    def prepare(self, sources):
        return [replace(source, data=source.data.to(DEVICE)) for source in sources]

    def encode(self, sources, config, *progress):
        return in_order(gpu.encode(sources, config, *progress))

    def decoders(self):
        both = {"cpu": cpu_decode, "reference": reference} if self.codec in CPU_CODECS else {}
        return {"gpu": gpu_decode, "gpu from host": host_decode_by_gpu, **both}


class TestNone(GpuConformance):
    codec = "none"


class TestDeflate(GpuConformance):
    codec = "deflate"


class TestZstd(GpuConformance):
    codec = "zstd"


class TestLz4(GpuConformance):
    codec = "lz4"


class TestSnappy(GpuConformance):
    codec = "snappy"


class TestAns(GpuConformance):
    codec = "ans"


class TestGdeflate(GpuConformance):
    codec = "gdeflate"


class TestBitcomp(GpuConformance):
    codec = "bitcomp"


class TestCascaded(GpuConformance):
    codec = "cascaded"


class CpuWritesGpuReads(Conformance):
    def encode(self, sources, config, *progress):
        return in_order(cpu.encode(sources, config, *progress))

    def decoders(self):
        return {"gpu": gpu_decode}


class TestDeflateOfTheCpu(CpuWritesGpuReads):
    codec = "deflate"


class TestZstdOfTheCpu(CpuWritesGpuReads):
    codec = "zstd"


class TestLz4OfTheCpu(CpuWritesGpuReads):
    codec = "lz4"


class TestSnappyOfTheCpu(CpuWritesGpuReads):
    codec = "snappy"


class TestNoneOfTheCpu(CpuWritesGpuReads):
    codec = "none"


def test_every_codec_has_its_class():
    assert {kind.codec for kind in GpuConformance.__subclasses__()} == set(CODECS)
    assert {kind.codec for kind in CpuWritesGpuReads.__subclasses__()} == set(CPU_CODECS)


def sources(dtypes=DTYPES, contents=("normal", "squared", "special", "zero"), device=None):
    return [Source(torch.from_numpy(make(dtype, content, n * transform.width, str(n)).copy()).to(device or "cpu"), transform,
                   f"{dtype}-{content}-{n}")
            for dtype in dtypes for transform in [transforms.for_dtype(dtype)]
            for content in contents for n in sizes(transform, CHUNK_BYTES)]


def same(payload, source):
    return np.array_equal(gpu_decode(joined(payload)), source.data.cpu().numpy())


# --- the pipeline -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("codec", CODECS)
def test_host_sources(codec):
    """Host bytes through the GPU, where the configuration or the codec asks for it."""
    group = sources()
    config = Config(codec=codec, chunk_bytes=CHUNK_BYTES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encoded = in_order(gpu.encode(group, config))
    for source, payload in zip(group, encoded):
        assert same(payload, source), source.name


@pytest.mark.parametrize("codec", CODECS)
def test_modes_are_those_of_the_cpu(codec):
    """Both sides take the same decisions about zeros and signs; `none` gives the same bytes altogether."""
    group = sources(dtypes=("float32", "bfloat16", "float8_e4m3fn", "float64", "int8"))
    config = Config(codec=codec, chunk_bytes=CHUNK_BYTES)
    plain = in_order(cpu.encode(group, replace(config, codec="none")))
    for source, ours, other in zip(group, in_order(gpu.encode([replace(s, data=s.data.to(DEVICE)) for s in group], config)), plain):
        assert np.array_equal(ours.table.mode[1:], other.table.mode[1:]), source.name
        assert np.array_equal(ours.table.mode[0] == format.ZERO, other.table.mode[0] == format.ZERO), source.name
        if codec == "none":
            assert np.array_equal(joined(ours), joined(other)), source.name


def test_mixed_devices_come_back_in_order():
    group = [replace(source, data=source.data.to(DEVICE)) if i % 3 else source for i, source in enumerate(sources())]
    for device in ("auto", "gpu", "cpu"):
        for source, payload in zip(group, in_order(encode(group, Config(device=device, chunk_bytes=CHUNK_BYTES)))):
            assert payload.header.elements == source.elements and same(payload, source), (device, source.name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "float64", "int8"])
def test_sources_may_begin_at_any_element(dtype):
    """Slices of flat buffers do; 16-byte loads are only for those that happen to be aligned."""
    transform = transforms.for_dtype(dtype)
    flat = torch.from_numpy(make(dtype, "normal", 40 * CHUNK_BYTES * transform.width).copy()).to(DEVICE)
    group = [Source(flat[i * transform.width:][:(2 * CHUNK_BYTES + i) * transform.width], transform, str(i)) for i in range(33)]
    for source, payload in zip(group, in_order(gpu.encode(group, Config(chunk_bytes=CHUNK_BYTES)))):
        assert same(payload, source), source.name


@pytest.mark.parametrize("codec", ["deflate", "ans", "none"])
@pytest.mark.parametrize("where", ["cuda", "host"])
def test_small_work_memory_and_many_tiles(codec, where):
    raw = torch.from_numpy(make("float32", "normal", 8 * MIB).copy()).repeat(24)  # 192 MiB
    raw[100 * MIB:110 * MIB] = 0
    device = DEVICE if where == "cuda" else "cpu"
    group = [Source(raw.to(device), transforms.SPLIT32, "large"), Source(raw[:12_345 * 4].to(device), transforms.SPLIT32, "small"),
             Source(raw[4:90 * MIB].to(device), transforms.SPLIT32, "middle")]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, done = torch.cuda.memory_allocated(), []
    encoded = in_order(gpu.encode(group, Config(codec=codec, gpu_memory=32 * MIB), done.append))
    taken = torch.cuda.max_memory_allocated() - before
    assert len(done) > 10 and sum(done) == sum(source.data.numel() for source in group)
    assert taken < 48 * MIB, f"{taken / MIB:.0f} MiB of work memory where 32 are allowed"
    for source, payload in zip(group, encoded):
        assert same(payload, source), source.name


def test_work_of_the_current_stream_is_waited_for():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        value = torch.zeros(32 * MIB // 4, device=DEVICE)
        big = torch.randn(4096, 4096, device=DEVICE)
        for _ in range(20):
            big = torch.tanh(big @ big)   # keeps the stream busy before the value is there
        value += 1.5
        [payload] = in_order(gpu.encode([Source(value.view(torch.uint8), transforms.SPLIT32)], Config()))
    assert (gpu_decode(joined(payload)).view(np.float32) == 1.5).all()


def test_threads():
    failures = []

    def work(seed):
        try:
            raw = torch.from_numpy(make("bfloat16", "normal", 2 * MIB + 2 * seed, str(seed)).copy()).to(DEVICE)
            for codec in ("deflate", "ans"):
                source = Source(raw, transforms.SPLIT16)
                [payload] = in_order(gpu.encode([source], Config(codec=codec)))
                assert same(payload, source)
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert not failures


# --- verify and failures ----------------------------------------------------------------------------------------------

def test_verify_stores_what_was_coded_wrongly_uncoded(monkeypatch):
    real = nvcomp.GpuCodec.encode

    def wrong(self, raw, raw_stride, piece_sizes, slots, slot_bytes):
        other = raw.clone()
        other[raw_stride + 5] ^= 1  # the second chunk's stream is sound, but of other bytes
        return real(self, other, raw_stride, piece_sizes, slots, slot_bytes)

    monkeypatch.setattr(nvcomp.GpuCodec, "encode", wrong)
    [source] = [Source(torch.from_numpy(make("float32", "normal", 16 * CHUNK_BYTES).copy()).to(DEVICE), transforms.SPLIT32, "w")]
    with pytest.warns(RuntimeWarning, match="1 chunks decode to other bytes.*uncoded"):
        [payload] = in_order(gpu.encode([source], Config(chunk_bytes=CHUNK_BYTES, verify="encode")))
    assert same(payload, source)
    assert payload.table.mode[0].tolist() == [format.CODED, format.RAW, format.CODED, format.CODED]


@pytest.mark.parametrize("call", ["encode", "sizes", "decode"])
def test_a_codec_that_fails_costs_space_and_not_data(call, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("injected")

    monkeypatch.setattr(nvcomp.Batch if call == "sizes" else nvcomp.GpuCodec, call, fails)
    source = Source(torch.from_numpy(make("float32", "normal", 16 * CHUNK_BYTES).copy()).to(DEVICE), transforms.SPLIT32, "w")
    with pytest.warns(RuntimeWarning, match="injected.*uncoded"):
        [payload] = in_order(gpu.encode([source], Config(chunk_bytes=CHUNK_BYTES, verify="encode")))
    monkeypatch.undo()
    assert (payload.table.mode[0] == format.RAW).all() and same(payload, source)


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("codec", CODECS)
def test_damage_is_found_before_any_decoder(codec, place, monkeypatch):
    config = Config(codec=codec, chunk_bytes=CHUNK_BYTES)
    raw = torch.from_numpy(make("bfloat16", "normal", 40 * CHUNK_BYTES).copy()).to(DEVICE)
    [payload] = in_order(gpu.encode([Source(raw, transforms.SPLIT16)], config))
    good = bytearray(joined(payload).tobytes())
    spans = payloads.spans(good)
    monkeypatch.setattr(nvcomp.GpuCodec, "decode", lambda *_: pytest.fail("a decoder saw damaged bytes"))
    for chunk in (0, 7, len(spans) - 1):
        for at in (spans[chunk][0], spans[chunk][1] - 1):
            bad = bytearray(good)
            bad[at] ^= 0x20
            data = torch.frombuffer(bad, dtype=torch.uint8).to(DEVICE if place == "device" else "cpu")
            with pytest.raises(ChecksumError) as caught:
                gpu.decode(data, *parse_payload(data))
            assert caught.value.chunk == chunk


HOSTILE = """
import sys; sys.path[:0] = {path!r}
import numpy as np, torch, payloads
from conformance import CHUNK_BYTES, make
from ds_nvcomp.encoding import codecs, format
from ds_nvcomp.errors import DecodeError
from ds_nvcomp.pipeline import gpu, parse_payload
codec, length = {codec!r}, {length}
data = payloads.payload("uint8", "constant", codec=codec)
plane = make("uint8", "constant", CHUNK_BYTES)  # of which the forged stream has no byte: what a decoder leaves of it cannot pass
assert 7 not in plane and payloads.plane_crc(plane)
stream = bytes(codecs.cpu(codecs.BY_NAME[codec]).encode(np.full(length, 7, np.uint8), exponents=False)) if length else b"\\xff" * 40
start, stop = payloads.spans(data)[1]
padded = stream.ljust(-(-len(stream) // 16) * 16, b"\\0")
data[start:stop] = padded
data = payloads.change_table(data, size=[(0, 1, len(stream))], mode=[(0, 1, format.CODED)],
                             decoded=[(1, payloads.plane_crc(plane))])
data = payloads.reseal_chunk(payloads.put(data, data_bytes=payloads.get(data, "data_bytes") + len(padded) - (stop - start)), 1)
data = torch.frombuffer(data, dtype=torch.uint8).cuda()
try:
    gpu.decode(data, *parse_payload(data))
except DecodeError as err:
    print("refused", err.chunk)
torch.cuda.synchronize()
"""


@pytest.mark.slow
@pytest.mark.parametrize("length", [CHUNK_BYTES - 1, CHUNK_BYTES + 1, 16 * CHUNK_BYTES, 0], ids=["short", "long", "much longer", "garbage"])
@pytest.mark.parametrize("codec", [codec for codec in CPU_CODECS if codec != "none"])
def test_streams_that_lie_about_their_length(codec, length):
    """A sound checksum over a stream that is not the chunk's: refused by that of the decoded plane, as nvCOMP does not tell; within
    bounds. In a process of its own: a fault ends that."""
    here = Path(__file__).resolve()
    code = HOSTILE.format(codec=codec, length=length, path=[str(here.parents[2]), str(here.parents[1])])
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr[-2000:]
    assert out.stdout.startswith("refused 1"), "garbage was decoded without a complaint"


@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "float64", "uint8"])
def test_decoded_checksums_are_those_of_the_planes(dtype, codec):
    """Also where a chunk's plane ends at each byte of 16: what is behind it counts as zero, whatever work memory held before."""
    transform = transforms.for_dtype(dtype)
    chunk = transform.chunk_elements(CHUNK_BYTES)
    content = "constant" if dtype == "float8_e4m3fn" else "squared"  # which every codec can shrink
    raws = [make(dtype, content, (chunk + 16 * 40 + i) * transform.width, str(i)).copy() for i in range(34)]
    dirty = Source(torch.full((40 * chunk * transform.width,), 0xFF, dtype=torch.uint8, device=DEVICE), transform)
    config = Config(codec=codec, chunk_bytes=CHUNK_BYTES)
    in_order(gpu.encode([dirty], config))
    coded = 0
    for raw in raws:
        [payload] = in_order(gpu.encode([Source(torch.from_numpy(raw).to(DEVICE), transform)], config))
        for c, mode in enumerate(payload.table.mode[0]):
            part = raw[c * chunk * transform.width:(c + 1) * chunk * transform.width]
            expected = payloads.plane_crc(transforms.split(transform, part)[0]) if mode == format.CODED else 0
            assert payload.table.decoded[c] == expected, (len(raw), c)
            coded += mode == format.CODED
        assert np.array_equal(gpu_decode(joined(payload)), raw)
    assert coded or dtype == "uint8"


@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("codec", [codec for codec in CODECS if codec != "none"])
def test_a_plane_that_is_not_what_was_coded(codec, place):
    raw = torch.from_numpy(make("bfloat16", "normal", 40 * CHUNK_BYTES).copy()).to(DEVICE)
    [payload] = in_order(gpu.encode([Source(raw, transforms.SPLIT16)], Config(codec=codec, chunk_bytes=CHUNK_BYTES)))
    good = bytearray(joined(payload).tobytes())
    coded = np.flatnonzero(payload.table.mode[0] == format.CODED)
    assert len(coded), "nothing is coded here"
    for chunk in (int(coded[0]), int(coded[len(coded) // 2]), int(coded[-1])):
        bad = payloads.change_table(good, decoded=[(chunk, int(payload.table.decoded[chunk]) ^ 1)])
        data = torch.frombuffer(bad, dtype=torch.uint8).to(DEVICE if place == "device" else "cpu")
        with pytest.raises(DecodeError, match="do not decode to what they were made from") as caught:
            gpu.decode(data, *parse_payload(data))
        assert caught.value.chunk == chunk


# --- archives ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def state():
    base = archive.numbers(300, 200).to(DEVICE)
    attributes = archive.numbers(9000).to(DEVICE)
    attributes.ds_id = 4
    parameter = torch.nn.Parameter(archive.numbers(90, 90, seed="p").to(DEVICE))
    flat = archive.numbers(400_000, seed="flat").to(DEVICE)
    return {"base": base, "row": base[3], "transposed": base.T, "tied": [parameter, parameter], "attributes": attributes,
            "half": archive.numbers(9001, dtype=torch.bfloat16).to(DEVICE),
            "fp8": archive.numbers(9001, dtype=torch.float8_e4m3fn).to(DEVICE),
            "ids": archive.numbers(3000, dtype=torch.int64).to(DEVICE), "zero": torch.zeros(70_000, device=DEVICE),
            "special": archive.numbers(9000, content="special").to(DEVICE), "expert": flat[150_003:170_001], "far": flat[390_000:],
            "scalar": torch.tensor(3.5, device=DEVICE), "empty": torch.empty(0, 3, device=DEVICE), "on the host": archive.numbers(5000)}


def located(data: bytes) -> set[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        [name] = [name for name in file.namelist() if name.endswith("/data.pkl")]
        text = file.read(name)
    return {tag for tag in ("cpu", "cuda:0", "cuda:1") if tag.encode() in text}


def to(value, device):
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(value.data.to(device))
    if isinstance(value, torch.Tensor):
        moved = value.to(device)
        moved.__dict__.update(value.__dict__)
        return moved
    return value


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("location", [None, "cpu", "cuda", "cuda:0", "meta"])
def test_archive(codec, location, state):
    data = archive.saved(state, {"codec": codec, "fsync": False})
    assert located(data) == {"cpu", "cuda:0"}
    reference_file = io.BytesIO()
    torch.save(state, reference_file)
    reference_file.seek(0)
    for weights_only in (True, False):
        if weights_only and not codecs.BY_NAME[codec].safe and location != "meta":
            with pytest.raises(UntrustedCodecError, match="weights_only=False"):
                torch.load(io.BytesIO(data), map_location=location, weights_only=True)
            continue
        found = torch.load(io.BytesIO(data), map_location=location, weights_only=weights_only)
        reference_file.seek(0)
        expected = torch.load(reference_file, map_location=location, weights_only=weights_only)
        for name in state:
            pair = (found[name], expected[name]) if name != "tied" else (found[name][0], expected[name][0])
            assert pair[0].device == pair[1].device and pair[0].dtype == pair[1].dtype and pair[0].stride() == pair[1].stride(), name
            if location != "meta":
                assert archive.bits(pair[0]) == archive.bits(pair[1]), name
        assert found["tied"][0] is found["tied"][1] and found["attributes"].ds_id == 4
        if location != "meta":
            assert archive.shares(found["base"], found["row"]) and archive.shares(found["base"], found["transposed"])
            assert not archive.shares(found["expert"], found["far"])


@pytest.mark.parametrize("codec", CODECS)
def test_archive_mapped(codec, state, tmp_path):
    save(state, tmp_path / "x.pt", {"codec": codec, "fsync": False})
    found = torch.load(tmp_path / "x.pt", mmap=True, map_location="cpu", weights_only=False)
    for name in ("base", "half", "fp8", "ids", "expert", "special"):
        assert archive.bits(found[name]) == archive.bits(state[name])


def test_archive_of_the_cpu_loads_on_the_gpu_and_back(state):
    for codec in CPU_CODECS:
        for device in ("cpu", "gpu"):
            data = archive.saved({name: to(value, "cpu") for name, value in state.items() if name != "tied"},
                                 {"codec": codec, "device": device, "fsync": False})
            for location in ("cuda", "cpu"):
                found = torch.load(io.BytesIO(data), map_location=location)
                for name, value in found.items():
                    assert value.device.type == location and archive.bits(value) == archive.bits(state[name]), (codec, device, name)


@pytest.mark.parametrize("codec", ["deflate", "ans"])
@pytest.mark.parametrize("location", [None, "cpu", "cuda"])
def test_default_device(codec, location, state):
    """torch.set_default_device("cuda") is for the user's tensors, not for our buffers on the host."""
    with torch.device("cuda"):
        found = torch.load(io.BytesIO(archive.saved(state, {"codec": codec, "fsync": False})), map_location=location)
    for name in ("base", "half", "on the host"):
        assert archive.bits(found[name]) == archive.bits(state[name])
        assert found[name].device.type == (location or state[name].device.type)


def test_device_cpu_keeps_off_the_gpu(state, monkeypatch):
    monkeypatch.setattr(gpu, "encode", lambda *_: pytest.fail("went through the GPU"))
    data = archive.saved(state, {"device": "cpu", "fsync": False})
    monkeypatch.undo()
    assert archive.bits(torch.load(io.BytesIO(data))["base"]) == archive.bits(state["base"])


def test_gpu_only_codec_of_host_tensors():
    """`ans` has no CPU implementation: host tensors go through the GPU, both ways."""
    obj = {"w": archive.numbers(300, 300)}
    for codec in GPU_ONLY:
        found = archive.loaded(obj, {"codec": codec})
        assert found["w"].device.type == "cpu" and archive.bits(found["w"]) == archive.bits(obj["w"])


def test_gpu_only_codec_without_the_gpu(monkeypatch):
    """What a reader elsewhere is told."""
    import ds_nvcomp.pipeline as pipeline
    data = archive.saved({"w": archive.numbers(300, 300).to(DEVICE)}, {"codec": "ans", "fsync": False})
    monkeypatch.setattr(pipeline, "gpu_missing", lambda: "there is none in this test")
    with pytest.raises(CodecUnavailableError, match="NVIDIA GPU only.*pack --codec deflate"):
        torch.load(io.BytesIO(data), map_location="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["deflate", "ans"])
def test_large_archive_with_little_work_memory(codec, tmp_path):
    generator = torch.Generator(DEVICE).manual_seed(1)
    state = {str(i): (torch.randn(20_000_003, device=DEVICE, generator=generator) * 0.02).to(dtype)
             for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float32, torch.float16])}
    state["square"] = state["0"] ** 2
    report = save(state, tmp_path / "x.pt", {"codec": codec, "gpu_memory": 32 * MIB, "fsync": False})
    assert report.ratio < 0.9
    found = torch.load(tmp_path / "x.pt", map_location="cuda")
    for name, tensor in state.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("codec", CODECS)
def test_two_devices(codec):
    obj = {"a": archive.numbers(70_000).to("cuda:0"), "b": archive.numbers(70_000, seed="b").to("cuda:1"), "c": archive.numbers(5000)}
    data = archive.saved(obj, {"codec": codec, "fsync": False})
    assert located(data) == {"cpu", "cuda:0", "cuda:1"}
    found = torch.load(io.BytesIO(data), weights_only=False)
    for name, tensor in obj.items():
        assert found[name].device == tensor.device and archive.bits(found[name]) == archive.bits(tensor)
    found = torch.load(io.BytesIO(data), map_location="cuda:1", weights_only=False)
    assert {tensor.device for tensor in found.values()} == {torch.device("cuda:1")}


def test_payload_on_the_device_decodes_there():
    data = torch.frombuffer(payloads.payload("float32", "normal"), dtype=torch.uint8).to(DEVICE)
    assert decode_payload(data, parse_payload(data)).device == data.device
    shifted = torch.cat([torch.zeros(4, dtype=torch.uint8, device=DEVICE), data])[4:]  # not aligned to 16 bytes
    assert torch.equal(decode_payload(shifted, parse_payload(shifted)), decode_payload(data, parse_payload(data)))


def test_registry_is_complete_on_the_gpu():
    for codec in codecs.BY_NAME.values():
        assert codec.nvcomp or codec is codecs.NONE


# --- Many payloads at once ----------------------------------------------------------------------------------------------------

def of_all_sizes(codec):
    """Payloads on the host, of which some are alike, and their bytes."""
    counts = 0, 1, 15, 4096, 5000, 70_001, 300_000
    given = [Source(data.view(torch.uint8), transforms.for_dtype(name))
             for count in counts for name, data in (
                 ("float32", torch.randn(count) * 0.02), ("float32", torch.zeros(count)), ("bfloat16", torch.randn(count).bfloat16()),
                 ("int64", torch.arange(count)), ("uint8", torch.randint(0, 255, (count,), dtype=torch.uint8)))]
    config = Config(codec=codec, chunk_bytes=16 << 10)
    encoded = in_order(gpu.encode([replace(source, data=source.data.to(DEVICE)) for source in given], config))
    found = [torch.from_numpy(joined(payload).copy()) for payload in encoded]
    return [(data, *parse_payload(data)) for data in found], [source.data for source in given]


@pytest.mark.parametrize("tile", [1 << 16, 256 << 20])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("codec", CODECS)
def test_many_payloads_at_once(codec, device, tile, monkeypatch):
    """The same bytes as one by one, in any order, also where a tile ends within a payload."""
    monkeypatch.setattr(gpu_decode_module, "STAGED_TILE", tile)
    device = DEVICE if device == "cuda" else torch.device("cpu")
    payloads, expected = of_all_sizes(codec)
    payloads.append((payloads[5][0].to(DEVICE), *payloads[5][1:]))  # one that is on the GPU already
    expected.append(expected[5])
    order = np.random.default_rng(0).permutation(len(payloads))
    found = gpu_decode_module.decode_many([payloads[i] for i in order], device)
    for i, data in zip(order, found):
        alone = gpu.decode(*payloads[i], device)
        assert data.device == alone.device == device and torch.equal(data, alone) and torch.equal(data.cpu(), expected[i])


@pytest.mark.parametrize("codec", ["deflate", "ans", "none"])
def test_damage_in_one_payload_of_many(codec):
    payloads, _ = of_all_sizes(codec)
    data, header, table, own = payloads[-5]
    assert header.chunks > 20
    chunk = 17
    data[header.data_start + int(table.piece_offsets[0, chunk])] ^= 1
    with pytest.raises(ChecksumError) as caught:
        gpu_decode_module.decode_many(payloads, DEVICE)
    assert caught.value.chunk == chunk


@pytest.mark.parametrize("codec", ["deflate", "ans"])
def test_dcp_reader(codec, tmp_path, monkeypatch):
    """In groups, each decoded at once; and a damaged item is named."""
    import torch.distributed.checkpoint as dcp
    from ds_nvcomp.dcp import NvcompReader, NvcompWriter
    value = {f"t{i}": torch.randn(1 + 997 * i, device=DEVICE) * 0.02 for i in range(200)} | {"cpu": torch.randn(50_000)}
    dcp.save(value, storage_writer=NvcompWriter(tmp_path, {"codec": codec, "fsync": False}), no_dist=True)
    many, calls = gpu_decode_module.decode_many, []
    monkeypatch.setattr(gpu_decode_module, "decode_many", lambda payloads, device: calls.append(len(payloads)) or many(payloads, device))

    def load():
        found = {name: torch.zeros_like(data) for name, data in value.items()}
        dcp.load(found, storage_reader=NvcompReader(tmp_path), no_dist=True)
        return found
    found = load()
    assert all(torch.equal(found[name], data) and found[name].device == data.device for name, data in value.items())
    assert max(calls) > 100
    info = next(info for index, info in NvcompReader(tmp_path).read_metadata().storage_data.items() if index.fqn == "t150")
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match="tensor 't150'"):
        load()
