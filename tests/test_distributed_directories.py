"""Directories of torch.distributed.checkpoint, and Megatron's: inspect, verify, pack and unpack know what is in them."""
import io
import json
import os
import pickle
import shutil
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta,
                                                   TensorProperties, TensorStorageMetadata)

import ds_nvcomp
from ds_nvcomp.archive.records import Records, is_torch_zip
from ds_nvcomp.checkpoint import repack
from ds_nvcomp.checkpoint.compare import assert_same
from ds_nvcomp.checkpoint.convert import pack, unpack
from ds_nvcomp.checkpoint.distributed import faults, is_distributed, leftovers, read_items, scan_directory
from ds_nvcomp.checkpoint.verify import Tally, sizes, verify
from ds_nvcomp.dcp import NvcompWriter
from ds_nvcomp.errors import ArchiveError, ChecksumError, DirectoryError, FormatError, TruncatedError
from test_cli import assert_one_clean_error, run
from test_scan import Hostile

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FAST = {"fsync": False}


@dataclass
class Scheduler:
    """What becomes bytes in a checkpoint, and has a tensor."""
    rates: torch.Tensor
    step: int


def state():
    torch.manual_seed(0)
    bits = torch.randint(-2**31, 2**31 - 1, (20_000,), dtype=torch.int32).view(torch.float32)
    return {
        "model": {"w": torch.randn(200, 300), "half": torch.randn(30_000).bfloat16(), "fp16": torch.randn(9_000).half(),
                  "fp8": torch.randn(20_000).to(torch.float8_e4m3fn), "bits": bits, "column": torch.randn(300, 90).t()},
        "sq": torch.rand(40_000) * 1e-9, "zeros": torch.zeros(50_000), "ints": torch.arange(10_000),
        "flags": torch.ones(7, dtype=torch.bool), "complex": torch.randn(3_000, dtype=torch.complex64),
        "scalar": torch.tensor(-0.0), "empty": torch.empty(0, 3),
        "step": 3, "scheduler": Scheduler(torch.randn(30_000), 7), "groups": [{"lr": 1e-3}],
    }


def save(directory, content=None, writer=FileSystemWriter, **options):
    dcp.save(content or state(), storage_writer=writer(directory, sync_files=False, **options), no_dist=True)
    return directory


def load(directory):
    """What stock dcp.load gives."""
    found = state()
    for value in (*found["model"].values(), *found.values()):
        if isinstance(value, torch.Tensor):
            value.zero_()
    found |= {"step": None, "scheduler": None, "groups": [{"lr": None}]}
    dcp.load(found, storage_reader=FileSystemReader(directory), no_dist=True)
    return found


@pytest.fixture
def plain(tmp_path):
    return save(tmp_path / "plain", thread_count=2)


