"""torch.distributed.checkpoint with our writer and reader: bits, resharding, damage, and what is left of a save that fails or is killed."""
import io
import os
import pickle
import subprocess
import sys
import textwrap
import time
import types
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from hypothesis import given, settings, strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.multiprocessing.reductions import StorageWeakRef

import ds_nvcomp.dcp
from ds_nvcomp.archive import part
from ds_nvcomp.archive.items import Item, encode_items
from ds_nvcomp.archive.part import find_part, load_part
from ds_nvcomp.archive.link import Link
from ds_nvcomp.archive.writer import write
from ds_nvcomp.config import Config
from ds_nvcomp.dcp import NvcompReader, NvcompWriter
from ds_nvcomp.errors import ChecksumError, ConfigError, DsNvcompError, LinkError
from ds_nvcomp.pipeline import Weights
from ds_nvcomp.pipeline import decode_payload

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
READERS = {"torch's reader": FileSystemReader, "ours": NvcompReader}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]


def bits(tensor) -> bytes:
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8).numpy().tobytes()


def state(seed=0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(60_000, generator=generator)
    special = numbers.clone()
    special[:5] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42, -float("inf")])
    found = {f"a {dtype}": (numbers * 3).to(dtype).reshape(200, 300) for dtype in DTYPES}
    found.update(special=special, transposed=numbers.reshape(300, 200).t(), strided=numbers[::3], empty=torch.empty(0, 3), scalar=torch.tensor(2.5),
                 zeros=torch.zeros(100_000), parameter=torch.nn.Parameter(numbers[:1000].clone()), nested={"list": [numbers[7:20_007], 5], "text": "x"})
    return found


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value).detach()
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return [blank(item) for item in value] if isinstance(value, list) else type(value)()


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape and bits(found.detach()) == bits(expected.detach())
    elif isinstance(expected, (dict, list)):
        assert len(found) == len(expected)
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            assert_same(found[key], expected[key])
    else:
        assert found == expected


def save(path, value, **kwargs):
    dcp.save(value, storage_writer=NvcompWriter(path, **kwargs), no_dist=True)


def load(reader, value):
    found = blank(value)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


# -- bits ---------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("keys", [dict(), dict(thread_count=3), dict(single_file_per_rank=False), dict(config={"codec": "zstd", "min_bytes": 0})], ids=str)
def test_every_reader_gives_the_bits_back(tmp_path, reader, keys):
    save(tmp_path, state(), **keys)
    assert_same(load(READERS[reader](tmp_path), state()), state())


def test_our_reader_reads_what_torchs_writer_wrote(tmp_path):
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    assert_same(load(NvcompReader(tmp_path), state()), state())


