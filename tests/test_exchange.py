"""exchange: the two names are swapped, or nothing is; with the kernel's help and without."""
import errno
import os

import pytest

from ds_nvcomp.checkpoint import exchange as module
from ds_nvcomp.checkpoint.exchange import exchange


@pytest.fixture(params=["kernel", "renames"])
def way(request, monkeypatch):
    if request.param == "renames":
        monkeypatch.setattr(module, "_renameat2", lambda a, b: errno.EINVAL)
    return request.param


def tree(path, text):
    path.mkdir()
    (path / "file").write_text(text)
    return path


def names(path):
    return sorted(os.listdir(path))


def test_swaps_directories(tmp_path, way):
    a, b = tree(tmp_path / "a", "old"), tree(tmp_path / "b", "new")
    atomic = exchange(a, b)
    assert ((a / "file").read_text(), (b / "file").read_text()) == ("new", "old")
    assert names(tmp_path) == ["a", "b"]
    if way == "renames":
        assert atomic is False


def test_swaps_a_file_with_a_directory(tmp_path, way):
    a, b = tree(tmp_path / "a", "dir"), tmp_path / "b"
    b.write_text("file")
    exchange(str(a), b)
    assert a.read_text() == "file" and (b / "file").read_text() == "dir"


@pytest.mark.parametrize("missing", ["a", "b"])
def test_missing_name_changes_nothing(tmp_path, way, missing):
    for name in {"a", "b"} - {missing}:
        (tmp_path / name).write_text(name)
    with pytest.raises(FileNotFoundError, match=missing):
        exchange(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path) == sorted({"a", "b"} - {missing})


@pytest.mark.parametrize("failing", [2, 3])
def test_failed_rename_is_undone(tmp_path, monkeypatch, failing):
    monkeypatch.setattr(module, "_renameat2", lambda a, b: errno.ENOSYS)
    a, b = tree(tmp_path / "a", "old"), tree(tmp_path / "b", "new")
    calls, rename = [], os.rename

    def faulty(*args):
        calls.append(args)
        if len(calls) == failing:
            raise OSError(errno.EACCES, "injected")
        return rename(*args)

    monkeypatch.setattr(module.os, "rename", faulty)
    with pytest.raises(OSError, match="injected"):
        exchange(a, b)
    assert ((a / "file").read_text(), (b / "file").read_text()) == ("old", "new")
    assert names(tmp_path) == ["a", "b"]


def test_other_errors_are_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_renameat2", lambda a, b: errno.EXDEV)
    for name in "ab":
        (tmp_path / name).write_text(name)
    with pytest.raises(OSError) as caught:
        exchange(tmp_path / "a", tmp_path / "b")
    assert caught.value.errno == errno.EXDEV and (tmp_path / "a").read_text() == "a"