@pytest.fixture
def packed(tmp_path):
    return save(tmp_path / "packed", writer=NvcompWriter, thread_count=2)


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def by_hand(directory, tensors, write=torch.save, rank=None):
    """A directory of sharded tensors, {fqn: [(offsets, chunk)]}, a file for the chunks at each place in the lists."""
    directory.mkdir(exist_ok=True)
    announced, storage = {}, {}
    for fqn, chunks in tensors.items():
        sizes = [ChunkStorageMetadata(torch.Size(offsets), chunk.shape) for offsets, chunk in chunks]
        whole = torch.Size(max(chunk.offsets[dim] + chunk.sizes[dim] for chunk in sizes) for dim in range(chunks[0][1].dim()))
        announced[fqn] = TensorStorageMetadata(TensorProperties(dtype=chunks[0][1].dtype), whole, sizes)
        for number, (offsets, chunk) in enumerate(chunks):
            name = f"__{number if rank is None else rank}_0.distcp"
            with open(directory / name, "ab") as file:
                start = file.tell()
                write(chunk, file)
                storage[MetadataIndex(fqn, offsets, number)] = _StorageInfo(name, start, file.tell() - start)
    metadata = Metadata(announced, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")
    write_metadata(directory, metadata, ".metadata" if rank is None else f"__{rank}.metadata")
    return directory


def sharded(directory, write=torch.save):
    w = torch.arange(80_000, dtype=torch.float32).view(400, 200).sin()
    tensors = {"w": [((0, 0), w[:300].clone()), ((300, 0), w[300:].clone())], "b": [((0,), torch.randn(20_000).bfloat16())]}
    return by_hand(directory, tensors, write), w


def read_metadata(directory, name=".metadata"):
    with open(directory / name, "rb") as file:
        return pickle.load(file)


def write_metadata(directory, metadata, name=".metadata"):
    with open(directory / name, "wb") as file:
        pickle.dump(metadata, file)


def edit(directory, change):
    metadata = read_metadata(directory)
    change(metadata)
    write_metadata(directory, metadata)


def item_of(directory, name):
    return next(item for item in read_items(directory).items if item.name == name)


def kinds(problems):
    return {problem.kind for problem in problems}


# --- Reading ---

def test_items_are_what_torch_has_written(plain):
    listing = read_items(plain)
    said = {(index.fqn, index.offset and tuple(index.offset)): info for index, info in read_metadata(plain).storage_data.items()}
    assert {(item.fqn, item.offsets): (item.file, item.start, item.length) for item in listing.items} == \
        {(fqn, () if offsets == torch.Size() else offsets): (info.relative_path, info.offset, info.length)
         for (fqn, offsets), info in said.items()}
    assert not listing.nowhere and not list(faults(listing)) and not list(leftovers(listing))
    w = item_of(plain, "model.w")
    assert (w.shape, w.dtype, w.offsets) == ((200, 300), "float32", (0, 0)) and item_of(plain, "step").offsets is None
    assert is_distributed(plain) and not is_distributed(plain.parent)


def test_a_zip_in_a_file(tmp_path):
    path = tmp_path / "x"
    zipped = io.BytesIO()
    ds_nvcomp.save({"a": torch.randn(20_000)}, zipped)
    path.write_bytes(b"before" + zipped.getvalue() + b"behind")
    length = len(zipped.getvalue())
    assert is_torch_zip(path, 6, length) and not is_torch_zip(path) and not is_torch_zip(path, 5, length)
    with Records(path, start=6, length=length) as records:
        assert records.bytes == length and records.read(records.records["byteorder"], 0, 6) == b"little"
    for start, size in ((5, length), (6, length - 1), (6, length + 1), (7, length), (0, length + 12), (6, 0)):
        with pytest.raises(FormatError):
            Records(path, start=start, length=size)
    for start, size in ((6, length + 7), (1 << 62, 1 << 62)):
        with pytest.raises(TruncatedError, match="cut off"):
            Records(path, start=start, length=size)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_a_row_for_each_tensor(kind, request):
    directory = request.getfixturevalue(kind)
    scan = scan_directory(directory)
    rows = {row.name: row for row in scan.rows}
    assert set(rows) == {"model.w", "model.half", "model.fp16", "model.fp8", "model.bits", "model.column", "sq", "zeros", "ints", "flags",
                         "complex", "scalar", "empty", "scheduler.rates"}
    assert (rows["model.w"].dtype, rows["model.w"].shape, rows["model.w"].raw_bytes) == ("float32", (200, 300), 240_000)
    assert scan.compressed == (kind == "packed") and rows["model.half"].storage.compressed == scan.compressed
    assert scan.bytes == sum(path.stat().st_size for path in directory.iterdir())
    assert [item.fqn for item, row in zip(scan.items, scan.rows) if row.name == "scheduler.rates"] == ["scheduler"]


def test_chunks_are_told_apart(tmp_path):
    directory, _ = sharded(tmp_path / "x")
    assert {row.name: row.shape for row in scan_directory(directory).rows} == {"w[0,0]": (300, 200), "w[300,0]": (100, 200), "b": (20_000,)}


def test_metadata_of_each_rank(tmp_path):
    for rank in (0, 1):
        by_hand(tmp_path / "x", {"w": [((rank * 100,), torch.randn(100))], "same": [((0,), torch.randn(9_000))]}, rank=rank)
    names = {row.name for row in scan_directory(tmp_path / "x").rows}
    assert names == {"w[0] (rank 0)", "w[100] (rank 1)", "same (rank 0)", "same (rank 1)"}
    assert verify(tmp_path / "x") == []
    pack(tmp_path / "x", None, FAST)
    assert verify(tmp_path / "x", decode=True) == [] and scan_directory(tmp_path / "x").compressed


# --- Verifying ---

@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_whole_directories_have_no_problems(kind, decode, request):
    directory, tally, read = request.getfixturevalue(kind), Tally(), []
    assert verify(directory, decode=decode, tally=tally, progress=read.append) == []
    assert (tally.files, tally.tensors, tally.opaque) == (2, 14, [])
    assert tally.compressed == (11 if kind == "packed" else 0)
    assert tally.bytes == sizes(directory) == sum(path.stat().st_size for path in directory.glob("*.distcp"))
    assert 0.8 * tally.bytes < sum(read) <= tally.bytes


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_a_flipped_bit_is_reported_with_its_tensor(kind, request):
    directory = request.getfixturevalue(kind)
    for item in read_items(directory).items:
        path = directory / item.file
        whole = path.read_bytes()
        data = bytearray(whole)
        middle = item.start + item.length // 2 if item.length > 10_000 else item.start + 1
        for at in (middle, item.start + 1, item.end - 22):
            data[at] ^= 4
            path.write_bytes(data)
            found = verify(directory)
            assert found and all(p.tensor.startswith(item.name) and p.path == str(path) for p in found), (item, at)
            assert at != middle or item.length < 10_000 or "ChecksumError" in kinds(found)
            data[at] ^= 4
        path.write_bytes(whole)
    assert verify(directory) == []


def test_a_chunk_is_named(packed):
    item = item_of(packed, "model.w")
    data = bytearray((packed / item.file).read_bytes())
    data[item.start + item.length // 2] ^= 1
    (packed / item.file).write_bytes(data)
    assert ("model.w", 0) in {(problem.tensor, problem.chunk) for problem in verify(packed)}
    assert "tensor model.w, chunk 0" in run("verify", packed).stdout and run("verify", packed).exit_code == 1


def test_flips_that_are_not_reported_do_not_matter(tmp_path):
    """Each bit of all headers, sampled: reported, or dcp.load gives the same."""
    directory = save(tmp_path / "x", {"w": torch.arange(3_000).sin()}, NvcompWriter)
    item, = read_items(directory).items
    whole, unreported = (directory / item.file).read_bytes(), 0
    for i, at in enumerate([*range(0, 400, 3), *range(len(whole) - 1200, len(whole), 3)]):
        data = bytearray(whole)
        data[at] ^= 1 << i % 8
        (directory / item.file).write_bytes(data)
        if not verify(directory):
            unreported += 1
            target = {"w": torch.zeros(3_000)}
            dcp.load(target, storage_reader=FileSystemReader(directory), no_dist=True)
            assert torch.equal(target["w"], torch.arange(3_000).sin()), at
    assert unreported < 250


@pytest.mark.parametrize("missing", [1, 1000])
def test_a_file_that_is_cut_short(packed, missing):
    last = max((item for item in read_items(packed).items if item.file == "__0_0.distcp"), key=lambda item: item.end)
    path = packed / last.file
    os.truncate(path, path.stat().st_size - missing)
    found = verify(packed)
    assert [(p.tensor, p.kind, p.path) for p in found] == [(last.name, "TruncatedError", str(path))]
    with pytest.raises(TruncatedError, match="cut off"):
        scan_directory(packed)
    with pytest.raises(TruncatedError):
        pack(packed, None, FAST)


def test_a_file_that_is_missing(packed):
    items = [item.name for item in read_items(packed).items if item.file == "__0_1.distcp"]
    (packed / "__0_1.distcp").unlink()
    found = verify(packed)
    assert sorted(p.tensor for p in found) == sorted(items) and kinds(found) == {"DirectoryError"}
    for path in packed.glob("*.distcp"):
        path.unlink()
    assert len(verify(packed)) == len(read_items(packed).items)
    assert_one_clean_error(run("inspect", packed))


def test_a_save_that_did_not_finish(packed):
    (packed / ".metadata").unlink()
    problem, = verify(packed)
    assert problem.kind == "DirectoryError" and "did not finish" in problem.message
    assert run("verify", packed).exit_code == 1
    assert_one_clean_error(run("inspect", packed))
    with pytest.raises(DirectoryError, match="did not finish"):
        pack(packed, None, FAST)


def test_bytes_that_are_no_items(packed):
    with open(packed / "__0_0.distcp", "ab") as file:
        file.write(b"more")
    (packed / "__7_0.distcp").write_bytes(b"of another save")
    (packed / "__8_0.distcp").write_bytes(b"")
    problems = {os.path.basename(p.path): p for p in verify(packed)}
    assert set(problems) == {"__0_0.distcp", "__7_0.distcp"}
    assert "4 bytes" in problems["__0_0.distcp"].message and "15 bytes" in problems["__7_0.distcp"].message
    edit(packed, lambda metadata: metadata.storage_data.pop(next(i for i in metadata.storage_data if i.fqn == "model.w")))
    found = [p for p in verify(packed) if p.tensor == "model.w"]
    assert len(found) == 1 and "stored nowhere" in found[0].message
    assert not [p for p in verify(packed) if p.kind == "ChecksumError"]


def test_items_of_two_saves_that_were_mixed(plain):
    def change(metadata):
        w, sq = (next(i for i in metadata.storage_data if i.fqn == fqn) for fqn in ("model.w", "zeros"))
        metadata.storage_data[w], metadata.storage_data[sq] = metadata.storage_data[sq], metadata.storage_data[w]

    edit(plain, change)
    assert {(p.tensor, p.kind) for p in verify(plain)} == {("model.w", "ArchiveError"), ("zeros", "ArchiveError")}


# --- Metadata from strangers ---

def first_info(metadata):
    return metadata.storage_data[next(i for i in metadata.storage_data if i.fqn == "model.w")]


@pytest.mark.parametrize("path", ["../x.distcp", "/etc/passwd", "a/../../x", "", ".", "x\0y", 7, None, "x" * 5000, b"__0_0.distcp",
                                  ("..", "x")])
def test_paths_that_lead_elsewhere(plain, path):
    edit(plain, lambda metadata: setattr(first_info(metadata), "relative_path", path))
    assert [(p.kind, p.tensor) for p in verify(plain)] == [("ArchiveError", "model.w")]
    with pytest.raises(ArchiveError, match="below the directory"):
        pack(plain, None, FAST)


@pytest.mark.parametrize("field", ["offset", "length"])
@pytest.mark.parametrize("value", [-1, 1 << 63, 1 << 5000, 1.5, None, True, "7", [1]])
def test_numbers_that_are_none(plain, field, value):
    edit(plain, lambda metadata: setattr(first_info(metadata), field, value))
    assert [(p.kind, p.tensor) for p in verify(plain)] == [("ArchiveError", "model.w")]


@pytest.mark.parametrize("change,kind", [
    (dict(offset=(1 << 63) - 1), "TruncatedError"), (dict(length=(1 << 63) - 1), "TruncatedError"),
    (dict(length=1 << 40), "TruncatedError"),
    (dict(relative_path="no.distcp"), "DirectoryError"), (dict(relative_path=".metadata"), "TruncatedError"),
    (dict(length=0), "ArchiveError"), (dict(length=3), "ArchiveError")])
def test_ranges_that_do_not_fit(plain, change, kind):
    edit(plain, lambda metadata: vars(first_info(metadata)).update(change))
    assert (kind, "model.w") in {(p.kind, p.tensor) for p in verify(plain)}
    with pytest.raises((FormatError, DirectoryError)):
        scan_directory(plain)
    before = contents(plain)
    with pytest.raises((FormatError, DirectoryError)):
        pack(plain, None, FAST)
    assert contents(plain) == before and os.listdir(plain.parent) == ["plain"]


def test_items_that_overlap(plain):
    def change(metadata):
        infos = [info for info in metadata.storage_data.values() if info.relative_path == "__0_0.distcp"]
        second = sorted(infos, key=lambda info: info.offset)[1]
        second.offset -= 1
        second.length += 1

    edit(plain, change)
    assert [p.kind for p in verify(plain) if "overlap" in p.message] == ["ArchiveError"]
    with pytest.raises(ArchiveError, match="overlap"):
        pack(plain, None, FAST)


def test_one_item_over_a_whole_file_hides_nothing(plain):
    """An item that reaches too far is reported itself, and not all the others with it."""
    edit(plain, lambda metadata: vars(first_info(metadata)).update(offset=0, length=1 << 50))
    assert {p.tensor for p in verify(plain) if p.kind == "TruncatedError"} == {"model.w"} and not any(
        "overlap" in p.message for p in verify(plain))


@pytest.mark.parametrize("data", [
    b"", b"\x80\x04.", b"not a pickle", pickle.dumps({}), pickle.dumps(Metadata({})), pickle.dumps(Metadata({}, storage_data=[1])),
    pickle.dumps(Metadata(None, storage_data={})), pickle.dumps(Metadata({}, storage_data={"w": 1})),
    pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): None})),
    pickle.dumps(Metadata({}, storage_data={1: _StorageInfo("x", 0, 1)})),
    pickle.dumps(Metadata({}, storage_data={MetadataIndex(7): _StorageInfo("x", 0, 1)})),
    pickle.dumps(Metadata({"w": TensorStorageMetadata(None, None, None)}, storage_data={})),
    pickle.dumps(Metadata({"w": TensorStorageMetadata(None, None, [7])}, storage_data={})),
    pickle.dumps(Metadata({"w": TensorStorageMetadata(None, None, [ChunkStorageMetadata(None, "x")])}, storage_data={})),
    pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("x", 0, 1, ["a"] * 1000)})),
    pickle.dumps(Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("x", 0, 1, [7])})),
    pickle.dumps(Metadata({7: BytesStorageMetadata()}, storage_data={}))])
