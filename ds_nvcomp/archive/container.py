"""The zip around a checkpoint, laid out as torch.save lays it out: entries stored, not deflated, each one's data on 64 bytes.

Python's zipfile writes in one sequence through one file position and knows no alignment; the checkpoint writer needs to place data
at known offsets. Only the layout is here (APPNOTE.TXT 4.3, with Zip64 where a size or offset needs it); reading is zipfile's and torch's.
"""
from __future__ import annotations

import struct
from typing import Callable, Sequence

from isal.isal_zlib import crc32

ALIGN = 64  # torch/csrc/serialize: kFieldAlignment; what lets torch.load(mmap=True) hand out aligned tensors
LOCAL = struct.Struct("<4sHHHHHIIIHH")
CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR64 = struct.Struct("<4sIQI")
END = struct.Struct("<4sHHHHIIH")
ZIP64_ID, _PADDING_ID = 1, 0x4246  # "FB", torch's own padding field
_DATE_1980 = 0x21                   # no clock in the file: the same input gives the same bytes
MAX32, MAX16 = 0xFFFFFFFF, 0xFFFF


class Container:
    """Writes entries through `write(offset, buffers)`; offsets only grow, so an append-only target works too."""

    def __init__(self, write: Callable[[int, Sequence], None], root: str = "archive"):
        self._write, self._root = write, root
        self._end = 0
        self.checksums: dict[str, tuple[int, int]] = {}  # bytes and CRC-32 of each entry
        self._entries: list[tuple[bytes, int, int, int]] = []  # name, local header offset, bytes, crc

    def add(self, name: str, parts: Sequence, crc: int | None = None) -> int:
        """Append the entry `root/name` made of buffers that follow one another; returns where its data starts.

        `crc` is their CRC-32 where the caller knows it already.
        """
        parts = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        size = sum(part.nbytes for part in parts)
        if crc is None:
            crc = 0
            for part in parts:
                crc = crc32(part, crc)
        path = f"{self._root}/{name}".encode()
        extra = struct.pack("<HHQQ", ZIP64_ID, 16, size, size) if size >= MAX32 else b""
        padding = -(self._end + LOCAL.size + len(path) + len(extra) + 4) % ALIGN
        extra += struct.pack("<HH", _PADDING_ID, padding) + b"Z" * padding
        size32 = min(size, MAX32)
        header = LOCAL.pack(b"PK\3\4", 45 if size >= MAX32 else 20, 1 << 11, 0, 0, _DATE_1980, crc, size32, size32,
                             len(path), len(extra)) + path + extra
        self._write(self._end, [header, *parts])
        self._entries.append((path, self._end, size, crc))
        self.checksums[name] = size, crc
        start = self._end + len(header)
        self._end = start + size
        return start

    def close(self) -> tuple[int, int]:
        """Append the directory; returns the size of the whole file, and the CRC-32 from the directory to the end, which stands for
        all of the entries: it covers their names, places, sizes and checksums."""
        directory = []
        for path, offset, size, crc in self._entries:
            wide = [value for value in (*((size, size) if size >= MAX32 else ()), *((offset,) if offset >= MAX32 else ()))]
            extra = struct.pack(f"<HH{len(wide)}Q", ZIP64_ID, 8 * len(wide), *wide) if wide else b""
            version = 45 if wide else 20
            directory.append(CENTRAL.pack(b"PK\1\2", version, version, 1 << 11, 0, 0, _DATE_1980, crc, min(size, MAX32),
                                           min(size, MAX32), len(path), len(extra), 0, 0, 0, 0, min(offset, MAX32)) + path + extra)
        start, size, count = self._end, sum(map(len, directory)), len(directory)
        tail = directory
        if start >= MAX32 or size >= MAX32 or count >= MAX16:
            tail += [END64.pack(b"PK\6\6", END64.size - 12, 45, 45, 0, 0, count, count, size, start),
                     LOCATOR64.pack(b"PK\6\7", 0, start + size, 1)]
        tail += [END.pack(b"PK\5\6", 0, 0, min(count, MAX16), min(count, MAX16), min(size, MAX32), min(start, MAX32), 0)]
        end = b"".join(tail)
        self._write(start, [end])
        self._end = start + len(end)
        return self._end, crc32(end)
