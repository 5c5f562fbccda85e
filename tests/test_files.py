"""`files.Writer`: the file is exactly what was given, by each way to write, and every failure is told."""
import errno
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from ds_nvcomp.archive import files

WINDOW = 4096
SHM = Path("/dev/shm")


def _has_direct(folder) -> bool:
    try:
        os.close(os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT))
        return True
    except OSError:
        return False


@pytest.fixture(params=["_plainly", "_directly", "_mapped"])
def new(request, tmp_path, monkeypatch):
    """Makes writers of a path, of 4 KiB windows, that write in one of the three ways."""
    monkeypatch.setattr(files, "WINDOW", WINDOW)
    way, folder = request.param, tmp_path
    if way == "_mapped":
        if not SHM.is_dir() or not os.access(SHM, os.W_OK):
            pytest.skip("there is no tmpfs here")
        folder = SHM / f"ds_nvcomp-test-{os.getpid()}"
        folder.mkdir(exist_ok=True)
    else:
        monkeypatch.setattr(files, "_file_system", lambda fd: 0)
        if way == "_directly" and not _has_direct(folder):
            pytest.skip("the file system knows no O_DIRECT")
    path, made = folder / "file", []

    def make(threads=3):
        made.append(files.Writer(path, fsync=way == "_directly", threads=threads))
        return made[-1]
    make.path, make.way = path, way
    yield make
    assert all(writer._way.__name__ == way for writer in made if writer._pool), "another way was taken"
    path.unlink(missing_ok=True)
    if folder != tmp_path:
        folder.rmdir()


def noise(count: int) -> bytes:
    return random.Random(count).randbytes(count)


def writers() -> list:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ds_nvcomp write")]


def open_files() -> set[str]:
    return {f"{fd} {os.readlink(f'/proc/self/fd/{fd}')}" for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}


KINDS = [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8),
         lambda data: np.frombuffer(data, np.uint8).reshape(1, -1),
         lambda data: np.frombuffer(data, np.float32 if len(data) % 4 == 0 else np.int8)]


@st.composite
def writes(draw):
    """([(offset, buffers)] in any order, the file that they make): small pieces and large, with holes and without."""
    calls, at, whole = [], 0, bytearray()
    for _ in range(draw(st.integers(0, 12))):
        at += draw(st.sampled_from([0, 0, 0, 1, 63, 4000, 9000]))
        sizes = draw(st.lists(st.sampled_from([0, 1, 3, 64, 1000, 4095, 4096, 4097, 8192, 12_289, 40_000]), min_size=1, max_size=4))
        data = [random.Random(at + i).randbytes(size) for i, size in enumerate(sizes)]
        calls.append((at, [draw(st.sampled_from(KINDS))(part) for part in data]))
        if joined := b"".join(data):
            whole.extend(bytes(at - len(whole)) + joined)
        at += len(joined)
    return draw(st.permutations(calls)), bytes(whole)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=writes(), threads=st.integers(1, 4))
def test_the_file_is_what_was_given(new, plan, threads):
    calls, whole = plan
    with new(threads) as file:
        for offset, buffers in calls:
            file.write_at(offset, buffers)
    assert new.path.read_bytes() == whole
    assert not writers()


def test_a_file_that_was_there_is_replaced(new):
    new.path.write_bytes(noise(20 * WINDOW))
    with new() as file:
        file.write_at(0, [noise(3 * WINDOW + 7)])
    assert new.path.read_bytes() == noise(3 * WINDOW + 7)


def test_many_small_buffers(new):
    """More than one system call takes."""
    parts = [noise(i % 5) for i in range(5000)]
    with new() as file:
        file.write_at(0, parts)
    assert new.path.read_bytes() == b"".join(parts)


def test_windows_are_written_while_the_caller_goes_on(new):
    with new() as file:
        file.write_at(0, [noise(2 * WINDOW + 5)])
        deadline = time.monotonic() + 10
        while file._written < 2 * WINDOW and time.monotonic() < deadline:
            time.sleep(0.001)
        assert new.path.read_bytes()[:2 * WINDOW] == noise(2 * WINDOW + 5)[:2 * WINDOW]
    assert new.path.read_bytes() == noise(2 * WINDOW + 5)


# -- failures -----------------------------------------------------------------------------------------------------------------

