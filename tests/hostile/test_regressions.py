"""What the corruptions and the fuzzer found, one test each, so that it stays found."""
import pickletools
import resource
import struct
import time
import zipfile
import zlib

import pytest
import torch

import ds_nvcomp
from corrupt import File, build, record
from ds_nvcomp.archive.scan import scan
from ds_nvcomp.checkpoint.convert import unpack
from ds_nvcomp.checkpoint.verify import verify_file
from ds_nvcomp.errors import ArchiveError, ChecksumError


def central_header(data: bytes, suffix: bytes) -> int:
    """Where the zip directory's entry of the record `suffix` starts."""
    end = data.rindex(b"PK\5\6")
    count, at = struct.unpack_from("<H4xI", data, end + 10)
    for _ in range(count):
        name, extra, comment = struct.unpack_from("<HHH", data, at + 28)
        if data[at + 46:at + 46 + name].endswith(suffix):
            return at
        at += 46 + name + extra + comment
    raise LookupError(suffix)


@pytest.fixture
def whole(tmp_path):
    """A file with a compressed and a plain tensor, and what is in it."""
    state = {"w": torch.randn(20_000), "s": torch.arange(50) * 7 + 123_456_789}
    ds_nvcomp.save(state, tmp_path / "whole.pt", {"fsync": False})
    with zipfile.ZipFile(tmp_path / "whole.pt") as zipped:
        assert "whole/data/1" in zipped.namelist()
    return tmp_path / "whole.pt", state


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("record", [b"data/0", b"data/1", b"ds_nvcomp/seal"])
def test_an_entry_marked_as_a_directory_is_refused_by_plain_torch_load(whole, record, weights_only):
    """torch reads it as memory that nobody has written to. An earlier load of the same file leaves the right bytes there: the
    seal's check then passed and the tensor got others, in 20 loads of 600.
    """
    path, _ = whole
    data = bytearray(path.read_bytes())
    data[central_header(data, record) + 38] ^= 0x10
    damaged = path.with_name("damaged.pt")
    damaged.write_bytes(data)
    for _ in range(20):
        torch.load(path, weights_only=False)  # leaves its buffers to the next one
        with pytest.raises(ArchiveError, match="directory"):
            torch.load(damaged, weights_only=weights_only)
        with open(damaged, "rb") as file, pytest.raises(ArchiveError, match="directory"):
            torch.load(file, weights_only=weights_only)



@pytest.mark.parametrize("at", [4, 6, 8, 10])
def test_verify_reports_wide_values_in_the_end_of_a_directory_without_a_wide_record(whole, at):
    """0xffff stands for a value that a Zip64 record has. Without one torch refuses the file, and verify called it whole."""
    path, _ = whole
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, len(data) - 22 + at, 0xFFFF)
    path.write_bytes(data)
    assert verify_file(path)


def rewritten(path, change):
    """The file with its entries changed and everything else of the zip right."""
    entries = File(path.read_bytes()).entries
    change(entries)
    path.write_bytes(build(entries))


@pytest.mark.parametrize("mmap", [False, True])
def test_a_deflated_plain_record_is_refused(whole, mmap):
    """As a zip tool packs it again. The seal was checked for what it inflates to, and with mmap the deflated bytes were the
    tensor.
    """
    path, _ = whole

    def deflate(entries):
        entry = record(entries, b"data/1")
        raw, coder = entry.data, zlib.compressobj(9, zlib.DEFLATED, -15)
        entry.data = coder.compress(raw) + coder.flush()
        entry.local = entry.central = dict(method=8, size=len(raw), crc=zlib.crc32(raw))

    rewritten(path, deflate)
    with pytest.raises(ArchiveError, match="deflated"):
        torch.load(path, mmap=mmap)
    assert [problem.kind for problem in verify_file(path)] == ["ArchiveError"]


def test_an_empty_record_of_4_gib_costs_nothing(tmp_path):
    """The fuzzer's: torch returns so much memory unread for it, and the seal's check copied and summed it for 17 seconds."""
    path = tmp_path / "x.pt"
    ds_nvcomp.save({"w": torch.randn(20_000), "s": torch.empty(0)}, path, {"fsync": False})

    def grow(entries):
        [empty] = [entry for entry in entries if not entry.data]
        empty.central = dict(size=0xFFFFFFFF)

    rewritten(path, grow)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ArchiveError, match="two sizes"):
        torch.load(path)
    assert time.monotonic() - began < 5 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_verify_checks_the_seal_of_a_pickle_that_lost_its_last_call(whole):
    """The check is called, `sealed` is not: torch refuses the file, and verify took it for one without a seal."""
    path, _ = whole

    def cut(entries):
        entry = record(entries, b"data.pkl")
        ops = [(op.name, at) for op, _, at in pickletools.genops(entry.data)]
        at = [at for name, at in ops if name == "REDUCE"][-1]
        entry.data = entry.data[:at] + b"."

    rewritten(path, cut)
    with pytest.raises(ChecksumError, match="data.pkl"):
        torch.load(path)
    assert "ChecksumError" in [problem.kind for problem in verify_file(path)]


def test_a_conversion_that_cannot_clean_up_has_converted_all_the_same(whole, monkeypatch):
    path, state = whole
    with monkeypatch.context() as patch:
        patch.setattr("os.chmod", lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        patch.setattr("shutil.copystat", lambda *args, **options: None)
        folder = path.parent / "tree"
        folder.mkdir()
        path.rename(folder / path.name)
        unpack(folder)
    assert torch.equal(torch.load(folder / path.name)["w"], state["w"]) and not scan(folder / path.name).compressed
