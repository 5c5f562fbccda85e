"""verify: every kind of damage is reported, all of it, and nothing that is whole."""
import os
import pickle
import zipfile

import pytest
import torch

import ds_nvcomp
from ds_nvcomp.archive.seal import read_seal, write_seal
from ds_nvcomp.checkpoint.compare import assert_same
from ds_nvcomp.checkpoint.verify import Tally, verify, verify_file, verify_tree
from ds_nvcomp.encoding import format
from ds_nvcomp.errors import DirectoryError, DsNvcompError
from test_scan import Hostile, rewrite, with_pickle


def content():
    torch.manual_seed(0)
    return {"w": torch.randn(150_000), "layers": [torch.randn(5_000).bfloat16(), torch.arange(3)],
            "sq": torch.rand(9_000) * 1e-9}


@pytest.fixture
def path(tmp_path):
    ds_nvcomp.save(content(), tmp_path / "x_states.pt")
    return tmp_path / "x_states.pt"


def kinds(problems):
    return {problem.kind for problem in problems}


def flip(path, *places):
    data = bytearray(path.read_bytes())
    for at in places:
        data[at] ^= 0x10
    path.write_bytes(data)


def record_start(path, name):
    with zipfile.ZipFile(path) as zipped:
        info = next(info for info in zipped.infolist() if info.filename.endswith(name))
        with open(path, "rb") as file:
            file.seek(info.header_offset + 26)
            sizes = file.read(4)
        return info.header_offset + 30 + int.from_bytes(sizes[:2], "little") + int.from_bytes(sizes[2:], "little"), info


@pytest.mark.parametrize("decode", [False, True])
def test_whole_files_have_no_problems(path, decode):
    plain = path.with_name("plain.pt")
    torch.save(content(), plain)
    tally, read = Tally(), []
    assert verify(path.parent, decode=decode, tally=tally, progress=read.append) == []
    assert (tally.files, tally.tensors, tally.compressed, tally.chunks) == (2, 8, 3, 5)
    assert tally.bytes == path.stat().st_size + plain.stat().st_size
    assert 0.9 * tally.bytes < sum(read) <= tally.bytes


@pytest.mark.parametrize("codec", ["deflate", "zstd", "none"])
def test_every_codec_that_runs_here(path, codec):
    ds_nvcomp.save(content(), path, {"codec": codec})
    assert verify_file(path, decode=True) == []


def test_damage_in_each_region_is_reported_with_its_place(path):
    start, info = record_start(path, "data/0")
    with open(path, "rb") as file:
        file.seek(start)
        header = format.parse_header(file.read(64), info.file_size)
    pickle_start, _ = record_start(path, "data.pkl")
    whole = path.read_bytes()
    regions = {
        "zip local header": (info.header_offset, "ArchiveError", None, None),
        "payload header": (start + 40, "HeaderError", "w", None),
        "chunk table": (start + 66, "TableError", "w", None),
        "first chunk": (start + header.data_start + 5, "ChecksumError", "w", 0),
        "last chunk": (start + info.file_size - 17, "ChecksumError", "w", 2),
        "uncompressed record": (record_start(path, "data/2")[0], "ChecksumError", "layers.1", None),
        "pickle": (pickle_start + 100, "ChecksumError", None, None),
        "version record": (record_start(path, "/version")[0], "ChecksumError", None, None),
        "zip directory": (whole.rindex(b"PK\1\2") + 16, "ArchiveError", None, None),
        "end of directory": (len(whole) - 22, "TruncatedError", None, None),
    }
    for region, (at, kind, tensor, chunk) in regions.items():
        path.write_bytes(whole)
        flip(path, at)
        found = verify_file(path)
        assert any((p.kind, p.chunk) == (kind, chunk) and tensor in (None, p.tensor) for p in found), (region, found)
        assert all(p.path == str(path) and p.message for p in found)


