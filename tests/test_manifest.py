"""The manifest lists what was committed, and verify holds the directory against it."""
import json
import zipfile

import pytest
import torch

import ds_nvcomp
from ds_nvcomp.checkpoint import manifest
from ds_nvcomp.checkpoint.convert import pack, unpack
from ds_nvcomp.checkpoint.verify import verify_tree
from ds_nvcomp.errors import DirectoryError

NAME = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


@pytest.fixture
def tag(tmp_path):
    directory = tmp_path / "save" / "step1"
    directory.mkdir(parents=True)
    report = ds_nvcomp.save({"w": torch.randn(20_000), "step": 1}, directory / NAME)
    manifest.write(directory, "step1", 1, {NAME: (report.stored_bytes, report.digest)}, fsync=True)
    return directory


def test_it_is_what_is_there(tag):
    assert verify_tree(tag) == [] and manifest.problems(tag) == []
    listed = json.loads((tag / manifest.NAME).read_text())
    assert listed["tag"] == "step1" and listed["world_size"] == 1 and list(listed["files"]) == [NAME]


def test_digest_is_of_the_zip_directory(tag):
    data = (tag / NAME).read_bytes()
    with zipfile.ZipFile(tag / NAME) as zipped:
        assert manifest.directory_digest(tag / NAME) == zipfile.crc32(data[zipped.start_dir:])


def test_another_sound_file_is_not_the_one_committed(tag):
    size = (tag / NAME).stat().st_size
    ds_nvcomp.save({"w": torch.zeros(20_000), "step": 2}, tag / NAME)
    assert (tag / NAME).stat().st_size != size
    assert ["bytes" in problem.message for problem in verify_tree(tag)] == [True]


def test_another_sound_file_of_the_same_size(tag):
    data = bytearray((tag / NAME).read_bytes())
    with zipfile.ZipFile(tag / NAME) as zipped:
        data[zipped.start_dir + 12] ^= 1  # a time stamp, which nothing else looks at
    (tag / NAME).write_bytes(data)
    assert [message for _, message in manifest.problems(tag) if "digest" in message]


def test_a_missing_file(tag):
    (tag / NAME).rename(tag / "other_states.pt")
    assert any("missing" in problem.message for problem in verify_tree(tag))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"version": 1}', b'{"version": 1, "files": {"x": {"bytes": "a", "digest": "0"}}}',
                                  b'{"version": 1, "files": 5}', b"\xff\xfe"])
def test_a_damaged_manifest(tag, text):
    (tag / manifest.NAME).write_bytes(text)
    with pytest.raises(DirectoryError) as caught:
        manifest.read(tag)
    assert caught.value.path.endswith(manifest.NAME)
    assert any("manifest" in problem.message for problem in verify_tree(tag))


def test_a_newer_manifest(tag):
    (tag / manifest.NAME).write_text('{"version": 2, "files": {}}')
    with pytest.raises(DirectoryError, match="version 2"):
        manifest.read(tag)


@pytest.mark.parametrize("name", ["/etc/passwd", "../secret"])
def test_paths_do_not_escape(tag, name):
    manifest.write(tag, "step1", 1, {name: (1, 2)}, fsync=False)
    assert manifest.problems(tag)[0][1].startswith("the manifest names a file outside")


def test_conversions_renew_it(tag):
    unpack(tag)
    assert verify_tree(tag) == []
    pack(tag)
    assert verify_tree(tag) == []
