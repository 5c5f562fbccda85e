"""The bytes of one encoded storage: header, chunk table, chunk data. FORMAT.md is normative; change both in one commit.

    header (64 bytes) | table (n_chunks rows, stored by column) | zero padding to 16 | chunk data

Everything here is plain NumPy on the host and runs on hostile bytes: every count is bounded by the bytes that are really there
before anything is allocated from it.
"""
from __future__ import annotations

import struct

from dataclasses import dataclass

import numpy as np
from isal.isal_zlib import crc32

from ..errors import HeaderError, TableError, TruncatedError, UnsupportedVersionError
from .transforms import BY_ID as TRANSFORMS_BY_ID, Transform

MAGIC = b"DSNVCOMP"
VERSION = 1
ALIGN = 16                   # pieces start on 16 bytes: nvCOMP's strictest input alignment, and one GPU vector load
MAX_CHUNK_BYTES = 1 << 20    # of a coded plane

HEADER = struct.Struct("<8sHHBBBBIIQQQQII")
assert HEADER.size == 64

# How a piece (one plane of one chunk) is stored.
ZERO, RAW, CODED, UNSIGNED = 0, 1, 2, 3

COLUMNS = ("crc", "decoded", "size", "mode")  # of the chunk table, in order


def aligned(sizes):
    """Round bytes up to `ALIGN`; ints and integer arrays alike."""
    return (sizes + (ALIGN - 1)) & ~(ALIGN - 1)