def test_metadata_that_are_none(plain, data):
    (plain / ".metadata").write_bytes(data)
    problem, = verify(plain)
    assert problem.kind == "ArchiveError" and problem.path == str(plain / ".metadata")
    for command in ("inspect", "pack", "unpack"):
        assert_one_clean_error(run(command, plain))


def test_metadata_are_not_executed(plain, tmp_path):
    marker = tmp_path / "marker"
    edit(plain, lambda metadata: setattr(metadata, "planner_data", Hostile(marker)))
    assert verify(plain) == [] and run("inspect", plain).exit_code == 0 and not marker.exists()


def test_metadata_cut_anywhere(packed):
    whole = (packed / ".metadata").read_bytes()
    for at in range(0, len(whole), 7):
        (packed / ".metadata").write_bytes(whole[:at])
        assert kinds(verify(packed)) == {"ArchiveError"}


def test_any_flipped_bit_in_metadata_ends_in_order(packed):
    """It has no checksum; but nothing that verify, inspect or a reader meets is anything but an error or what was saved."""
    whole = (packed / ".metadata").read_bytes()
    for i, at in enumerate(range(0, len(whole), 19)):
        data = bytearray(whole)
        data[at] ^= 1 << i % 8
        (packed / ".metadata").write_bytes(data)
        verify(packed)
        try:
            scan_directory(packed)
        except (FormatError, DirectoryError):
            pass