def test_items_of_both_writers_may_be_in_one_directory(tmp_path):
    """A tool that adds tensors with torch's writer, say: what an item is, it says itself."""
    both = state()
    save(tmp_path / "ours", both)
    dcp.save(both, storage_writer=FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    ours, theirs = (FileSystemReader(tmp_path / name).read_metadata() for name in ("ours", "theirs"))
    (tmp_path / "theirs" / "__0_0.distcp").rename(tmp_path / "ours" / "__1_0.distcp")
    for i, (index, info) in enumerate(theirs.storage_data.items()):
        if i % 2:
            info.relative_path = "__1_0.distcp"
            ours.storage_data[index] = info
    (tmp_path / "ours" / ".metadata").write_bytes(pickle.dumps(ours))
    (tmp_path / "theirs" / ".metadata").unlink()
    for reader in READERS.values():
        assert_same(load(reader(tmp_path / "ours"), both), both)


def test_it_is_smaller(tmp_path):
    value = {"weights": torch.randn(400_000) * 0.02}
    save(tmp_path / "a", value)
    dcp.save(value, storage_writer=FileSystemWriter(tmp_path / "b"), no_dist=True)
    sizes = [sum(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in "ab"]
    assert sizes[0] < 0.86 * sizes[1]


def test_items_of_objects_are_compressed_too():
    plain = io.BytesIO()
    torch.save({"optimizer": torch.randn(200_000) * 0.02}, plain)
    item, = encode_items([plain], Config())
    assert isinstance(item, Item) and item.nbytes < 0.87 * plain.getbuffer().nbytes
    assert_same(torch.load(io.BytesIO(item.getvalue()), weights_only=True), torch.load(io.BytesIO(plain.getvalue())))


@pytest.mark.parametrize("value", [7, None, {"step": torch.tensor(3.0), "lr": 1e-4}, io.BytesIO(b"extra state"), torch.zeros(0)],
                         ids=["number", "none", "dict", "stream", "empty"])
def test_small_objects_are_sealed(value):
    plain = io.BytesIO()
    torch.save(value, plain)
    item, = encode_items([plain], Config())
    whole = item.getvalue()
    found = torch.load(io.BytesIO(whole), weights_only=False)
    assert found.getvalue() == value.getvalue() if isinstance(value, io.BytesIO) else str(found) == str(value)
    assert len(whole) < len(plain.getvalue())
    with zipfile.ZipFile(io.BytesIO(whole)) as zipped:
        data = zipped.read("archive/data.pkl")
    start = whole.index(data)
    for at in range(start + 2, start + len(data), 7):
        other = bytearray(whole)
        other[at] ^= 1
        with pytest.raises(Exception):
            torch.load(io.BytesIO(other), weights_only=False)


def test_items_that_cannot_be_saved_anew_stay_as_they_are(caplog):
    noise, small = io.BytesIO(b"no zip" + os.urandom(70_000)), io.BytesIO(b"PK")
    damaged = io.BytesIO()
    torch.save(torch.zeros(20_000), damaged)
    damaged = io.BytesIO(damaged.getvalue()[:-100])
    assert encode_items([noise, small, damaged], Config()) == [noise, small, damaged]
    assert caplog.text.count("stays uncompressed") == 1


# -- parts --------------------------------------------------------------------------------------------------------------------

@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_part_of_a_tensor(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = data.draw(st.lists(st.integers(1, 40), min_size=0, max_size=3))
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 9).to(dtype)
    if tensor.dim() and data.draw(st.booleans()):
        tensor = tensor.transpose(0, -1)
    before, codec = data.draw(st.integers(0, 70)), data.draw(st.sampled_from(["deflate", "zstd", "none"]))
    path = tmp_path_factory.mktemp("part") / "file"
    item, = encode_items([tensor], Config(codec=codec, chunk_bytes=4096, min_bytes=data.draw(st.sampled_from([0, 4096]))))
    path.write_bytes(b"x" * before + item.getvalue() + b"y")
    offsets = [data.draw(st.integers(0, n)) for n in tensor.shape]
    sizes = [data.draw(st.integers(0, n - o)) for n, o in zip(tensor.shape, offsets)]
    mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    found = load_part(path, mapped, before, item.nbytes, torch.device("cpu"), offsets, sizes)
    expected = tensor
    for i, (offset, size) in enumerate(zip(offsets, sizes)):
        expected = expected.narrow(i, offset, size)
    assert_same(found, expected)


def test_only_the_chunks_of_a_part_are_read(tmp_path):
    tensor = torch.randn(1000, 1000)
    item, = encode_items([tensor], Config())
    damaged = bytearray(item.getvalue())
    damaged[-len(damaged) // 3] ^= 1  # in a chunk of the last third
    path = tmp_path / "file"
    path.write_bytes(damaged)
    mapped = torch.UntypedStorage.from_file(str(path), False, len(damaged))
    assert_same(load_part(path, mapped, 0, len(damaged), torch.device("cpu"), [100, 0], [200, 1000]), tensor[100:300])
    with pytest.raises(ChecksumError):
        load_part(path, mapped, 0, len(damaged), torch.device("cpu"), [0, 0], [1000, 1000])


@pytest.fixture
def many(tmp_path):
    """A file of items of all kinds, where they are in it, and the tensors."""
    tensors = [torch.randn(n) * 0.02 if i % 3 else torch.arange(n) for i, n in enumerate((0, 1, 3000, 70_000, 300_000, 9000, 120_000, 1 << 18))]
    tensors += [(torch.randn(400, 300) * 0.02).bfloat16(), torch.zeros(90_000)]
    items = encode_items(tensors, Config(codec="deflate", chunk_bytes=4096))
    plain = io.BytesIO()
    torch.save(tensors[4], plain)
    items, tensors = [*items, plain], [*tensors, tensors[4]]
    places, at = [], 7
    with open(tmp_path / "file", "wb") as file:
        for item in items:
            file.seek(at)
            places.append((at, len(item.getbuffer())))
            file.write(item.getbuffer())
            at += len(item.getbuffer())
    return tmp_path / "file", places, tensors


def find_all(path, places, tensors):
    mapped = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
    return [find_part(path, mapped, *place, [0] * tensor.dim(), tensor.shape) for place, tensor in zip(places, tensors)]


def together(monkeypatch, fails=False):
    """As if a GPU decoded: results are parts of one storage, with room for whole chunks of each."""
    calls = []

    def decode_many(payloads, device):
        calls.append(len(payloads))
        starts = [0]
        for _, header, *_ in payloads:
            starts.append(starts[-1] + header.chunks * header.chunk_elements * header.transform.width)
        out = torch.empty(starts[-1], dtype=torch.uint8)
        found = [out[start:start + header.raw_bytes] for start, (_, header, *_) in zip(starts, payloads)]
        for to, (data, *parsed) in zip(found, payloads):
            to.copy_(decode_payload(data, parsed))
        if fails:
            raise torch.OutOfMemoryError("made up")
        return found

    monkeypatch.setitem(sys.modules, "ds_nvcomp.pipeline.gpu_decode", types.SimpleNamespace(decode_many=decode_many))
    monkeypatch.setattr(ds_nvcomp.pipeline, "gpu_decode", sys.modules["ds_nvcomp.pipeline.gpu_decode"], raising=False)
    monkeypatch.setattr(part, "_on_gpu", lambda parts, device: {i for i, part in enumerate(parts) if part.parsed is not None})
    return calls


@pytest.mark.parametrize("how", ["one by one", "threads", "together", "together fails"])
def test_many_parts(many, how, monkeypatch):
    path, places, tensors = many
    monkeypatch.setattr(part.threads, "count", lambda threads: 4 if how == "threads" else 2)
    calls = together(monkeypatch, "fails" in how) if "together" in how else None
    found = list(part.read_parts(find_all(path, places, tensors), "cpu"))
    assert len(found) == len(tensors) and calls in (None, [8])
    for one, tensor in zip(found, tensors):
        assert_same(one, tensor)
    assert list(part.read_parts([], "cpu")) == []


@pytest.mark.parametrize("how", ["one by one", "threads", "together"])
@pytest.mark.parametrize("damaged", [3, 8, 10])
def test_many_parts_of_which_one_is_damaged(many, how, damaged, monkeypatch):
    """Those before it come, and the error when it is its turn."""
    path, places, tensors = many
    data = bytearray(path.read_bytes())
    data[places[damaged][0] + places[damaged][1] // 2] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(part.threads, "count", lambda threads: 4 if how == "threads" else 2)
    if how == "together":
        together(monkeypatch)
    found = part.read_parts(find_all(path, places, tensors), "cpu")
    for tensor in tensors[:damaged]:
        assert_same(next(found), tensor)
    with pytest.raises(ChecksumError):
        next(found)


@pytest.mark.parametrize("one_file", [True, False])
@pytest.mark.parametrize("group", [1, 300_000, 1 << 30])
def test_a_reader_decodes_in_groups(tmp_path, monkeypatch, group, one_file):
    value = {f"t{i}": torch.randn(n) for i, n in enumerate((1, 2000, 70_000, 60_000, 300_000, 9, 50_000))}
    save(tmp_path, value, single_file_per_rank=one_file)
    groups, read = [], ds_nvcomp.dcp.read_parts

    def noting(parts, device):
        groups.append(sum(one.room for one in parts) if len(parts) > 1 else 0)
        return read(parts, device)

    monkeypatch.setattr(ds_nvcomp.dcp, "read_parts", noting)
    monkeypatch.setattr(ds_nvcomp.dcp, "GROUP", group)
    assert_same(load(NvcompReader(tmp_path), value), value)
    assert max(groups) <= group and len(groups) == {1: 7, 300_000: len(groups), 1 << 30: 1}[group]


def test_a_damaged_item_of_many_is_named(tmp_path):
    value = {f"t{i}": torch.randn(3000) for i in range(20)}
    save(tmp_path, value)
    info = next(info for index, info in NvcompReader(tmp_path).read_metadata().storage_data.items() if index.fqn == "t13")
    path = tmp_path / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match="tensor 't13', chunk 0"):
        load(NvcompReader(tmp_path), value)


# -- several processes --------------------------------------------------------------------------------------------------------

def run_ranks(world, function, *args):
    mp.start_processes(_rank, (world, function, args), nprocs=world, start_method="spawn")


def _rank(rank, world, function, args):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(args[0] / f"store{world}{function.__name__}"), world)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        function(rank, world, *args)
    finally:
        torch.distributed.destroy_process_group()


def sharded(world, fill=True):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (world,))
    whole = torch.randn(101, 300, generator=torch.Generator().manual_seed(3))
    whole = whole if fill else torch.zeros_like(whole)
    return {"plain": whole.clone(), "rows": distribute_tensor(whole, mesh, [Shard(0)]), "columns": distribute_tensor(whole.clone(), mesh, [Shard(1)]),
            "replicated": distribute_tensor(whole.clone(), mesh, [Replicate()])}


def write_sharded(rank, world, tmp_path, how):
    value, writer = sharded(world), NvcompWriter(tmp_path / "sharded")
    if how.startswith("staged "):  # as if they were on a GPU
        ds_nvcomp.dcp._is_encoded_here = lambda value: isinstance(value, torch.Tensor)
        how = how.removeprefix("staged ")
    if how == "sync":
        dcp.save(value, storage_writer=writer)
    else:
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
        dcp.async_save(value, storage_writer=writer, async_checkpointer_type=AsyncCheckpointerType(how)).result()


def read_sharded(rank, world, tmp_path, reader):
    expected, found = sharded(world), sharded(world, fill=False)
    dcp.load(found, storage_reader=READERS[reader](tmp_path / "sharded"))
    for name in expected:
        assert_same(*((value if name == "plain" else value.to_local()) for value in (found[name], expected[name])))


@pytest.mark.parametrize("how", ["sync", "thread", "process", "staged thread", "staged process"])
def test_resharding(tmp_path, how):
    run_ranks(2, write_sharded, tmp_path, how)
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2
    run_ranks(3 if how == "sync" else 1, read_sharded, tmp_path, "ours")
    if how == "sync":
        run_ranks(1, read_sharded, tmp_path, "torch's reader")


def test_remote_paths(tmp_path):
    pytest.importorskip("fsspec")
    url = f"file://{tmp_path}/remote"
    save(url, state())
    assert_same(load(NvcompReader(url), state()), state())
    assert_same(load(NvcompReader(tmp_path / "remote"), state()), state())


# -- damage -------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("reader", READERS)
def test_no_flipped_bit_is_silent(tmp_path, reader):
    value = {"layer.weight": torch.randn(30_000), "layer.bias": torch.randn(3_000)}
    save(tmp_path, value, config={"min_bytes": 0})
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    refused = 0
    for at in range(11, len(whole), len(whole) // 150):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        try:
            assert_same(load(READERS[reader](tmp_path), value), value)
        except dcp.CheckpointException as err:
            assert reader != "ours" or "layer." in str(err)
            refused += 1
    assert refused > 140


def test_a_file_that_was_cut_short(tmp_path):
    value = {"layer.weight": torch.randn(30_000)}
    save(tmp_path, value)
    os.truncate(tmp_path / "__0_0.distcp", 50_000)
    with pytest.raises(dcp.CheckpointException, match="layer.weight.*bytes from byte|bytes from byte.*layer.weight"):
        load(NvcompReader(tmp_path), value)


# -- complete or absent -------------------------------------------------------------------------------------------------------

def test_a_save_over_another_leaves_nothing_of_it(tmp_path):
    save(tmp_path, state(1), thread_count=2)
    save(tmp_path, state(2))
    assert_same(load(FileSystemReader(tmp_path), state()), state(2))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_save_that_fails_leaves_the_one_before(tmp_path, monkeypatch):
    save(tmp_path, state(1))

    def fails(objs, config):
        raise OSError("on purpose")
    monkeypatch.setattr("ds_nvcomp.dcp.encode_items", fails)
    for threads in (1, 3):  # what a further thread raises is lost by torch's writer
        with pytest.raises(dcp.CheckpointException, match="on purpose"):
            save(tmp_path, state(2), thread_count=threads)
        assert_same(load(FileSystemReader(tmp_path), state()), state(1))
    monkeypatch.undo()
    save(tmp_path, state(3))
    assert_same(load(FileSystemReader(tmp_path), state()), state(3))
    assert len(list(tmp_path.iterdir())) == 2  # what the failed ones have left is gone too


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "ds_nvcomp.archive.files.sync_directory", "pathlib.Path.unlink",
                                   "torch.distributed.checkpoint.filesystem._write_item"])