@pytest.mark.parametrize("save", [ds_nvcomp.save, torch.save])
def test_what_is_not_reported_does_not_matter(path, save):
    """A flipped bit is reported, or is one that torch does not use: dates, padding, attributes of the zip.

    All bits of both files were tried once; this is a sample. What was missed before the whole zip directory was checked: torch
    reads an entry that is marked as a directory as uninitialised memory, without an error.
    """
    small = {"w": torch.randn(3_000), "n": [1, torch.arange(4)]}
    save(small, path)
    whole = path.read_bytes()
    start, info = record_start(path, "data/0")
    headers = [at for at in range(len(whole)) if not start + 200 < at < start + info.file_size - 200]
    unreported = 0
    for i, at in enumerate(headers[::3]):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << i % 8
        path.write_bytes(damaged)
        if not verify_file(path):
            unreported += 1
            assert_same(small, torch.load(path, weights_only=False), path=str(at))
    assert unreported < len(headers) // 3 * 0.5


def test_an_entry_marked_as_a_directory(path):
    at = path.read_bytes().rindex(b"PK\1\2") + 38
    flip(path, at)
    assert kinds(verify_file(path)) == {"ArchiveError"}


def test_all_damage_is_reported_not_only_the_first(path):
    first, info = record_start(path, "data/0")
    other, _ = record_start(path, "data/2")
    flip(path, first + 5_000, first + info.file_size - 17, other)
    found = verify_file(path)
    assert [(p.tensor, p.chunk) for p in found if p.chunk is not None] == [("w", 0), ("w", 2)]
    assert "layers.1" in {p.tensor for p in found}


@pytest.mark.parametrize("size", [0, 10, 1_000, 100_000, -5_000, -22, -1])
def test_truncated_files(path, size):
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    assert kinds(verify_file(path)) & {"TruncatedError", "ArchiveError"}
    assert kinds(verify_tree(path.parent)) & {"TruncatedError", "ArchiveError"}


@pytest.mark.parametrize("name", ["data/0", "data.pkl", "w"])
def test_plain_files_are_verified_too(tmp_path, name):
    path = tmp_path / "plain.pt"
    torch.save(content(), path)
    assert verify_file(path) == []
    start, _ = record_start(path, name if name != "w" else "data/1")
    flip(path, start + 3)
    assert kinds(verify_file(path)) >= {"ChecksumError"}


def test_pickle_and_header_that_disagree(path):
    rewrite(path, lambda records: records.update({"data.pkl": records["data.pkl"].replace(b"float32", b"float64")}))
    found = [(p.kind, p.tensor) for p in verify_file(path)]
    assert [where for where in found if where[0] == "HeaderError"] == [("HeaderError", "w"), ("HeaderError", "sq")]


def test_a_stream_that_does_not_decode_is_found_by_decoding(path):
    """Checksums that are right, and a stream that is not: an encoder's fault, or somebody's who wrote the file to fool."""
    with zipfile.ZipFile(path) as zipped:
        payload = bytearray(zipped.read(next(name for name in zipped.namelist() if name.endswith("data/0"))))
    original = bytes(payload)
    header = format.parse_header(original[:64], len(payload))
    table = format.parse_table(bytes(payload[64:header.data_start]), header)
    at = header.data_start
    payload[at:at + 200] = b"\xff" * 200
    crc = table.crc.copy()
    crc[0] = zipfile.crc32(bytes(payload[at:at + int(table.chunk_bytes[0])]))
    payload[:header.data_start] = format.preamble(header, format.Table(crc, table.decoded, table.size, table.mode))
    old, new = (pickle.dumps(int.from_bytes(head[60:64], "little"), 2)[2:-1] for head in (original, payload))  # as the pickle has it

    def swap(records):
        assert records["data.pkl"].count(old) == 1
        records["data/0"], records["data.pkl"] = bytes(payload), records["data.pkl"].replace(old, new)
        seal = read_seal(records["ds_nvcomp/seal"])
        seal["data.pkl"] = len(records["data.pkl"]), zipfile.crc32(records["data.pkl"])
        records["ds_nvcomp/seal"] = write_seal(seal)

    rewrite(path, swap)
    assert verify_file(path) == []
    assert [(p.kind, p.tensor, p.chunk) for p in verify_file(path, decode=True)] == [("DecodeError", "w", 0)]