def test_lists_that_are_met_many_times_cost_little(tmp_path):
    """Small pickles that describe much by memo."""
    many = [ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(3_000)]
    shared = TensorStorageMetadata(TensorProperties(), torch.Size([3_000]), many)
    fat = _StorageInfo("x", 0, 1)
    vars(fat).update({f"field{i}": i for i in range(20_000)})
    for metadata in (Metadata({f"w{i}": shared for i in range(5_000)}, storage_data={}),
                     Metadata({}, storage_data={MetadataIndex(f"w{i}"): fat for i in range(5_000)}),
                     Metadata({}, storage_data={MetadataIndex("w" * 100_000, [i]): _StorageInfo("x", 0, 1) for i in range(5_000)})):
        write_metadata(tmp_path, metadata)
        began = time.perf_counter()
        assert kinds(verify(tmp_path)) == {"ArchiveError"}
        assert time.perf_counter() - began < 20


def test_the_same_item_twice(plain):
    def change(metadata):
        index = next(i for i in metadata.storage_data if i.fqn == "model.w")
        twin = MetadataIndex("model.w")
        metadata.storage_data[twin] = metadata.storage_data[index]
        object.__setattr__(twin, "offset", index.offset)

    edit(plain, change)
    problem, = verify(plain)
    assert problem.kind == "ArchiveError" and "twice" in problem.message and problem.tensor == "model.w"


