"""The seal of a file: checksums of every record that no payload guards, verified before the pickle builds anything.

torch.load verifies no checksum: a flipped bit in the pickle, or in a tensor stored plain, is loaded as it is (tried with torch 2.13).
So the pickle of our files is `sealed(check_seal(1), object)`, in which `check_seal` runs first and finds, up its call stack, the zip
that torch.load is reading. Compressed storages have checksums of their own, bound to the pickle by `meta["crc"]`.
"""
from __future__ import annotations

import json
import os
import sys
import zipfile

import torch
from isal.isal_zlib import crc32

from ..errors import ArchiveError, ChecksumError, UnsupportedVersionError

RECORD = "ds_nvcomp/seal"
VERSION = 1


class Sealed:
    """What to pickle instead of `obj`."""

    def __init__(self, obj):
        self.obj = obj

    def __reduce__(self):
        return sealed, (_Check(), self.obj)


class _Check:
    def __reduce__(self):
        return check_seal, (VERSION,)


def write_seal(checksums: dict[str, tuple[int, int]]) -> bytes:
    """The seal record for {record name: (bytes, crc-32)}."""
    text = json.dumps({"version": VERSION, "records": checksums}, separators=(",", ":")).encode()
    return text + b"\n%08x" % crc32(text)


def read_seal(record: bytes) -> dict[str, tuple[int, int]]:
    """Inverse of `write_seal`. Raises `ChecksumError`, `ArchiveError`, `UnsupportedVersionError`."""
    text, _, check = bytes(record).rpartition(b"\n")
    if check != b"%08x" % crc32(text):
        raise ChecksumError("The seal's own checksum does not match. The file is damaged; restore it from a copy.")
    try:
        seal = json.loads(text)
        known = seal["version"] == VERSION
        records = {str(name): (int(nbytes), int(crc)) for name, (nbytes, crc) in seal["records"].items()} if known else {}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ArchiveError(f"The seal is not what ds_nvcomp writes ({type(err).__name__}). The file is damaged.") from err
    if not known:
        raise _unsupported(seal["version"])
    return records


def _unsupported(version) -> UnsupportedVersionError:
    return UnsupportedVersionError(f"The file is sealed in version {version!r}; this ds_nvcomp reads version {VERSION}. "
                                   "Install a ds_nvcomp that is at least as new as the one that wrote it.")


def check_seal(version: int) -> None:
    """Verify the records of the zip that torch.load is reading further up the stack. Called by the pickle, before anything else.

    Raises `ChecksumError`, `ArchiveError`, `UnsupportedVersionError`. Does nothing where no torch.load is found: another program
    unpickles, and has to verify by itself (`ds-nvcomp verify`).
    """
    if version != VERSION:
        raise _unsupported(version)
    reader, file = _reader()
    if reader is None:
        return
    if file is not None:
        _check_entries(file)
    if not reader.has_record(RECORD):
        raise ArchiveError(f"The file's record {RECORD!r} is missing. The file is damaged, or was repacked; restore it from a copy.")
    for name, (nbytes, crc) in read_seal(reader.get_record(RECORD)).items():
        if not reader.has_record(name):
            raise ArchiveError(f"The file's record {name!r} is missing. The file is damaged; restore it from a copy.")
        data = reader.get_record(name)
        if len(data) != nbytes or crc32(data) != crc:
            raise ChecksumError(f"Record {name!r} has {len(data)} bytes with checksum {crc32(data):#010x}, expected {nbytes} with "
                                f"{crc:#010x}. The file is damaged; restore it from a copy, or resume from an earlier checkpoint.")


def _check_entries(file) -> None:
    """Refuse entries of which torch's reader makes something else than their bytes. Tried with torch 2.13:

    For one that is marked as a directory it returns memory that nobody has written to. What an earlier load has left there may pass
    for the record when it is checked, and be another's when it is used: one flipped bit did so in 20 loads of 600. The same for an
    empty one that has a size, up to 4 GiB of it. A deflated one is inflated for the check, and with mmap used as it is.
    """
    position = file.tell()
    try:
        with zipfile.ZipFile(_FromStart(file)) as zipped:
            wrong = [info.orig_filename for info in zipped.infolist()
                     if info.external_attr & 1 << 4 or info.compress_type or info.compress_size != info.file_size]
    except Exception as err:  # BadZipFile for most damage, a variety for the rest
        raise ArchiveError(f"The zip directory is damaged ({err}). Restore the file from a copy.") from err
    finally:
        file.seek(position)
    if wrong:
        raise ArchiveError(f"The zip directory says that {wrong[0][:200]!r} is a directory, deflated or of two sizes; no record is. The "
                           "file is damaged or was repacked; restore it from a copy, or zip it with `zip -0`.")


class _FromStart:
    """A file that is only asked to seek from its start: DCP's view of an item (torch 2.13) takes an offset from the end for its opposite."""

    def __init__(self, file):
        self._file = file
        file.seek(0, os.SEEK_END)
        self._end = file.tell()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._file.tell(), os.SEEK_END: self._end}[whence]
        if start + offset < 0:
            raise OSError(f"byte {start + offset} is before the start")
        self._file.seek(start + offset)
        return start + offset

    def tell(self) -> int:
        return self._file.tell()

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        return self._file.read(size)


def opened_path() -> str | None:
    """The file that torch.load is reading further up the stack, as it was named; None where it reads something that has no path."""
    _, file = _reader()
    name = getattr(file, "name", None)
    return os.fsdecode(name) if isinstance(name, (str, bytes, os.PathLike)) else None


def _reader():
    """The PyTorchFileReader in a local variable of the nearest torch.serialization frame, and the file that torch.load opened for it."""
    frame, reader = sys._getframe(1), None
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.serialization":
            here = frame.f_locals
            reader = reader or next((value for value in here.values() if isinstance(value, torch._C.PyTorchFileReader)), None)
            if reader is not None and "opened_file" in here:
                return reader, here["opened_file"]
        frame = frame.f_back
    return reader, None


def sealed(checked: None, obj):
    """`obj`; its checks came first."""
    return obj


for _function in (check_seal, sealed):
    _function.__module__ = "ds_nvcomp.archive"  # the name in the files, whatever becomes of this module