def test_a_save_that_is_killed_leaves_the_old_or_the_new(tmp_path, where):
    save(tmp_path / "saved", {"a": torch.full((50_000,), 1.0)})
    code = textwrap.dedent(f"""
        import os, signal, sys, warnings, importlib
        warnings.simplefilter("ignore")
        import torch, torch.distributed.checkpoint as dcp, torch.distributed.checkpoint.filesystem, pathlib
        from ds_nvcomp.dcp import NvcompWriter
        owner, name = {where!r}.rsplit(".", 1)
        parent, _, leaf = owner.rpartition(".")
        owner = getattr(importlib.import_module(parent), leaf) if leaf[0].isupper() else importlib.import_module(owner)
        setattr(owner, name, lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL))
        dcp.save({{"a": torch.full((50_000,), 2.0)}}, storage_writer=NvcompWriter({str(tmp_path / "saved")!r}), no_dist=True)
        """)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120).returncode == -9
    found = {"a": torch.zeros(50_000)}
    dcp.load(found, storage_reader=FileSystemReader(tmp_path / "saved"), no_dist=True)
    expected = 2.0 if where.endswith(("sync_directory", "unlink")) else 1.0
    assert bits(found["a"]) == bits(torch.full((50_000,), expected))


# -- what is refused ----------------------------------------------------------------------------------------------------------