# --- Others' items ---

class Xor(StreamTransformExtension):
    """Stands for any transform of streams."""

    @staticmethod
    def registry_name():
        return "test.xor"

    @staticmethod
    def from_descriptor(version):
        return Xor()

    def get_descriptor(self):
        return "test.xor/1"

    def transform_to(self, output):
        class Writer(io.RawIOBase):
            def writable(self):
                return True

            def write(self, data):
                output.write(bytes(byte ^ 0x55 for byte in bytes(data)))
                return len(data)
        return Writer()

    def transform_from(self, stream):
        return io.BytesIO(bytes(byte ^ 0x55 for byte in stream.read()))


def test_items_that_others_have_transformed(tmp_path):
    content = {"w": torch.randn(3_000), "n": 3}
    directory = save(tmp_path / "x", content, _extensions=[Xor()])
    tally = Tally()
    assert verify(directory, tally=tally) == [] and len(tally.opaque) == 2 and "test.xor/1" in tally.opaque[0]
    row = next(row for row in scan_directory(directory).rows if row.name == "w")
    assert (row.dtype, row.shape, row.raw_bytes, row.storage.compressed) == ("float32", (3_000,), 12_000, False)
    assert "by test.xor/1" in run("inspect", directory).stdout and "note: 2 items without checksums" in run("verify", directory).stderr
    before = contents(directory)
    assert pack(directory, None, FAST).converted == [] and contents(directory) == before


