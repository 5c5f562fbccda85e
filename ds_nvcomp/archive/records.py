"""The records of a torch zip, for readers that trust nothing: the directory is checked against the file before a byte is used.

Python's zipfile reads the directory; what torch.load would make of it is then pinned down: one root folder, no name twice,
local headers that agree with the directory, data that lies inside the file.
"""
from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass
from typing import Iterator

from ..errors import ArchiveError, DsNvcompError, TruncatedError
from .container import CENTRAL, END, END64, LOCAL, LOCATOR64, MAX16, MAX32, ZIP64_ID

SLICE = 8 << 20  # bytes read at a time
_IS_DIRECTORY = 1 << 4  # of the DOS attributes
_SIZES_FOLLOW = 1 << 3  # flag of entries whose checksum and sizes come behind the data; torch's own writer sets it


@dataclass(frozen=True)
class Record:
    """An entry of the zip: `start` is where its data is in the file, None for one that zip has deflated (torch.load reads
    those).
    """
    name: str
    start: int | None
    size: int
    crc: int
    info: zipfile.ZipInfo


class _Range(io.RawIOBase):
    """`length` bytes of an open file from `start` on, as a file of their own that can only be read. The file stays open."""

    def __init__(self, file, start: int, length: int):
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=os.SEEK_SET):
        at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence] + offset
        if at < 0:
            raise OSError(f"a position before the first byte: {at}")
        self._at = at
        return at

    def tell(self):
        return self._at

    def readinto(self, buffer):
        wanted = min(len(buffer), max(self._length - self._at, 0))
        data = os.pread(self._file.fileno(), wanted, self._start + self._at)
        buffer[:len(data)] = data
        self._at += len(data)
        return len(data)


def opened_range(file, start: int, length: int) -> io.BufferedReader:
    """`length` bytes of the open `file` from `start` on as a file of their own, for zipfile, torch.load and the like."""
    return io.BufferedReader(_Range(file, start, length))


def is_torch_zip(path, start: int = 0, length: int | None = None) -> bool:
    """Whether the file (or that many bytes of it from `start` on) is a zip that torch.save could have written. TorchScript modules are
    not: torch.load runs those as programs.
    """
    try:
        with open(path, "rb") as whole:
            file = whole if length is None else opened_range(whole, start, length)
            if file.read(4) != b"PK\3\4":
                return False
            with zipfile.ZipFile(file) as zipped:
                names = zipped.namelist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):  # what zipfile raises for damaged bytes
        return False
    root = names[0].partition("/")[0] if names else ""
    return f"{root}/data.pkl" in names and f"{root}/constants.pkl" not in names