class Disk:
    """Between a writer and the system: fails, or is slow, at chosen offsets."""

    def __init__(self, monkeypatch, way):
        self.fail, self.seconds, self.calls, self.finished = {}, 0, [], 0
        name = "posix_fallocate" if way == "_mapped" else "pwritev"
        system = getattr(os, name)

        def call(fd, *rest):
            offset = rest[0] if way == "_mapped" else rest[1]
            self.calls.append(offset)
            time.sleep(self.seconds)
            if offset in self.fail:
                raise OSError(self.fail[offset], os.strerror(self.fail[offset]))
            done = system(fd, *rest)
            self.finished += 1
            return done
        monkeypatch.setattr(os, name, call)


@pytest.fixture
def disk(new, monkeypatch):
    return Disk(monkeypatch, new.way)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_is_raised_at_a_later_write(new, disk, code):
    disk.fail = {WINDOW: code}
    before = open_files()
    with pytest.raises(OSError) as caught, new() as file:
        for number in range(100):
            file.write_at(number * WINDOW, [noise(WINDOW)])
            time.sleep(0.005)
        pytest.fail("the writes after the error went through")
    assert caught.value.errno == code and 1 <= number < 50
    assert not writers() and open_files() == before


@pytest.mark.parametrize("at", [0, 4, 9], ids=["first", "middle", "last"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_is_raised_at_the_end(new, disk, at, code):
    disk.fail, disk.seconds = {at * WINDOW: code}, 0.01
    with pytest.raises(OSError) as caught, new() as file:
        file.write_at(0, [noise(10 * WINDOW)])
    assert caught.value.errno == code and not writers()


def test_an_error_in_what_is_written_at_the_end(new, monkeypatch):
    full = OSError(errno.ENOSPC, "full")
    plainly = files._plainly
    monkeypatch.setattr(files, "_plainly", lambda fd, views, offset: plainly(fd, views, offset) if offset < 2 * WINDOW else _raise(full))
    files._plainly.__name__ = "_plainly"
    with pytest.raises(OSError) as caught, new() as file:
        file.write_at(0, [noise(2 * WINDOW + 5)])
    assert caught.value is full and not writers()


def _raise(err):
    raise err


def test_an_error_that_the_caller_swallows_is_raised_at_the_end(new, disk):
    """Or the file would pass for whole."""
    disk.fail = {0: errno.EIO}
    with pytest.raises(OSError) as caught, new() as file:
        for number in range(40):
            try:
                file.write_at(number * WINDOW, [noise(WINDOW)])
            except OSError:
                break
            time.sleep(0.005)
        else:
            pytest.fail("no write told of the error")
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("who", ["the disk", "the caller"])
def test_nothing_is_written_after_the_end(new, disk, who):
    """The caller removes the file, or its buffers, then."""
    disk.seconds, disk.fail = 0.02, {0: errno.EIO} if who == "the disk" else {}
    before = open_files()
    with pytest.raises((OSError, KeyError)), new(2) as file:
        file.write_at(0, [noise(30 * WINDOW)])
        if who == "the caller":
            raise KeyError
    seen, content = len(disk.calls), new.path.read_bytes()
    assert not writers() and seen < 30
    time.sleep(0.1)
    assert len(disk.calls) == seen and new.path.read_bytes() == content and open_files() == before


def test_short_writes_go_on(new, monkeypatch):
    if new.way == "_mapped":
        pytest.skip("a mapping knows none")
    pwritev, rng = os.pwritev, random.Random(1)

    def short(fd, buffers, offset):
        return pwritev(fd, [memoryview(buffers[0])[:rng.choice([1, 100, 512, 1024, 4096])]], offset)
    monkeypatch.setattr(os, "pwritev", short)
    parts = [noise(700) for _ in range(40)]
    with new() as file:
        file.write_at(0, parts)
    assert new.path.read_bytes() == b"".join(parts)


def test_a_device_that_wants_larger_blocks(new, monkeypatch):
    """Direct writes that are refused are done plainly; other errors are not taken for that."""
    if new.way != "_directly":
        pytest.skip("is about direct writes")
    pwritev, refused = os.pwritev, []

    def strict(fd, buffers, offset):
        if fd == file._direct:
            refused.append(offset)
            raise OSError(errno.EINVAL, "blocks")
        return pwritev(fd, buffers, offset)
    monkeypatch.setattr(os, "pwritev", strict)
    with new() as file:
        file.write_at(0, [noise(3 * WINDOW + 9)])
    assert sorted(refused) == [0, WINDOW, 2 * WINDOW] and new.path.read_bytes() == noise(3 * WINDOW + 9)


def test_a_file_system_without_direct_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "WINDOW", WINDOW)
    monkeypatch.setattr(files, "_file_system", lambda fd: 0)
    system = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return system(path, flags, *rest)
    monkeypatch.setattr(os, "open", refuse)
    with files.Writer(tmp_path / "x", fsync=True) as file:
        file.write_at(0, [noise(3 * WINDOW + 9)])
    assert file._direct is None and (tmp_path / "x").read_bytes() == noise(3 * WINDOW + 9)


@pytest.fixture
def small(tmp_path):
    """A tmpfs of 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "ds_nvcomp_files", str(place)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_disk_that_is_full(small, monkeypatch, mapped):
    """An error, where a write to a mapping would be the end of the process."""
    monkeypatch.setattr(files, "WINDOW", 64 << 10)
    if not mapped:
        monkeypatch.setattr(files, "_file_system", lambda fd: 0)
    before = open_files()
    for _ in range(3):
        with pytest.raises(OSError) as caught, files.Writer(small / "x", fsync=False) as file:
            file.write_at(0, [noise(3 << 20)])
        assert caught.value.errno == errno.ENOSPC and file._way.__name__ == ("_mapped" if mapped else "_plainly")
        (small / "x").unlink()
    assert not writers() and open_files() == before
    with files.Writer(small / "x", fsync=False) as file:
        file.write_at(0, [noise(900 << 10)])
    assert (small / "x").read_bytes() == noise(900 << 10)


def test_no_file(tmp_path):
    before = open_files()
    with pytest.raises(FileNotFoundError), files.Writer(tmp_path / "no" / "x", fsync=True):
        pass
    assert open_files() == before


# -- expect_room --------------------------------------------------------------------------------------------------------------

def test_room_is_for_what_is_given_and_not_yet_written(new, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=25, f_frsize=4096, f_bsize=1 << 20, f_bfree=1 << 20))
    free = 25 * 4096

    def refuses(nbytes):
        try:
            file.expect_room(nbytes)
        except OSError as err:
            assert err.errno == errno.ENOSPC and err.filename == str(new.path) and str(free) in str(err)
            return True
        return False

    with new() as file:
        assert not refuses(free) and refuses(free + 1)
        file.write_at(0, [noise(100)])
        assert not refuses(free - 100) and refuses(free - 99)
        file.write_at(100, [noise(2 * WINDOW)])  # two windows go to disk, 100 bytes stay
        deadline = time.monotonic() + 10
        while file._written < 2 * WINDOW and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not refuses(free - 100) and refuses(free - 99)


# -- replacing ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fsync", [True, False])
@pytest.mark.parametrize("name", [None, ".x.part"])
def test_replacing(tmp_path, monkeypatch, name, fsync):
    done, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    monkeypatch.setattr(files, "sync_directory", lambda path: done.append(path))
    (tmp_path / "x").write_text("old")
    with files.replacing(tmp_path / "x", fsync=fsync, name=name) as part:
        assert part.parent == tmp_path and part.name.startswith(".") and name in (None, part.name)
        part.write_text("new")
        assert (tmp_path / "x").read_text() == "old"
    assert (tmp_path / "x").read_text() == "new" and os.listdir(tmp_path) == ["x"]
    assert done == ["replace", *([tmp_path] if fsync else [])]


@pytest.mark.parametrize("where", ["write", "replace"])
def test_replacing_that_fails(tmp_path, monkeypatch, where):
    (tmp_path / "x").write_text("old")
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / "x", fsync=True) as part:
        part.write_text("half")
        if where == "write":
            raise KeyboardInterrupt
        monkeypatch.setattr(os, "replace", lambda *paths: _raise(KeyboardInterrupt))
    assert (tmp_path / "x").read_text() == "old" and os.listdir(tmp_path) == ["x"]


KILLED = """
import os, signal, sys
from ds_nvcomp.archive import files
with files.replacing(sys.argv[1], fsync=False) as part:
    part.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path):
    """What a process that was killed left beside `x`."""
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "x")], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    names = os.listdir(tmp_path)
    assert len(names) == 1 and re.fullmatch(r"\.ds_nvcomp-x-[0-9a-f]{8}\.part", names[0])
    return tmp_path / names[0]