def test_configurations_that_make_no_sense_here(tmp_path):
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    for keys in (dict(config={"async": True}), dict(config={"overlap": True}), dict(config={"codeç": "x"}),
                 dict(serialization_format=SerializationFormat.SAFETENSORS)):
        with pytest.raises(ConfigError):
            NvcompWriter(tmp_path, **keys)


def test_a_part_that_the_item_does_not_have(tmp_path):
    item, = encode_items([torch.randn(10, 10)], Config())
    path = tmp_path / "file"
    path.write_bytes(item.getvalue())
    mapped = torch.UntypedStorage.from_file(str(path), False, item.nbytes)
    for offsets, sizes in (([5, 0], [6, 10]), ([0], [10]), ([-1, 0], [2, 2])):
        with pytest.raises(DsNvcompError, match="is wanted of"):
            load_part(path, mapped, 0, item.nbytes, "cpu", offsets, sizes)


def test_an_item_is_what_save_writes():
    tensor, stream = torch.randn(5000), io.BytesIO()
    item, = encode_items([tensor], Config())
    ds_nvcomp.save(tensor, stream)
    assert item.getvalue() == stream.getvalue()


# ---------------------------------------------------------------------------------------------------------------------- items, later
def content(item):
    return torch.load(io.BytesIO(item.getbuffer()), weights_only=True)