def test_bytes_that_are_no_zip(tmp_path):
    directory, _ = sharded(tmp_path / "x")
    with open(directory / "__0_0.distcp", "ab") as file:
        start = file.tell()
        file.write(b"anything")

    def change(metadata):
        metadata.state_dict_metadata["blob"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("blob")] = _StorageInfo("__0_0.distcp", start, 8)

    edit(directory, change)
    tally = Tally()
    assert verify(directory, tally=tally) == [] and tally.opaque == [f"{directory}/__0_0.distcp: blob"]
    assert any("bytes as they were given" in line for line in run("inspect", directory).stdout.splitlines() if line.startswith("blob"))
    pack(directory, None, FAST)
    item = item_of(directory, "blob")
    assert (directory / item.file).read_bytes()[item.start:item.end] == b"anything" and verify(directory) == []


# --- Packing ---

@pytest.mark.parametrize("in_place", [True, False])
def test_pack_and_unpack(plain, in_place):
    before, expected = contents(plain), state()
    (plain / ".metadata").chmod(0o640)
    os.utime(plain / "__0_0.distcp", ns=(1_600_000_000_123456789,) * 2)
    dst = None if in_place else plain.with_name("small")
    report = pack(plain, dst, FAST)
    small = dst or plain
    assert sorted(report.converted) == ["__0_0.distcp", "__0_1.distcp"] and report.bytes_after < report.bytes_before
    assert report.bytes_after == sum(map(len, contents(small).values()))
    assert (small / "__0_0.distcp").stat().st_mtime_ns == 1_600_000_000_123456789 and (small / ".metadata").stat().st_mode & 0o777 == 0o640
    assert verify(small, decode=True) == []
    rows = {row.name: row.storage for row in scan_directory(small).rows}
    assert all(rows[name].compressed for name in ("model.w", "model.bits", "model.half", "scheduler.rates", "zeros"))
    assert not rows["flags"].compressed
    assert_same(expected, load(small), path="packed")
    if not in_place:
        assert contents(plain) == before

    dst = None if in_place else plain.with_name("again")
    assert sorted(unpack(small, dst, fsync=False).converted) == ["__0_0.distcp", "__0_1.distcp"]
    again = dst or small
    assert contents(again) == before  # torch's own bytes, and the same places
    assert not scan_directory(again).compressed
    assert_same(expected, load(again), path="unpacked")
    assert not [path.name for path in plain.parent.iterdir() if path.name.startswith(".")]


def test_what_training_has_compressed_is_unpacked(packed):
    assert_same(state(), load(packed), path="written")
    unpack(packed, fsync=False)
    assert not scan_directory(packed).compressed and verify(packed) == []
    assert not [name for name in scan_directory(packed).globals if name.startswith("ds_nvcomp")], "seals of small objects and tensors"
    assert b"ds_nvcomp" not in b"".join(contents(packed).values())
    assert_same(state(), load(packed), path="unpacked")
    assert run("unpack", packed).exit_code == 0


def test_another_codec(packed):
    pack(packed, None, {"codec": "zstd", **FAST})
    assert {s.encoding.codec.name for s in scan_directory(packed).storages if s.encoding} == {"zstd"}
    assert_same(state(), load(packed), path="")


def test_sharded_tensors(tmp_path):
    directory, w = sharded(tmp_path / "x")
    before = contents(directory)
    pack(directory, None, FAST)
    assert {row.name: row.storage.compressed for row in scan_directory(directory).rows} == {"w[0,0]": True, "w[300,0]": True, "b": True}
    found = {"w": torch.zeros(400, 200)}
    dcp.load(found, storage_reader=FileSystemReader(directory), no_dist=True)
    assert torch.equal(found["w"], w)
    unpack(directory, fsync=False)
    assert contents(directory) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_links_are_refused(plain, name):
    (plain / name).rename(plain.parent / "elsewhere")
    (plain / name).symlink_to(plain.parent / "elsewhere")
    assert verify(plain) == []
    with pytest.raises(DirectoryError, match="link"):
        pack(plain, None, FAST)


@pytest.mark.parametrize("seed", range(6))
def test_any_directory_comes_back_bit_for_bit(tmp_path, seed):
    random = torch.Generator().manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.float8_e5m2]

    def tensor():
        size = int(torch.randint(0, 30_000, (1,), generator=random))
        dtype = dtypes[int(torch.randint(0, len(dtypes), (1,), generator=random))]
        return torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=random).view(dtype) if seed % 2 else \
            torch.randn(size, generator=random).to(dtype)

    directory = by_hand(tmp_path / "x", {f"w{i}": [((0,), tensor())] for i in range(8)})
    (directory / "notes.txt").write_text("kept")
    with open(directory / "__0_0.distcp", "ab") as file:
        file.write(b"no item's")
    before = contents(directory)
    pack(directory, None, FAST)
    assert (directory / "__0_0.distcp").read_bytes().endswith(b"no item's")
    assert not [problem for problem in verify(directory) if "belong to no item" not in problem.message]
    unpack(directory, fsync=False)
    assert contents(directory) == before


