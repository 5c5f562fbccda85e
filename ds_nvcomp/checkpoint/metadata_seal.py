"""A checksum behind the pickle of `.metadata`, which DCP writes without one: an item's place is as much of a number as its bytes are.

    pickle | MAGIC | bytes of the pickle (8) | its CRC-32 (4) | MAGIC

An unpickler stops where the pickle does, so torch reads such a file as any other.
"""
from __future__ import annotations

import os
import struct

from isal.isal_zlib import crc32

from ..errors import ArchiveError, ChecksumError

MAGIC = b"DSNVMETA"  # at both ends: one of them is left of most damage
_TRAILER = struct.Struct("<8sQI8s")


def trailer(pickled: bytes) -> bytes:
    return _TRAILER.pack(MAGIC, len(pickled), crc32(pickled), MAGIC)


def seal_file(path) -> None:
    """Put the checksum behind the pickle in `path`, durably."""
    with open(path, "r+b") as file:
        file.write(trailer(file.read()))
        file.flush()
        os.fsync(file.fileno())


def check(data: bytes, path: str) -> None:
    """Raises `ChecksumError` and `ArchiveError` where `data` is not what was written. A file of torch's own has nothing to check, except
    that its pickle ends it.
    """
    wrong = ".metadata is damaged, or is not whole; restore it from a copy, or resume from an earlier checkpoint."
    end = data[-_TRAILER.size:]
    if MAGIC not in (end[:len(MAGIC)], end[-len(MAGIC):]):
        if data[-1:] != b".":
            raise ArchiveError(f"There is something behind the pickle, or it has no end. {wrong}", path=path)
        return
    expected = trailer(data[:-_TRAILER.size])
    if end != expected:
        raise ChecksumError(f"Its checksum is {end.hex()}, expected {expected.hex()}. {wrong}", path=path)
