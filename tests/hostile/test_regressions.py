"""What the corruptions and the fuzzer found, one test each, so that it stays found."""
import struct
import zipfile

import pytest
import torch

import ds_nvcomp
from ds_nvcomp.checkpoint.verify import verify_file
from ds_nvcomp.errors import ArchiveError


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
    """torch reads it as memory that nobody has written to. An earlier load of the same file leaves the right bytes there: the seal's
    check then passed and the tensor got others, in 20 loads of 600.
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
