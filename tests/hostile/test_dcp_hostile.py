"""Thousands of seeded corruptions of a DCP directory, each read by NvcompReader and by torch's FileSystemReader: refused with a known error
or bit-identical, none silent, none over 10 seconds, none ending the process, memory bounded.

`.metadata` is a pickle that torch trusts, and that has no checksum. With torch's files or ours, torch's reader gives other numbers where
damage leaves a pickle that says another place, of an item of the same shape, or another size. Behind our `.metadata` there is a checksum,
which NvcompReader and `verify` look at and torch does not notice; and NvcompReader holds an item's shape and kind of number against what
is said of it. What it cannot see is who exchanged the places of two items that are alike and made the checksum right: items do not say
whose they are. (An attacker's `.metadata` can run code in any case.)
"""
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import dcp_readers
from ds_nvcomp.checkpoint import metadata_seal
from ds_nvcomp.checkpoint.verify import verify
from ds_nvcomp.dcp import NvcompReader, NvcompWriter
from ds_nvcomp.errors import ChecksumError
from readers import ROOT

MEMORY = 160 << 10  # KiB that a process may grow by
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def corruptions(first: int, stop: int, batch: int, capsys) -> Counter:
    """{(kind, forged, reader, outcome): how often}. Batches run one after another; one that ends early fails the test."""
    counts, wrong, grew = Counter(), [], 0
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        folder = Path(folder)
        dcp_readers.write_directory(folder / "saved")
        while first < stop:
            end = min(first + batch, stop)
            path = os.pathsep.join(filter(None, [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
            done = subprocess.run([sys.executable, dcp_readers.__file__, str(folder), str(first), str(end)], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": path})
            results = folder / f"results-{first}"
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else [{}]
            assert not done.returncode, f"after {lines[-1]} the process ended with {done.returncode}: {done.stderr[-3000:]}"
            for line in lines:
                for reader, outcome in line.get("outcome", {}).items():
                    counts[line["kind"].partition(":")[0], line["forged"], reader, outcome.partition(" [")[0]] += 1
                    if outcome.split()[0] in ("SILENT", "UNEXPECTED"):
                        wrong.append(f"seed {line['seed']} ({line['kind']}): {reader}: {outcome}")
            grew = max(grew, lines[-1]["peak"] - lines[0]["before"])
            first = end
    with capsys.disabled():
        print(f"\n{sum(counts.values()) // 2} corruptions; memory grew by {grew >> 10} MiB")
        for forged in (False, True):
            for reader in dcp_readers.READERS:
                told = Counter()
                for (_, was, by, outcome), count in counts.items():
                    told[outcome.partition(":")[0] if outcome.startswith("refused") else outcome] += count * ((was, by) == (forged, reader))
                print(f"{'forged' if forged else 'accidental':10} {reader:8} " + ", ".join(f"{what} {n}" for what, n in told.items() if n))
    assert not wrong, "\n".join(wrong[:20])
    assert grew < MEMORY
    return counts


def test_a_few_hundred(capsys):
    counts = corruptions(0, 300, 300, capsys)
    assert sum(counts.values()) == 600


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_six_thousand(capsys):
    counts = corruptions(300, 6300, 1500, capsys)
    assert sum(counts.values()) == 12_000
    assert {kind for kind, *_ in counts} == set(dcp_readers.KINDS)


# --- what the corruptions found, and what is known of the metadata ------------------------------------------------------------

def alike(directory, writer=NvcompWriter):
    value = {"a": torch.randn(5000), "b": torch.randn(5000), "step": 1234, "ids": torch.arange(5000)}
    dcp.save(value, storage_writer=writer(directory), no_dist=True)
    return value


def load(reader, value):
    found = {key: torch.zeros_like(item) if isinstance(item, torch.Tensor) else None for key, item in value.items()}
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


def same(found, value):
    return all(torch.equal(found[key], item) if isinstance(item, torch.Tensor) else found[key] == item for key, item in value.items())


def change(directory, edit, seal):
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    edit({index.fqn: info for index, info in metadata.storage_data.items()}, metadata.state_dict_metadata)
    data = pickle.dumps(metadata)
    (directory / ".metadata").write_bytes(data + (metadata_seal.trailer(data) if seal else b""))


def exchange(x, y):
    def edit(infos, tensors):
        infos[x].offset, infos[x].length, infos[y].offset, infos[y].length = \
            infos[y].offset, infos[y].length, infos[x].offset, infos[x].length
    return edit


def test_every_byte_of_the_metadata_is_checked(tmp_path):
    """One flipped bit in each byte: torch's reader takes some of them for other metadata, ours none, and nothing is unpickled."""
    alike(tmp_path)
    whole = (tmp_path / ".metadata").read_bytes()
    reader = NvcompReader(tmp_path)
    for at in range(len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        (tmp_path / ".metadata").write_bytes(data)
        with pytest.raises(ChecksumError, match="checksum.*.metadata is damaged"):
            reader.read_metadata()
    assert {problem.kind for problem in verify(tmp_path)} == {"ChecksumError"}
    (tmp_path / ".metadata").write_bytes(whole)
    assert verify(tmp_path) == [] and reader.read_metadata().storage_data == FileSystemReader(tmp_path).read_metadata().storage_data


@pytest.mark.parametrize("cut", [1, 7, 20, 27, 29, 200])
def test_metadata_cut_short(tmp_path, cut):
    value = alike(tmp_path)
    os.truncate(tmp_path / ".metadata", (tmp_path / ".metadata").stat().st_size - cut)
    with pytest.raises(dcp.CheckpointException, match="metadata"):
        load(NvcompReader(tmp_path), value)


def test_metadata_without_a_checksum_are_read(tmp_path):
    """Torch's own, and what tools have pickled anew."""
    value = alike(tmp_path)
    change(tmp_path, lambda infos, tensors: None, seal=False)
    assert same(load(NvcompReader(tmp_path), value), value)


@pytest.mark.parametrize("writer", [FileSystemWriter, NvcompWriter])
def test_items_of_another_kind_in_the_place_of_one(tmp_path, writer):
    value = alike(tmp_path, writer)
    change(tmp_path, exchange("a", "ids"), seal=True)
    assert not same(load(FileSystemReader(tmp_path), value), value)  # int64 cast to float32 without a word
    with pytest.raises(dcp.CheckpointException, match="the metadata say torch"):
        load(NvcompReader(tmp_path), value)


@pytest.mark.parametrize("writer", [FileSystemWriter, NvcompWriter])
def test_items_that_are_alike_in_the_place_of_one_another(tmp_path, writer):
    """What neither reader can know: the forged metadata are all there is to say which is which."""
    value = alike(tmp_path, writer)
    change(tmp_path, exchange("a", "b"), seal=True)
    for reader in (FileSystemReader, NvcompReader):
        found = load(reader(tmp_path), value)
        assert torch.equal(found["a"], value["b"]) and torch.equal(found["b"], value["a"])


@pytest.mark.parametrize("writer", [FileSystemWriter, NvcompWriter])
def test_metadata_that_make_a_tensor_smaller(tmp_path, writer):
    value = alike(tmp_path, writer)

    def shrink(infos, tensors):
        tensors["a"].size = tensors["a"].chunks[0].sizes = torch.Size([4000])
    change(tmp_path, shrink, seal=True)
    value["a"] = value["a"][:4000]
    assert same(load(FileSystemReader(tmp_path), value), value)
    with pytest.raises(dcp.CheckpointException, match="is announced"):
        load(NvcompReader(tmp_path), value)


@pytest.mark.parametrize("writer", [FileSystemWriter, NvcompWriter])
def test_bits_of_small_objects(tmp_path, writer):
    """Torch reads a zip without a look at its checksums: a step of 1234 that torch's writer wrote becomes 1235. Ours seals it. NvcompReader
    checks both.
    """
    value = alike(tmp_path, writer)
    info = next(info for index, info in FileSystemReader(tmp_path).read_metadata().storage_data.items() if index.fqn == "step")
    path = tmp_path / info.relative_path
    whole = path.read_bytes()
    at = whole.index(pickle.dumps(1234, 2)[2:-1], info.offset)
    path.write_bytes(whole[:at + 1] + bytes([whole[at + 1] ^ 1]) + whole[at + 2:])
    if writer is FileSystemWriter:
        assert load(FileSystemReader(tmp_path), value)["step"] == 1235
    else:
        with pytest.raises(dcp.CheckpointException, match="with checksum"):
            load(FileSystemReader(tmp_path), value)
    with pytest.raises(dcp.CheckpointException, match="has checksum"):
        load(NvcompReader(tmp_path), value)


def test_objects_that_are_no_zip_are_left_to_the_planner(tmp_path):
    from ds_nvcomp.archive.part import check_records
    path = tmp_path / "x"
    path.write_bytes(b"not a zip")
    check_records(path, 2, 3)
    torch.save(1, stream := io.BytesIO())
    path.write_bytes(stream.getvalue())
    check_records(path, 0, len(stream.getvalue()))