def test_a_hostile_pickle_does_not_run(tmp_path):
    path = with_pickle(tmp_path / "x.pt", pickle.dumps(Hostile(tmp_path / "executed"), 2))
    assert verify_file(path, decode=True) == [] and not (tmp_path / "executed").exists()


def test_unreadable_files_are_problems_not_crashes(tmp_path):
    (tmp_path / "dangling_states.pt").symlink_to("nowhere")
    torch.save({}, tmp_path / "good.pt")
    assert verify_tree(tmp_path) == []  # a dangling link is no file
    assert kinds(verify_file(tmp_path / "dangling_states.pt")) == {"ArchiveError"}


# --- Directories ---

@pytest.fixture
def save_dir(tmp_path):
    tag = tmp_path / "global_step5"
    tag.mkdir()
    for mp in range(2):
        ds_nvcomp.save({"module": torch.randn(3_000)}, tag / f"mp_rank_{mp:02d}_model_states.pt")
        for dp in range(3):
            ds_nvcomp.save({"optimizer_state_dict": {"partition_count": [3, 1], "x": torch.randn(3_000)}},
                           tag / f"bf16_zero_pp_rank_{dp}_mp_rank_{mp:02d}_optim_states.pt")
    (tmp_path / "latest").write_text("global_step5\n")
    (tmp_path / "zero_to_fp32.py").write_text("")
    return tmp_path


def names(problems):
    return sorted(os.path.basename(problem.path) for problem in problems)


def test_a_whole_checkpoint(save_dir):
    assert verify_tree(save_dir) == [] and verify_tree(save_dir / "global_step5") == []


@pytest.mark.parametrize("missing", ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt",
                                     "bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
                                     "bf16_zero_pp_rank_2_mp_rank_01_optim_states.pt"])
def test_a_missing_rank(save_dir, missing):
    (save_dir / "global_step5" / missing).unlink()
    assert names(verify_tree(save_dir)) == [missing]


def test_the_last_shards_are_missed_by_what_the_others_say(save_dir):
    for mp in range(2):
        (save_dir / "global_step5" / f"bf16_zero_pp_rank_2_mp_rank_{mp:02d}_optim_states.pt").unlink()
    found = verify_tree(save_dir)
    assert names(found) == [f"bf16_zero_pp_rank_2_mp_rank_{mp:02d}_optim_states.pt" for mp in range(2)]
    assert "one of 3 partitions" in str(found[0])


def test_nothing_is_invented_for_expert_and_pipeline_files(save_dir):
    tag = save_dir / "global_step5"
    for name in ("layer_3_expert_5_mp_rank_00_model_states.pt", "layer_07-model_00-model_states.pt",
                 "expp_rank_2_mp_rank_00_optim_states.pt"):
        torch.save({}, tag / name)
    assert verify_tree(save_dir) == []


@pytest.mark.parametrize("text", [b"", b"global_step6", b"\xff\xfe"])
def test_latest(save_dir, text):
    (save_dir / "latest").write_bytes(text)
    assert names(verify_tree(save_dir)) == ["latest"]


def test_damage_anywhere_in_the_tree(save_dir):
    damaged = save_dir / "global_step5" / "mp_rank_01_model_states.pt"
    flip(damaged, record_start(damaged, "data/0")[0] + 1_000)
    assert set(names(verify_tree(save_dir))) == {damaged.name}


def test_hidden_and_other_files_are_no_ones_business(save_dir):
    (save_dir / ".global_step6.staged").mkdir()
    (save_dir / ".global_step6.staged" / "mp_rank_00_model_states.pt").write_bytes(b"half")
    (save_dir / "notes.bin").write_bytes(b"something")
    assert verify_tree(save_dir) == []


def test_files_without_checksums_are_named(save_dir):
    old = save_dir / "old.pt"
    torch.save({"w": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    tally = Tally()
    assert verify_tree(save_dir, tally=tally) == [] and tally.unchecked == [str(old)]


def test_where_there_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DirectoryError) as caught:
            verify(path)
        assert isinstance(caught.value, DsNvcompError) and caught.value.path == str(path)