def _put(path, text="new"):
    with files.replacing(path, fsync=False) as part:
        part.write_text(text)


def test_the_next_save_removes_what_a_killed_one_left(tmp_path, left):
    _put(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text() == "new"


def test_parts_of_others_stay(tmp_path):
    """Other targets, what a shorter name would match, and whatever else has nearly such a name."""
    others = [".ds_nvcomp-y-01234567.part", ".ds_nvcomp-x-y-01234567.part", ".ds_nvcomp-x-0123456.part", ".ds_nvcomp-x-0123456g.part",
              ".ds_nvcomp-x-01234567.part.pt", ".ds_nvcomp-01234567.part", ".ds_nvcomp-X-01234567.part"]
    for name in others:
        (tmp_path / name).write_text("theirs")
    outside = tmp_path / "outside"
    outside.write_text("theirs")
    (tmp_path / ".ds_nvcomp-x-00000000.part").symlink_to(outside)
    (tmp_path / ".ds_nvcomp-x-00000001.part").mkdir()
    _put(tmp_path / "x")
    assert {"x", "outside", *others} <= set(os.listdir(tmp_path)) and outside.read_text() == "theirs"


def test_a_part_that_is_being_written_stays(tmp_path):
    """Two saves to one path at once: both work, and the one that ends later is the one that is there."""
    with files.replacing(tmp_path / "x", fsync=False) as first:
        first.write_text("first")
        with files.replacing(tmp_path / "x", fsync=False) as second:
            assert first.exists() and first != second
            second.write_text("second")
        assert (tmp_path / "x").read_text() == "second" and first.read_text() == "first"
    assert (tmp_path / "x").read_text() == "first" and os.listdir(tmp_path) == ["x"]


def test_many_saves_to_one_path_at_once(tmp_path):
    """Also where one looks for abandoned parts between another's making of a file and locking it."""
    failures = []

    def saves(who):
        try:
            for i in range(200):
                _put(tmp_path / "x", f"{who} {i}")
        except BaseException as err:
            failures.append(err)

    threads = [threading.Thread(target=saves, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_text().endswith(" 199")


def test_a_part_that_was_taken_for_abandoned_is_made_anew(tmp_path, monkeypatch):
    made, lock = [], files._lock

    def late(fd):
        made.append(os.readlink(f"/proc/self/fd/{fd}"))
        if len(made) == 1:
            os.unlink(made[0])
        return lock(fd)

    monkeypatch.setattr(files, "_lock", late)
    _put(tmp_path / "x")
    assert len(set(made)) == 2 and (tmp_path / "x").read_text() == "new" and os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_locks_parts_of_others_stay(tmp_path, left, monkeypatch, error):
    monkeypatch.setattr(files.fcntl, "flock", lambda *args: _raise(OSError(error, os.strerror(error))))
    _put(tmp_path / "x")
    assert sorted(os.listdir(tmp_path)) == sorted([left.name, "x"]) and (tmp_path / "x").read_text() == "new"


def test_a_directory_that_cannot_be_listed(tmp_path, left, monkeypatch):
    monkeypatch.setattr(os, "listdir", lambda path: _raise(PermissionError(errno.EACCES, "no")))
    _put(tmp_path / "x")
    assert (tmp_path / "x").read_text() == "new" and left.exists()


@pytest.mark.parametrize("name", ["x" * 255, "\u00fc" * 127, "a[b]*.pt", "\udcff.pt", "x\ny"])
def test_names_of_all_kinds(tmp_path, name):
    """Where a part's name would be longer than a file system takes, it has a hash of the target's."""
    with pytest.raises(KeyboardInterrupt), files.replacing(tmp_path / name, fsync=False) as part:
        part.write_text("half")
        os.link(part, kept := part.with_name(f"{part.name[:-13]}01234567.part"))  # as a killed one leaves it
        raise KeyboardInterrupt
    assert kept.exists()
    _put(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