def test_items_are_what_was_there_when_they_were_encoded():
    large, small = torch.randn(9000), torch.arange(7.0)
    before = large.clone(), small.clone()
    items = encode_items([large, small], Config())
    large.zero_()
    small.zero_()
    assert all(torch.equal(content(item), tensor) for item, tensor in zip(items, before))


@pytest.mark.parametrize("codec", ["deflate", "none"])
def test_items_keep_no_memory_of_tensors(codec):
    """Megatron's precision-aware optimizer makes fp32 copies of its states for a save: they must not stay until all is written."""
    tensor = torch.randn(9000)
    storage = StorageWeakRef(tensor.untyped_storage())
    item, = encode_items([tensor], Config(codec=codec))
    del tensor
    deadline = time.monotonic() + 10
    while not storage.expired():  # a thread of the encoder may not have come round to forgetting it
        assert time.monotonic() < deadline
        time.sleep(0.01)
    content(item)


def test_items_of_one_storage():
    """One of them without elements: it has no span to refer to."""
    flat = torch.randn(20_000)
    tensors = [flat[:9000], flat[9000:], flat[5:5], flat.view(100, 200)[3:7, 11:50]]
    items = encode_items(tensors, Config(), ["a", "b", "c", "d"])
    assert all(torch.equal(content(item), tensor) for item, tensor in zip(items, tensors))


