"""A tensor that was saved by itself, or a part of it: only the chunks that the part touches are read and decoded. No pickle is executed."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Iterator, Sequence

import numpy as np
import torch
from isal.isal_zlib import crc32

from .. import pipeline
from ..encoding.format import CODED, COLUMNS, Table
from ..errors import ArchiveError, ChecksumError, DsNvcompError
from ..pipeline import decode_payload, memory, threads
from ..pipeline.available import gpu_missing
from .records import Record, Records
from .scan import Encoding, TensorRow, scan_records

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Part:
    """A part of a tensor that has been found in a file: `data` are bytes of that, still to be decoded or compared."""
    dtype: torch.dtype
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int                    # elements, in what `data` become
    data: torch.Tensor
    record: Record
    parsed: tuple | None           # (header, table, codec) of what is a payload

    @property
    def room(self) -> int:
        """Bytes that it takes to decode it with others: whole chunks."""
        if self.parsed is None:
            return self.data.numel()
        header = self.parsed[0]
        return header.chunks * header.chunk_elements * header.transform.width

    def tensor(self, data: torch.Tensor) -> torch.Tensor:
        """The part, on what `data` have become."""
        first = data.storage_offset() // self.dtype.itemsize + self.offset
        return torch.empty(0, dtype=self.dtype, device=data.device).set_(data.untyped_storage(), max(0, first), self.sizes, self.strides)


def find_part(path, mapped: torch.UntypedStorage, start: int, length: int, offsets: Sequence[int], sizes: Sequence[int],
              whole: tuple[int, ...] | None = None) -> Part:
    """The part `offsets`, `sizes` of the tensor in the bytes [`start`, `start` + `length`) of the file. `mapped` is that file, `whole` the
    shape that the tensor must have, where that is known.

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
        data, parsed, begins = _bytes_of(mapped, start, record, row), None, 0
    if row.storage.encoding is not None:
        data, parsed, begins = _chunks_of(data, row.storage.encoding, _range(row, offsets, sizes, dtype.itemsize))
    first = row.offset + sum(o * stride for o, stride in zip(offsets, row.stride)) - begins // dtype.itemsize
    return Part(dtype, tuple(sizes), row.stride, first, data, record, parsed)


def read_parts(parts: Sequence[Part], device) -> Iterator[torch.Tensor]:
    """The parts on `device`, in order: decoded together on a GPU, and else several at a time. What comes may be on one storage.

    Raises `ChecksumError`, `DecodeError` and the like when it comes to the part that is damaged.
    """
    device, begun = torch.device(device), 0
    together, workers = _on_gpu(parts, device), min(16, threads.count(0))
    apart = {i for i, part in enumerate(parts) if i not in together and _worth_a_thread(part, workers)}
    pool, reading = ThreadPoolExecutor(workers, thread_name_prefix="ds_nvcomp parts"), {}
    try:
        decoded = _decode_together({i: parts[i] for i in sorted(together)}, device)
        for i, part in enumerate(parts):
            while begun < min(len(parts), i + 2 * workers):  # not further ahead: each takes memory
                if begun in apart:
                    reading[begun] = pool.submit(_read, parts[begun], _CPU)
                begun += 1
            if i in decoded:
                data = decoded.pop(i)
            else:
                data = reading.pop(i).result() if i in apart else _read(part, device)
            yield part.tensor(data.to(device))
    finally:
        pool.shutdown(cancel_futures=True)


def load_part(path, mapped: torch.UntypedStorage, start: int, length: int, device, offsets: Sequence[int],
              sizes: Sequence[int], whole: tuple[int, ...] | None = None) -> torch.Tensor:
    """One part, found and read."""
    part = find_part(path, mapped, start, length, offsets, sizes, whole)
    return part.tensor(_read(part, torch.device(device)).to(device))


def _read(part: Part, device: torch.device) -> torch.Tensor:
    """Its bytes, by itself; what is no payload is on the host yet."""
    return checked(part.data, part.record) if part.parsed is None else decode_payload(part.data, part.parsed, device=device)


def _worth_a_thread(part: Part, workers: int) -> bool:
    """Whether others are read beside it on the CPU: where it does not keep all cores busy by itself, and is more than calls of Python.
    On 2 cores threads made loads slower, by 10 to 40 % (items of 80 KB to 2 MB)."""
    return workers >= 4 and 256 << 10 <= part.room < workers << 20


def _on_gpu(parts: Sequence[Part], device: torch.device) -> set[int]:
    """Which of the parts a GPU decodes together, by the rules of `decode_payload` for one."""
    coded = [i for i, part in enumerate(parts) if part.parsed is not None]
    much = sum(parts[i].parsed[0].raw_bytes for i in coded) >= pipeline.WORTH_THE_WAY and torch.cuda.is_initialized()
    wanted = {i for i in coded if much or device.type == "cuda" or _only_there(*parts[i].parsed)}
    return wanted if wanted and gpu_missing() is None else set()


def _only_there(header, table, codec) -> bool:
    return codec.cpu is None and bool((table.mode == CODED).any())


def _decode_together(parts: dict[int, Part], device: torch.device) -> dict[int, torch.Tensor]:
    """What is decoded of each; nothing where that fails. Decoded one by one, they take less memory, and tell which it is."""
    if not parts:
        return {}
    try:
        from ..pipeline import gpu_decode
        if device.type == "cpu":
            memory.expect_room(sum(part.room for part in parts.values()))
        return dict(zip(parts, gpu_decode.decode_many([(part.data, *part.parsed) for part in parts.values()], device)))
    except (DsNvcompError, torch.OutOfMemoryError):
        return {}


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
        data, parsed, begins = _chunks_of(data, row.storage.encoding, wanted)
        return decode_payload(data, parsed, device=torch.device(device), trusted=trusted).untyped_storage(), begins
    return checked(data, record).to(device).untyped_storage(), 0


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


def _chunks_of(data: torch.Tensor, encoding: Encoding, wanted: tuple[int, int]) -> tuple[torch.Tensor, tuple, int]:
    """A payload of the chunks that `wanted` (bytes) is in, (header, table, codec) of that, and the byte of the whole that it begins at."""
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
    return data, (header, table, encoding.codec), first * step


def checked(data: torch.Tensor, record: Record) -> torch.Tensor:
    """A copy of `data`, all bytes of a record. Raises `ChecksumError` where they are not those that were written."""
    data = data.clone()  # from here on it is what was verified, whatever becomes of the file
    _compare(record, crc32(data.numpy()))
    return data


def _compare(record: Record, crc: int) -> None:
    if crc != record.crc:
        raise ChecksumError(f"Record {record.name!r} has checksum {crc:#010x}, expected {record.crc:#010x}. The file is damaged; restore "
                            "it from a copy, or resume from an earlier checkpoint.")