def test_progress_adds_up(plain):
    told = []

    class Listener(repack.Progress):
        def total(self, stored_bytes):
            told.append(stored_bytes)

        def advance(self, stored_bytes):
            told.append(stored_bytes)

    expected = sum(path.stat().st_size for path in plain.glob("*.distcp"))
    pack(plain, None, FAST, progress=Listener())
    assert told[0] == sum(told[1:]) == expected


def test_nothing_to_do_copies(tmp_path):
    directory = save(tmp_path / "x", {"n": 1, "small": torch.arange(3)})
    before = contents(directory)
    assert pack(directory, None, FAST).converted == [] and unpack(directory, fsync=False).converted == [] and contents(directory) == before


def test_what_does_not_shrink_stays(tmp_path):
    noise = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8)
    directory = save(tmp_path / "x", {"noise": noise})
    before = contents(directory)
    assert pack(directory, None, FAST).converted == [] and contents(directory)["__0_0.distcp"] == before["__0_0.distcp"]


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_damage_does_not_get_new_checksums(kind, request):
    directory = request.getfixturevalue(kind)
    item = item_of(directory, "model.w")
    data = bytearray((directory / item.file).read_bytes())
    data[item.start + item.length // 2] ^= 1
    (directory / item.file).write_bytes(data)
    before = contents(directory)
    with pytest.raises(ChecksumError) as caught:
        (pack if kind == "plain" else unpack)(directory)
    assert caught.value.tensor == "model.w" and caught.value.path == str(directory / item.file)
    assert contents(directory) == before and os.listdir(directory.parent) == [kind]


def test_what_is_written_wrong_is_found(plain, monkeypatch):
    before = contents(plain)
    monkeypatch.setattr(repack.Repacking, "_metadata", lambda self, name, target: shutil.copy(self.listing.directory / name, target))
    with pytest.raises(ChecksumError, match="other items"):
        pack(plain, None, FAST)
    assert contents(plain) == before and os.listdir(plain.parent) == ["plain"]


def test_an_item_written_wrong_is_found(plain, monkeypatch):
    real = ds_nvcomp.archive.save
    monkeypatch.setattr(ds_nvcomp.archive, "save", lambda obj, f, *a, **k: real(
        obj * 2 if isinstance(obj, torch.Tensor) and obj.dtype is torch.float32 else obj, f, *a, **k))
    before = contents(plain)
    with pytest.raises(ChecksumError, match="differs"):
        pack(plain, None, FAST)
    assert contents(plain) == before


def test_a_module_that_is_not_here(plain):
    data = (plain / ".metadata").read_bytes()
    assert b"\x8c\x07pathlib" in data
    (plain / ".metadata").write_bytes(data.replace(b"\x8c\x07pathlib", b"\x8c\x07pathlab"))
    assert verify(plain) == []
    with pytest.raises(ArchiveError, match="needs the module 'pathlab'"):
        pack(plain, None, FAST)


def test_parts_are_refused_by_themselves(plain):
    for name in ("__0_0.distcp", ".metadata"):
        for command in ("inspect", "verify", "pack", "unpack"):
            result = run(command, plain / name)
            assert_one_clean_error(result)
            assert "Name the directory" in result.stderr


# --- Megatron ---

@pytest.fixture
def save_dir(tmp_path):
    """Megatron's: two iterations of torch_dist, as it lays them out."""
    root = tmp_path / "ckpt"
    for iteration in (10, 20):
        folder = root / f"iter_{iteration:07d}"
        folder.mkdir(parents=True)
        save(folder)
        torch.save({"args": {"lr": 0.1}, "iteration": iteration, "rng": torch.randn(20_000)}, folder / "common.pt")
        (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    (root / "latest_checkpointed_iteration.txt").write_text("20")
    return root


def test_a_save_dir(save_dir):
    before = contents(save_dir)
    tally = Tally()
    assert verify(save_dir, tally=tally) == [] and tally.files == 4
    report = pack(save_dir, None, FAST)
    assert report.converted == ["iter_0000010/__0_0.distcp", "iter_0000020/__0_0.distcp"]
    assert verify(save_dir, decode=True) == []
    after = contents(save_dir)
    assert all(after[name] == before[name] for name in before if name.endswith((".pt", ".json", ".txt")))
    assert_same(state(), load(save_dir / "iter_0000020"), path="")
    unpack(save_dir, fsync=False)
    assert contents(save_dir) == before
    assert len(pack(save_dir, None, FAST, all_files=True).converted) == 4 and len(unpack(save_dir, fsync=False).converted) == 4


@pytest.mark.parametrize("said,match", [("30", "no directory 'iter_0000030'"), ("", "found ''"), ("../x", "should have"),
                                        ("release", "'release'"), ("20\n", None), ("9" * 18, "no directory")])
def test_the_tracker(save_dir, said, match):
    (save_dir / "latest_checkpointed_iteration.txt").write_text(said)
    problems = verify(save_dir)
    assert [bool(match in p.message) for p in problems] == ([True] if match else [])


def test_the_tracker_and_a_format_that_is_unknown_here(save_dir):
    folder = save_dir / "iter_0000020"
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).unlink()
    assert len(verify(save_dir)) == 1
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert verify(save_dir) == []


def test_an_iteration_that_is_not_finished(save_dir):
    (save_dir / "iter_0000020" / ".metadata").unlink()
    problems = verify(save_dir)
    assert len(problems) == 2 and all("did not finish" in p.message for p in problems)
    assert {os.path.basename(p.path) for p in problems} == {"iter_0000020", "latest_checkpointed_iteration.txt"}
    report = pack(save_dir, None, FAST)
    assert report.converted == ["iter_0000010/__0_0.distcp"]


def legacy(root, names):
    for name in names:
        (root / "iter_0000005" / name).mkdir(parents=True)
        torch.save({"model": {"w": torch.randn(20_000)}}, root / "iter_0000005" / name / "model_optim_rng.pt")
        torch.save({0: {"exp_avg": torch.randn(20_000)}}, root / "iter_0000005" / name / "distrib_optim.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("5")
    return root


def test_legacy_directories(tmp_path):
    root = legacy(tmp_path / "x", ["mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"])
    assert verify(root) == []
    assert len(pack(root, None, FAST).converted) == 8 and verify(root, decode=True) == []
    assert len(unpack(root, fsync=False).converted) == 8


def test_legacy_ranks_that_are_missing(tmp_path):
    root = legacy(tmp_path / "x", ["mp_rank_00", "mp_rank_02"])
    problem, = verify(root)
    assert "none of 1" in problem.message
    (root / "iter_0000005" / "mp_rank_02" / "model_optim_rng.pt").unlink()
    assert any(p.path.endswith("mp_rank_02/model_optim_rng.pt") for p in verify(root))
    # Experts need not be at every tensor rank.
    assert verify(legacy(tmp_path / "y", ["mp_rank_00_000", "mp_rank_01_001"])) == []


# --- The command ---

def test_inspect_shows_tensors(packed, tmp_path):
    text = run("inspect", packed).stdout
    assert "model.w" in text and "200x300" in text and "deflate, split32" in text and "14 tensors" in text and "scheduler.rates" in text
    directory, _ = sharded(tmp_path / "s")
    assert "w[300,0]" in run("inspect", directory).stdout


def test_inspect_json(packed, save_dir):
    found = json.loads(run("inspect", packed, "--json").stdout)
    one, = found["files"]
    assert one["path"] == str(packed) and one["file_bytes"] == found["file_bytes"] and 0 < found["ratio"] < 1
    w = next(t for t in one["tensors"] if t["name"] == "model.w")
    item = item_of(packed, "model.w")
    assert (w["fqn"], w["chunk_offsets"], w["file"], w["item_offset"], w["codec"]) == ("model.w", [0, 0], item.file, item.start, "deflate")
    names = [os.path.relpath(f["path"], save_dir) for f in json.loads(run("inspect", save_dir, "--json").stdout)["files"]]
    assert names == ["iter_0000010", "iter_0000010/common.pt", "iter_0000020", "iter_0000020/common.pt"]
    text = run("inspect", save_dir / "iter_0000010").stdout
    assert "model.w" in text and "common.pt" in text


def test_verify_and_pack_from_the_command_line(plain):
    assert run("verify", plain).stdout.startswith("OK: 2 files")
    assert "Packed 2 files" in run("pack", plain, "--no-fsync").stdout
    assert json.loads(run("verify", plain, "--json").stdout)["ok"] is True
    assert "Unpacked 2 files" in run("unpack", plain).stdout