def test_items_that_torch_pickles_by_other_means():
    file = io.BytesIO()
    state = {"sparse": torch.eye(300).to_sparse(), "storage": torch.randn(20_000).untyped_storage(), "dense": torch.randn(20_000)}
    torch.save(state, file)
    item, = encode_items([file], Config())
    assert isinstance(item, Item)
    found = torch.load(io.BytesIO(item.getbuffer()), weights_only=False)
    assert torch.equal(found["sparse"].to_dense(), torch.eye(300)) and torch.equal(found["dense"], state["dense"])
    assert bytes(found["storage"]) == bytes(state["storage"])


@pytest.mark.parametrize("tensor", [
    torch.randn(5000), torch.randn(3, 4000).t(), torch.randn(9000)[17:8000:3], torch.randn(4000).bfloat16(), torch.tensor(3.0),
    torch.randn(2000, dtype=torch.complex64), torch.randn(2000, dtype=torch.complex64).conj(), torch.arange(5000), torch.randn(5000) > 0,
    torch.randn(5000).to(torch.float8_e4m3fn), torch.randn(2000, dtype=torch.complex64).conj().imag, torch.randn(0, 3),
    torch.nn.Parameter(torch.randn(5000)), torch.randn(70, 70, requires_grad=True)], ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.dtype}")
@pytest.mark.parametrize("min_bytes", [0, 4096])
def test_items_are_what_save_writes(tensor, min_bytes):
    """Most are made without pickling; not a byte may tell."""
    file, tensor = io.BytesIO(), tensor.detach()
    ds_nvcomp.save(tensor, file, Config(min_bytes=min_bytes))
    item, = encode_items([tensor], Config(min_bytes=min_bytes))
    assert item.getvalue() == file.getvalue()


@pytest.mark.parametrize("state", [{"n": 3}, {"empty": torch.empty(0, 5), "t": torch.randn(5000)}, {"a": 1, "t": torch.randn(5000), "z": "z"}, {}])
def test_items_without_bytes(tmp_path, state):
    """torchtitan's sync save begins with one: it was an IndexError."""
    dcp.save(state, storage_writer=NvcompWriter(tmp_path), no_dist=True)
    found = {name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for name, value in state.items()}
    dcp.load(found, storage_reader=NvcompReader(tmp_path), no_dist=True)
    assert all(torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value for name, value in state.items())


def test_an_item_is_no_difference_from_weights_elsewhere(tmp_path):
    """A linked storage is for files that lie beside the one it is linked to; read as an item it would be other numbers."""
    master = torch.randn(9000)
    weights = Weights(master.bfloat16().view(torch.uint8), "bfloat16")
    write(master, tmp_path / "item", Config(), root="item", links={master.data_ptr(): Link(weights, "m.pt", [("module.w", 0, 9000)])})
    size = os.path.getsize(tmp_path / "item")
    mapped = torch.UntypedStorage.from_file(str(tmp_path / "item"), False, size)
    with pytest.raises(LinkError, match="An item of a distributed checkpoint has no file beside it"):
        load_part(tmp_path / "item", mapped, 0, size, "cpu", (0,), (9000,))
