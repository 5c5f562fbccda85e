"""A tensor that was saved by itself, or a part of it: only the chunks that the part touches are read and decoded. No pickle is executed."""
from __future__ import annotations

from dataclasses import replace
from typing import Sequence

import numpy as np
import torch
from isal.isal_zlib import crc32

from ..encoding.format import COLUMNS, Table
from ..errors import ArchiveError, ChecksumError
from ..pipeline import decode_payload
from .records import Record, Records
from .scan import Encoding, TensorRow, scan_records


def load_part(path, mapped: torch.UntypedStorage, start: int, length: int, device, offsets: Sequence[int],
              sizes: Sequence[int], whole: tuple[int, ...] | None = None) -> torch.Tensor:
    """The part `offsets`, `sizes` of the tensor in the bytes [`start`, `start` + `length`) of the file, on `device`. `mapped` is that file,
    `whole` the shape that the tensor must have, where that is known.

    Raises `FormatError`s for damaged bytes, and `ArchiveError` where there is not one plain tensor in it.
    """
    with Records(path, start=start, length=length) as records:
        rows = scan_records(records).rows
        if len(rows) != 1 or rows[0].stride is None:
            raise ArchiveError(f"The item should be one tensor; it has {len(rows)}. The file is damaged; restore it from a copy.")
        row = rows[0]
        if whole is not None and whole != row.shape:
            raise ArchiveError(f"The item is a tensor of shape {tuple(row.shape)}, {whole} is announced. The file is not what the metadata "
                               "describe; restore both from a copy.")
        if len(offsets) != len(row.shape) or any(o < 0 or s < 0 or o + s > n for o, s, n in zip(offsets, sizes, row.shape)):
            raise ArchiveError(f"The part {tuple(sizes)} at {tuple(offsets)} is wanted of a tensor of shape {tuple(row.shape)}. The file "
                               "is not what the metadata describe; restore both from a copy.")
        dtype = getattr(torch, row.dtype)
        record = records.records[row.storage.record]
        data = _bytes_of(mapped, start, record, row)
    wanted = _range(row, offsets, sizes, dtype.itemsize)
    if row.storage.encoding is not None:
        storage, begins = _decode(data, row.storage.encoding, wanted, torch.device(device))
    else:
        storage, begins = _checked(data, record).to(device).untyped_storage(), 0
    first = row.offset + sum(o * stride for o, stride in zip(offsets, row.stride)) - begins // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=device).set_(storage, max(0, first), tuple(sizes), row.stride)


def check_records(path, start: int, length: int) -> None:
    """Hold what a zip in a file has against the zip's own checksums, which torch.load ignores. What is no zip has none.

    Raises `FormatError`s.
    """
    with open(path, "rb") as file:
        file.seek(max(0, start))
        if file.read(4) != b"PK\3\4":
            return
    with Records(path, start=start, length=length) as records:
        for record in records.records.values():
            crc = 0
            for part in records.slices(record):
                crc = crc32(part, crc)
            _compare(record, crc)


def decode_range(records: Records, mapped, row: TensorRow, wanted: tuple[int, int], device,
                 trusted: bool) -> tuple[torch.UntypedStorage, int]:
    """On `device`, at least the bytes `wanted` of the storage that `row` is on, and which byte of it they begin at. `mapped` is the file.

    Raises `FormatError`s for damaged bytes.
    """
    record = records.records[row.storage.record]
    data = _bytes_of(mapped, 0, record, row)
    if row.storage.encoding is not None:
        return _decode(data, row.storage.encoding, wanted, torch.device(device), trusted)
    return _checked(data, record).to(device).untyped_storage(), 0


def _bytes_of(mapped, start: int, record: Record, row: TensorRow) -> torch.Tensor:
    if record.start is None:
        raise ArchiveError(f"Record {record.name!r} is deflated by zip, which its kind never is. Restore the file from a copy.")
    return torch.empty(0, dtype=torch.uint8).set_(mapped, start + record.start, (row.storage.stored_bytes,), (1,))


def _range(row: TensorRow, offsets, sizes, itemsize: int) -> tuple[int, int]:
    """The bytes of the storage that the part lies in."""
    if 0 in sizes:
        return 0, 0
    first = row.offset + sum(o * stride for o, stride in zip(offsets, row.stride))
    last = first + sum((s - 1) * stride for s, stride in zip(sizes, row.stride))
    return first * itemsize, (last + 1) * itemsize


def _decode(data: torch.Tensor, encoding: Encoding, wanted: tuple[int, int], device, trusted: bool = True) -> tuple[torch.UntypedStorage, int]:
    """The storage of the chunks that `wanted` (bytes) is in, and the byte of the whole one that it begins at."""
    header, table = encoding.header, encoding.table
    step = header.chunk_elements * header.transform.width
    first, stop = wanted[0] // step, -(-wanted[1] // step)
    if stop - first < header.chunks:
        chunks = slice(first, stop)
        skipped = header.data_start + int(table.chunk_bytes[:first].sum())
        elements = int(header.elements_of(np.arange(first, stop)).sum())
        header = replace(header, elements=elements, data_bytes=int(table.chunk_bytes[chunks].sum()))
        table = Table(*(np.ascontiguousarray(getattr(table, name)[..., chunks]) for name in COLUMNS))
        data = data[skipped - header.data_start:skipped + header.data_bytes]  # as if the header and the rows of these chunks came before
    return decode_payload(data, (header, table, encoding.codec), device=device, trusted=trusted).untyped_storage(), first * step


def _checked(data: torch.Tensor, record: Record) -> torch.Tensor:
    data = data.clone()  # from here on it is what was verified, whatever becomes of the file
    _compare(record, crc32(data.numpy()))
    return data


def _compare(record: Record, crc: int) -> None:
    if crc != record.crc:
        raise ChecksumError(f"Record {record.name!r} has checksum {crc:#010x}, expected {record.crc:#010x}. The file is damaged; restore "
                            "it from a copy, or resume from an earlier checkpoint.")