@dataclass(frozen=True)
class Header:
    transform: Transform
    codec_id: int
    codec_revision: int      # nvCOMP's major version where the bitstream is tied to it, else 0
    chunk_elements: int
    elements: int
    data_bytes: int
    table_crc: int = 0
    crc: int = 0             # of the header itself, as read

    @property
    def chunks(self) -> int:
        return -(-self.elements // self.chunk_elements)

    @property
    def table_bytes(self) -> int:
        return self.chunks * row_bytes(self.transform)

    @property
    def data_start(self) -> int:
        return aligned(HEADER.size + self.table_bytes)

    @property
    def raw_bytes(self) -> int:
        return self.elements * self.transform.width

    def elements_of(self, chunks: np.ndarray) -> np.ndarray:
        """Elements in each of the given chunk numbers, int64: all full but the last."""
        return np.minimum(self.elements - chunks * self.chunk_elements, self.chunk_elements)


@dataclass
class Table:
    """One row per chunk, kept by column.

    `crc` uint32 [n]: CRC-32 of the chunk's stored bytes. `decoded` uint32 [n]: that of its coded plane before coding, zero-padded to
    `ALIGN`, and 0 where it is not coded; nvCOMP's decoders do not tell when a stream is not what it should be. `size` uint32
    [planes, n]: bytes stored. `mode` uint8 [planes, n].
    """
    crc: np.ndarray
    decoded: np.ndarray
    size: np.ndarray
    mode: np.ndarray

    @classmethod
    def empty(cls, transform: Transform, chunks: int) -> "Table":
        planes = len(transform.planes)
        return cls(np.zeros(chunks, np.uint32), np.zeros(chunks, np.uint32), np.zeros((planes, chunks), np.uint32), np.zeros((planes, chunks), np.uint8))

    @property
    def piece_offsets(self) -> np.ndarray:
        """Start of each piece relative to the chunk data, int64 [planes, n]; chunk-major, planes in order within a chunk."""
        spans = aligned(self.size.astype(np.int64)).T.ravel()
        ends = np.cumsum(spans)
        return (ends - spans).reshape(-1, len(self.size)).T

    @property
    def chunk_bytes(self) -> np.ndarray:
        """Bytes of chunk data per chunk, padding included, int64 [n]."""
        return aligned(self.size.astype(np.int64)).sum(axis=0)

    def tobytes(self) -> bytes:
        return b"".join(getattr(self, column).tobytes() for column in COLUMNS)


def row_bytes(transform: Transform) -> int:
    return 8 + 5 * len(transform.planes)


def preamble(header: Header, table: Table) -> bytes:
    """Header, table and padding: everything of a payload before its chunk data. `header.table_crc` is computed here."""
    rows = table.tobytes()
    fixed = HEADER.pack(MAGIC, VERSION, 0, header.transform.id, header.codec_id, header.codec_revision,
                        len(header.transform.planes), header.chunk_elements, 0, header.elements, header.chunks,
                        header.data_bytes, 0, crc32(rows), 0)[:-4]
    head = fixed + struct.pack("<I", crc32(fixed))
    return (head + rows).ljust(header.data_start, b"\0")


def parse_header(head: bytes, payload_bytes: int) -> Header:
    """Validate the first 64 bytes of a payload of `payload_bytes` bytes.

    Raises `TruncatedError`, `HeaderError` or `UnsupportedVersionError`.
    """
    if len(head) < HEADER.size:
        raise TruncatedError(f"A payload starts with a header of {HEADER.size} bytes, found {len(head)}. "
                             "The file was cut off, or is not from ds_nvcomp; restore it from a copy.")
    (magic, version, features, transform_id, codec_id, revision, planes, chunk_elements, _reserved, elements, chunks,
     data_bytes, _reserved2, table_crc, head_crc) = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise HeaderError(f"A payload starts with {MAGIC!r}, found {magic!r}. The file is damaged; restore it from a copy.")
    if version != VERSION:
        # Before the checksum: a later version may move it.
        raise UnsupportedVersionError(f"The payload is of format version {version}; this ds_nvcomp reads version {VERSION}. "
                                      "Install a ds_nvcomp that is at least as new as the one that wrote it.")
    if crc32(head[:HEADER.size - 4]) != head_crc:
        raise HeaderError(f"The payload header's checksum is {crc32(head[:HEADER.size - 4]):#010x}, expected "
                          f"{head_crc:#010x}. The file is damaged; restore it from a copy.")
    if features:
        raise UnsupportedVersionError(f"The payload needs features {features:#06x} that this ds_nvcomp does not know. "
                                      "Install a ds_nvcomp that is at least as new as the one that wrote it.")
    transform = TRANSFORMS_BY_ID.get(transform_id)
    if transform is None:
        raise UnsupportedVersionError(f"The payload uses transform {transform_id}, known are {sorted(TRANSFORMS_BY_ID)}. "
                                      "Install a ds_nvcomp that is at least as new as the one that wrote it.")
    if planes != len(transform.planes):
        raise HeaderError(f"Transform {transform.name} has {len(transform.planes)} planes, the header says {planes}.")
    most = transform.chunk_elements(MAX_CHUNK_BYTES)
    if not 0 < chunk_elements <= most or chunk_elements % 16:
        raise HeaderError(f"Elements per chunk must be a multiple of 16 from 16 to {most}, found {chunk_elements}.")
    header = Header(transform, codec_id, revision, chunk_elements, elements, data_bytes, table_crc, head_crc)
    if chunks != header.chunks:
        raise HeaderError(f"{elements} elements in chunks of {chunk_elements} are {header.chunks} chunks, the header says {chunks}.")
    if header.data_start + data_bytes != payload_bytes:
        kind = TruncatedError if header.data_start + data_bytes > payload_bytes else HeaderError
        raise kind(f"The header announces {header.data_start + data_bytes} bytes of payload, found {payload_bytes}. "
                   "The file was cut off or damaged; restore it from a copy.")
    return header


def parse_table(rows: bytes | memoryview, header: Header) -> Table:
    """Validate the chunk table: `rows` are the bytes between the header and `header.data_start`. Raises `TableError`."""
    rows = memoryview(rows)
    if crc32(rows[:header.table_bytes]) != header.table_crc:
        raise TableError("The chunk table's checksum does not match the header's. The file is damaged; restore it from a copy.")
    if any(rows[header.table_bytes:]):
        raise TableError("The padding behind the chunk table is not zero. The file is damaged; restore it from a copy.")
    n, planes = header.chunks, len(header.transform.planes)
    table = Table(np.frombuffer(rows, np.uint32, n), np.frombuffer(rows, np.uint32, n, 4 * n),
                  np.frombuffer(rows, np.uint32, planes * n, 8 * n).reshape(planes, n),
                  np.frombuffer(rows, np.uint8, planes * n, 8 * n + 4 * planes * n).reshape(planes, n))
    elements = header.elements_of(np.arange(n, dtype=np.int64))
    for p, plane in enumerate(header.transform.planes):
        size, mode = table.size[p].astype(np.int64), table.mode[p]
        raw = plane.raw_bytes(elements)
        fits = np.select([mode == ZERO, mode == RAW, (mode == CODED) & plane.codable, (mode == UNSIGNED) & plane.has_sign],
                         [size == 0, size == raw, (size > 0) & (size < raw), size == plane.unsigned_bytes(elements)], False)
        if not fits.all():
            c = int(np.argmin(fits))
            raise TableError(f"Plane {plane.name!r} is stored in mode {mode[c]} with {size[c]} bytes, which is not possible "
                             f"for {raw[c]} raw bytes. The file is damaged; restore it from a copy.", chunk=c)
    stray = (table.mode[0] != CODED) & (table.decoded != 0)
    if stray.any():
        raise TableError("A chunk that is not coded has a checksum of its decoded plane. The file is damaged; restore it from a copy.",
                         chunk=int(np.argmax(stray)))
    if int(table.chunk_bytes.sum()) != header.data_bytes:
        raise TableError(f"The table's pieces are {int(table.chunk_bytes.sum())} bytes, the header says {header.data_bytes}.")
    return table