class Records:
    """A torch zip opened for reading; a context manager. `records` maps names below the root folder (`data/0`) to `Record`s.

    Raises `ArchiveError`, `TruncatedError` and OSError. With a list as `errors`, what is wrong with single records is appended
    there instead, and those records are left out.

    With `length`, the zip is that many bytes of the file from `start` on, such as an item of a distributed checkpoint; then `bytes` is
    that, and every offset counts from there.
    """

    def __init__(self, path, errors: list[DsNvcompError] | None = None, *, start: int = 0, length: int | None = None):
        self.path, self._errors, self._start = os.fspath(path), errors, start
        self._what = "file" if length is None else "item"
        self.is_item = length is not None
        self._file = open(path, "rb")
        try:
            self.bytes = os.fstat(self._file.fileno()).st_size
            if length is not None:
                if not 0 <= start <= start + length <= self.bytes:
                    raise TruncatedError(f"The item is {length} bytes from byte {start}; the file has {self.bytes}. It was cut off or "
                                         "damaged; restore it from a copy.")
                self.bytes = length
            self._open()
        except BaseException as err:
            self._file.close()
            raise err.at(path=self.path) if isinstance(err, DsNvcompError) else err

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *exception):
        self._file.close()

    def problem(self, error: DsNvcompError) -> None:
        """Raise `error`, or collect it."""
        error.at(path=self.path)
        if self._errors is None:
            raise error
        self._errors.append(error)

    def _open(self):
        file = self._file if self._what == "file" else opened_range(self._file, self._start, self.bytes)
        start = file.read(4)
        try:
            self._zip = zipfile.ZipFile(file)
            infos = self._zip.infolist()
        except Exception as err:  # BadZipFile for most damage, a variety for the rest
            if start == b"PK\3\4":
                raise TruncatedError(f"The {self._what} starts as a torch zip and has no intact zip directory at its end. It was cut "
                                     "off or damaged; restore it from a copy.") from err
            raise ArchiveError(f"The {self._what} is not a torch zip. Expected what torch.save has written since PyTorch 1.6.") from err
        if start != b"PK\3\4":
            raise ArchiveError(f"A torch zip starts with b'PK\\x03\\x04', found {start!r}. The file is damaged; restore it "
                               "from a copy.")
        if not infos:
            raise ArchiveError("The zip is empty; torch.save writes at least data.pkl. Restore the file from a copy.")
        self._check_directory(infos)
        root = infos[0].orig_filename.partition("/")[0] + "/"  # as torch finds it
        self.records: dict[str, Record] = {}
        seen = set()
        for info in infos:
            name = info.orig_filename
            try:
                if info.filename != name or not name.startswith(root):
                    raise ArchiveError(f"The zip has an entry {name[:200]!r} outside its root folder {root!r}; torch.save "
                                       "writes none.")
                if name.casefold() in seen:  # torch's reader ignores case, and takes any one of them
                    raise ArchiveError(f"The zip has two entries {name[:200]!r}. The file is damaged or was made to deceive.")
                seen.add(name.casefold())
                name = name[len(root):]
                self.records[name] = self._record(name, info)
            except DsNvcompError as err:
                self.problem(err)

    def _check_directory(self, infos) -> None:
        """What zipfile passes over in the directory and its end, and torch's reader does not. No byte is left unexplained."""
        end = self.bytes - len(self._zip.comment) - END.size
        start = at = self._zip.start_dir
        where = "The zip directory"
        wrong = ArchiveError("The zip directory contradicts itself. The file is damaged; restore it from a copy.")
        for info in infos:
            fields = CENTRAL.unpack(self.read_at(at, CENTRAL.size, where))
            name_bytes, extra_bytes, comment_bytes, disk, _, attributes = fields[10:16]
            # An entry that is marked as a directory is read by torch as memory that nobody has written to.
            if fields[0] != b"PK\1\2" or comment_bytes or disk or attributes & _IS_DIRECTORY:
                raise wrong
            at += CENTRAL.size + name_bytes + extra_bytes
        count, size = len(infos), at - start
        if at + END64.size + LOCATOR64.size == end:
            record = END64.unpack(self.read_at(at, END64.size, where))
            if (record[0], record[1], *record[4:]) != (b"PK\6\6", END64.size - 12, 0, 0, count, count, size, start) or \
                    LOCATOR64.unpack(self.read_at(at + END64.size, LOCATOR64.size, where)) != (b"PK\6\7", 0, at, 1):
                raise wrong
            most = (b"PK\5\6", *[MAX16] * 4, MAX32, MAX32)  # what may be said in place of a value that the wide record has
        elif at == end:
            most = ()
        else:
            raise wrong
        found = END.unpack(self.read_at(end, END.size, where))[:7]
        if any(value != right and value not in most[i:i + 1]
               for i, (value, right) in enumerate(zip(found, (b"PK\5\6", 0, 0, count, count, size, start)))):
            raise wrong

    def _record(self, name, info) -> Record:
        where = f"Record {name[:200]!r}"
        damaged = "The file is damaged; restore it from a copy."
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise ArchiveError(f"{where} is compressed or encrypted in a way that torch.load does not read. {damaged}")
        head = self.read_at(info.header_offset, LOCAL.size, where)
        (magic, version, flags, method, time, date, crc, packed, size, name_bytes, extra_bytes) = LOCAL.unpack(head)
        if magic != b"PK\3\4":
            raise ArchiveError(f"{where} should start at byte {info.header_offset}; there is no zip header. {damaged}")
        tail = self.read_at(info.header_offset + LOCAL.size, name_bytes + extra_bytes, where)
        try:
            local_name = tail[:name_bytes].decode("utf-8" if flags & 0x800 else "cp437")
        except UnicodeDecodeError:
            local_name = None
        expected = [info.orig_filename, info.extract_version, info.flag_bits, info.compress_type]
        found = [local_name, version, flags, method]
        if not flags & _SIZES_FOLLOW:
            expected += [info.CRC, info.compress_size, info.file_size]
            found += [crc, *_zip64(tail[name_bytes:], size, packed)]
        if expected != found:
            raise ArchiveError(f"{where} is described as {expected} in the zip directory and as {found} where it starts. "
                               f"{damaged}")
        start = info.header_offset + LOCAL.size + name_bytes + extra_bytes
        stored = info.compress_type == zipfile.ZIP_STORED
        if start + info.compress_size > self.bytes:
            raise TruncatedError(f"{where} should be {info.compress_size} bytes from byte {start}; the {self._what} has "
                                 f"{self.bytes}. It was cut off; restore it from a copy.")
        if stored and info.file_size != info.compress_size:
            raise ArchiveError(f"{where} is stored as {info.compress_size} bytes and said to be {info.file_size}. {damaged}")
        return Record(name, start if stored else None, info.file_size, info.CRC, info)

    def read_at(self, offset: int, size: int, where: str) -> bytes:
        """`size` bytes at `offset` of the zip. Raises `TruncatedError` where it has fewer; allocates nothing for those."""
        if not 0 <= offset <= offset + size <= self.bytes:
            raise TruncatedError(f"{where} needs {size} bytes from byte {offset}; the {self._what} has {self.bytes}. It was cut off "
                                 "or damaged; restore it from a copy.")
        parts = []
        while size:
            part = os.pread(self._file.fileno(), min(size, 1 << 30), self._start + offset)
            if not part:
                raise TruncatedError(f"{where}: the {self._what} ends at byte {offset}, {size} bytes early. It was cut off while it "
                                     "was read.")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return b"".join(parts)

    def read(self, record: Record, start: int, size: int) -> bytes:
        """Bytes [`start`, `start` + `size`) of a record's data. Raises `TruncatedError`, `ArchiveError`."""
        where = f"Record {record.name!r}"
        if record.start is None:
            raise ArchiveError(f"{where} is deflated by zip, which its kind never is. The file was repacked; unpack it and "
                               "zip it with `zip -0`, or restore it from a copy.")
        if start + size > record.size:
            raise TruncatedError(f"{where} has {record.size} bytes, expected at least {start + size}. Restore the file from "
                                 "a copy.")
        return self.read_at(record.start + start, size, where)

    def slices(self, record: Record) -> Iterator[bytes]:
        """A record's data in slices of at most `SLICE` bytes; a deflated one inflated. Raises `ArchiveError`,
        `TruncatedError`.
        """
        if record.start is not None:
            for at in range(0, record.size, SLICE):
                yield self.read(record, at, min(SLICE, record.size - at))
            return
        try:
            with self._zip.open(record.info) as file:
                while part := file.read(SLICE):
                    yield part
        except Exception as err:  # zlib.error, BadZipFile, EOFError
            raise ArchiveError(f"Record {record.name!r} cannot be inflated: {err}. Restore the file from a copy.") from err


def _zip64(extra: bytes, size: int, packed: int):
    """(bytes stored, bytes raw) of a local header, from its Zip64 field where that is used."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == ZIP64_ID and length >= 16 and at + 20 <= len(extra) and size == packed == MAX32:
            size, packed = struct.unpack_from("<QQ", extra, at + 4)
        at += 4 + length
    return packed, size
