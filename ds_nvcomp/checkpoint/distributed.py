"""Directories of torch.distributed.checkpoint (DCP), and so Megatron's `torch_dist`: which items they have, and what is in those.

    .metadata         a pickle: for each item its name and chunk, and the file and bytes where it is; written last
                      (`__<rank>.metadata`, one for each rank, where a save did without collectives)
    __0_0.distcp      items, one behind another: of a tensor a torch zip of its own, of anything else bytes, which are mostly one, too

Nothing is executed: pickles are followed symbolically. Every number is checked against the files before it is used, and what a hostile
`.metadata` can cost is linear in its bytes.
"""
from __future__ import annotations

import math
import os
import posixpath
import re
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator

from ..archive.records import Records
from ..archive.scan import MAX_PICKLE_BYTES, FileScan, Stored, TensorRow, itemsize, scan_records, size_of
from ..archive.symbolic import Call, Dict, Global, Items, read as read_pickle
from ..errors import ArchiveError, DirectoryError, DsNvcompError, TruncatedError
from . import metadata_seal

SUFFIX = ".distcp"
METADATA = ".metadata"

_RANK_METADATA = re.compile(r"__(\d{1,9})\.metadata")
_CLASSES = b"torch.distributed.checkpoint.metadata"  # near the start of every such pickle
_MAX_TEXT, _MAX_FIELDS, _MAX_LIST = 4096, 64, 64  # of a name or path, of an object, of dimensions or transforms: none has nearly as many
_DAMAGED = "It is damaged, or of a kind that is unknown here; restore it from a copy, or resume from an earlier checkpoint."


@dataclass(frozen=True, eq=False)
class Item:
    """What `.metadata` says of `length` bytes at `start` of `file` (a path below the directory).

    `offsets` is where the chunk begins in the tensor `fqn`, None for what is no tensor; `shape` and `dtype` are the chunk's, None where not
    known. `transforms` are descriptors of torch's stream extensions that the bytes have gone through. `metadata` is the file that says so.
    """
    fqn: str
    offsets: tuple[int, ...] | None
    file: str
    start: int
    length: int
    transforms: tuple[str, ...]
    metadata: str
    shape: tuple[int, ...] | None
    dtype: str | None
    name: str

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def key(self) -> tuple:
        return self.metadata, self.fqn, self.offsets


@dataclass(frozen=True)
class Listing:
    """`items` in the order of their files; `nowhere` are the names of chunks that are announced and stored nowhere."""
    directory: Path
    metadata: list[str]
    items: list[Item]
    nowhere: list[str]

    def path(self, item: Item) -> str:
        return os.path.join(self.directory, item.file)


@dataclass(frozen=True)
class DirectoryScan(FileScan):
    """What all items hold, as of one file. `items` has for each row the item that it is in."""
    items: list[Item] = field(default_factory=list)


def is_distributed(directory) -> bool:
    """Whether this is such a directory, or what is left of one."""
    names = os.listdir(directory)
    if any(name.endswith(SUFFIX) for name in names):
        return True
    return any(_is_metadata(os.path.join(directory, name)) for name in _metadata_files(names))


def is_finished(directory) -> bool:
    """Whether there is a `.metadata`, which is written last."""
    return bool(_metadata_files(os.listdir(directory)))


def read_items(directory) -> Listing:
    """The items of a directory. Files are not looked at yet; `faults` and `leftovers` do that.

    Raises `DirectoryError` where there is no `.metadata`, `ArchiveError` for one that is not what torch writes, and OSError.
    """
    directory = Path(directory)
    metadata = _metadata_files(os.listdir(directory))
    if not metadata:
        raise DirectoryError(f"The directory has items (*{SUFFIX}) and no {METADATA}, which is written last: the save did not finish. "
                             "Resume from another checkpoint, and remove this one.", path=str(directory))
    said = [_read_metadata(directory, name) for name in metadata]
    whole = {(fqn, offsets) for stored, announced in said for fqn, offsets in [*(item[:2] for item in stored), *announced]}
    chunks = Counter(fqn for fqn, _ in whole)
    items, nowhere = [], []
    for name, (stored, announced) in zip(metadata, said):
        rank = _RANK_METADATA.fullmatch(name)
        of_rank = f" (rank {int(rank[1])})" if rank else ""

        def called(fqn, offsets):
            where = f"[{','.join(map(str, offsets))}]" if offsets and chunks[fqn] > 1 else ""
            return fqn + where + of_rank

        found = set()
        for fqn, offsets, place in stored:
            if (fqn, offsets) in found:
                raise ArchiveError(f"An item is listed twice. {_DAMAGED}", path=str(directory / name), tensor=called(fqn, offsets))
            found.add((fqn, offsets))
            items.append(Item(fqn, offsets, *place, name, *announced.get((fqn, offsets), (None, None)), called(fqn, offsets)))
        nowhere += [called(*key) for key in announced if key not in found]
    items.sort(key=lambda item: (item.file, item.start, item.length))
    return Listing(directory, metadata, items, nowhere)


def faults(listing: Listing) -> Iterator[tuple[Item, DsNvcompError]]:
    """Items whose bytes cannot be theirs: their file is missing or ends before they do, or an earlier item has the same bytes."""
    file = size = before = None
    for item in listing.items:
        path = listing.path(item)
        if item.file != file:
            file, size, before = item.file, _regular_size(path), None
        where = dict(path=path, tensor=item.name)
        if before is not None and item.start < before.end and size is not None and item.end <= size:
            yield item, ArchiveError(f"The item is at bytes {item.start} to {item.end}, and {before.name!r} at {before.start} to "
                                     f"{before.end}: they overlap. {_DAMAGED}", **where)
        if size is None:
            yield item, DirectoryError(f"The file is missing that should have {item.length} bytes of this tensor. A rank did not finish "
                                       "its save, or the file was removed; restore it from a copy, or resume from another checkpoint.",
                                       **where)
        elif item.end > size:
            yield item, TruncatedError(f"The item is {item.length} bytes from byte {item.start}; the file has {size}. It was cut off; "
                                       "restore it from a copy, or resume from another checkpoint.", **where)
        elif before is None or item.end > before.end:
            before = item


def leftovers(listing: Listing) -> Iterator[DsNvcompError]:
    """Tensors that are stored nowhere, and bytes that are no item's."""
    for name in listing.nowhere:
        yield DirectoryError("The tensor (or this chunk of it) is announced and stored nowhere. A rank did not finish its save; resume "
                             "from another checkpoint.", path=str(listing.directory / listing.metadata[0]), tensor=name)
    for file, gaps in _gaps(listing).items():
        path = str(listing.directory / file)
        lost = sum(stop - start for start, stop in gaps)
        first = f"the first from byte {gaps[0][0]} to {gaps[0][1]}"
        yield ArchiveError(f"{lost} bytes belong to no item, {first}. They are left of another save, or {METADATA} is not of this file; "
                           "they are not verified, and nothing reads them.", path=path)
    used = {item.file for item in listing.items}
    for name in sorted(os.listdir(listing.directory)):
        size = _regular_size(listing.directory / name) if name.endswith(SUFFIX) and name not in used else None
        if size:  # torch's threads write empty files where there is no work
            yield DirectoryError(f"Nothing in {METADATA} refers to this file of {size} bytes. It is left of another save, or {METADATA} "
                                 "is; remove what is older.", path=str(listing.directory / name))


def scan_directory(directory) -> DirectoryScan:
    """What is in the items: a row for each tensor, named by its fqn, with where its chunk begins if there are several.

    Raises a `FormatError` or `DirectoryError` (with file and tensor) for the first thing that is wrong, and OSError.
    """
    listing = read_items(directory)
    for _, error in faults(listing):
        raise error
    files = {*listing.metadata, *(item.file for item in listing.items)}
    scan = DirectoryScan(str(directory), sum(_regular_size(listing.directory / file) or 0 for file in files), [], [], None)
    for item in listing.items:
        found = None
        if is_zip(listing, item):
            with Records(listing.path(item), start=item.start, length=item.length) as records:
                found = scan_item(records, item)
        rows = [_opaque(item)] if found is None else found.rows
        scan.rows.extend(rows)
        scan.items.extend([item] * len(rows))
        scan.globals.extend(found.globals if found else [])
    scan.globals[:] = sorted(set(scan.globals))
    return scan


def scan_item(records: Records, item: Item) -> FileScan:
    """What a torch zip holds that is an item. Raises, or collects in `records`, what `scan_records` does, and `ArchiveError` for a tensor
    that is not the one `.metadata` says.
    """
    try:
        scanned = scan_records(records, item.name)
    except DsNvcompError as err:
        raise err.at(tensor=item.name)
    row = next((row for row in scanned.rows if row.name == item.name), None)
    if row is not None and item.shape is not None and (row.shape, row.dtype) != (item.shape, item.dtype or row.dtype):
        records.problem(ArchiveError(f"The item holds {row.dtype} of shape {row.shape}, {item.metadata} says {item.dtype} of {item.shape}. "
                                     "Files of different saves are mixed here; restore the directory from a copy, or resume from another "
                                     "checkpoint.", tensor=item.name))
    return scanned


def is_zip(listing: Listing, item: Item) -> bool:
    """Whether an item is, or should be, a torch zip. What is no tensor may be any bytes."""
    if item.transforms:
        return False
    if item.offsets is not None:
        return True
    with open(listing.path(item), "rb") as file:
        start = os.pread(file.fileno(), min(4, item.length), item.start)
        tail = os.pread(file.fileno(), min(22, item.length), item.end - min(22, item.length))
    return start == b"PK\3\4" or tail[:4] == b"PK\5\6"  # either may be what is damaged


def _opaque(item: Item) -> TensorRow:
    """A row for an item whose bytes only others can read."""
    dtype, shape, raw = item.dtype or "uint8", item.shape, item.length
    if shape is not None and item.dtype is not None:
        raw = math.prod(shape) * itemsize(item.dtype)
    how = f"by {', '.join(item.transforms)}, not by ds_nvcomp" if item.transforms else "bytes as they were given"
    stored = Stored(item.file, "", dtype, raw, item.length, False, item.name, how=how)
    return TensorRow(item.name, dtype, (item.length,) if shape is None else shape, None, 0, stored, None)


def gaps_of(items: list[Item], size: int) -> list[tuple[int, int]]:
    """The ranges of a file of `size` bytes that are none of `items`, which are in order."""
    found, at = [], 0
    for item in items:
        if item.start > at:
            found.append((at, min(item.start, size)))
        at = max(at, item.end)
    return found + ([(at, size)] if at < size else [])


def by_file(listing: Listing) -> dict[str, list[Item]]:
    """The items of each file, in order."""
    files: dict[str, list[Item]] = {}
    for item in listing.items:
        files.setdefault(item.file, []).append(item)
    return files


def _gaps(listing: Listing) -> dict[str, list[tuple[int, int]]]:
    sizes = {file: _regular_size(listing.directory / file) for file in by_file(listing)}
    found = {file: gaps_of(items, sizes[file]) for file, items in by_file(listing).items() if sizes[file] is not None}
    return {file: gaps for file, gaps in found.items() if gaps and gaps[0][0] < sizes[file]}


def _regular_size(path) -> int | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# --- .metadata ---

def _metadata_files(names: list[str]) -> list[str]:
    """As torch's reader takes them: the one of all ranks, or else one for each."""
    if METADATA in names:
        return [METADATA]
    return sorted((name for name in names if _RANK_METADATA.fullmatch(name)), key=lambda name: int(_RANK_METADATA.fullmatch(name)[1]))


def _is_metadata(path) -> bool:
    if _regular_size(path) is None:
        return False
    with open(path, "rb") as file:
        return _CLASSES in file.read(4096)


def _read_metadata(directory: Path, name: str):
    """([(fqn, offsets, (file, start, length, transforms))], {(fqn, offsets): (shape, dtype)}) of what is stored and what is announced."""
    path = directory / name
    try:
        size = _regular_size(path)
        if size is None or size > MAX_PICKLE_BYTES:
            raise ArchiveError(f"{name} has {size} bytes; expected a file of at most {MAX_PICKLE_BYTES}.")
        data = path.read_bytes()
        metadata_seal.check(data, str(path))
        root = read_pickle(data)
        state = root.state if type(root) is Call else None
        storage, announced = (Dict.get(state, key) if type(state) is Dict else None for key in ("storage_data", "state_dict_metadata"))
        if type(storage) is not Dict or type(announced) is not Dict:
            raise ArchiveError(f"{name} is not what torch.distributed.checkpoint writes: there is no storage_data. {_DAMAGED}")
        stored = [_stored(index, info, name) for index, info in storage.pairs]
        return stored, _announced(announced.pairs, 2 * len(stored) + 1024, name)
    except DsNvcompError as err:
        raise err.at(path=str(path))


def _fields(node, what: str, name: str) -> Dict:
    """The attributes of an object. Those are few; hostile nodes with many, met often, would cost their product."""
    state = node.state if type(node) is Call else None
    if type(state) is not Dict or len(state.pairs) > _MAX_FIELDS:
        raise ArchiveError(f"{name} has something else where {what} should be. {_DAMAGED}")
    return state


def _stored(index, info, name):
    index, info = _fields(index, "an item's name", name), _fields(info, "an item's place", name)
    fqn = index.get("fqn")
    if not _is_text(fqn):
        raise ArchiveError(f"{name} has an item without a name. {_DAMAGED}")
    offsets = _numbers(index.get("offset"))
    if offsets is None and index.get("offset") is not None:
        raise ArchiveError(f"{name}: the chunk of an item is described by something else than a list of numbers. {_DAMAGED}", tensor=fqn)
    place = info.get("offset"), info.get("length")
    if _numbers(place) is None:
        raise ArchiveError(f"{name}: an item should be at some byte and have a length, found {_short(place)}. {_DAMAGED}", tensor=fqn)
    transforms = info.get("transform_descriptors")
    transforms = () if transforms is None else transforms.items if type(transforms) is Items else transforms
    if type(transforms) not in (tuple, list) or len(transforms) > _MAX_LIST or not all(map(_is_text, transforms)):
        raise ArchiveError(f"{name}: an item's transforms should be a list of names. {_DAMAGED}", tensor=fqn)
    return fqn, offsets, (_inside(info.get("relative_path"), fqn, name), *place, tuple(transforms))


def _inside(path, fqn, name) -> str:
    """A path that stays below the directory, in one spelling."""
    if not _is_text(path) or path.startswith("/") or "\0" in path or ".." in path.split("/") or posixpath.normpath(path) == ".":
        raise ArchiveError(f"{name}: an item should be in a file below the directory, found {_short(path)}. It is damaged or was made to "
                           "deceive.", tensor=fqn)
    return posixpath.normpath(path)


def _announced(pairs, most: int, name: str) -> dict:
    """{(fqn, offsets): (shape, dtype)}. More than `most` would be far more than are stored, and one list of them may be met many times."""
    found: dict = {}
    met = 0
    for fqn, node in pairs:
        if not _is_text(fqn):
            raise ArchiveError(f"{name} announces a tensor without a name. {_DAMAGED}")
        state = node.state if type(node) is Call else None
        if state is None:  # bytes have no attributes
            chunks, dtype = [None], None
        else:
            state = _fields(node, f"{fqn!r}", name)
            chunks, dtype = state.get("chunks"), _dtype(state.get("properties"))
            if type(chunks) is not Items:
                raise ArchiveError(f"{name} announces a tensor without a list of chunks. {_DAMAGED}", tensor=fqn)
            chunks = chunks.items
        met += len(chunks)
        if met > most:
            raise ArchiveError(f"{name} announces more than {most} chunks, and stores about half as many at most. {_DAMAGED}", tensor=fqn)
        for chunk in chunks:
            fields = None if chunk is None else _fields(chunk, f"a chunk of {fqn!r}", name)
            offsets, shape = (None, None) if fields is None else (_numbers(fields.get("offsets")), _numbers(fields.get("sizes")))
            if fields is not None and (offsets is None or shape is None):
                raise ArchiveError(f"{name}: a chunk is described by something else than lists of numbers. {_DAMAGED}", tensor=fqn)
            found[fqn, offsets] = shape, dtype
    return found


def _dtype(properties) -> str | None:
    state = properties.state if type(properties) is Call else None
    dtype = state[0] if type(state) is tuple and state else None
    return dtype.name if type(dtype) is Global and dtype.module == "torch" and _is_text(dtype.name) else None


def _numbers(node) -> tuple[int, ...] | None:
    """The tuple of numbers, or the torch.Size, that a node is; None if it is neither."""
    node = size_of(node)
    if type(node) is not tuple or len(node) > _MAX_LIST or any(type(n) is not int or not 0 <= n < 1 << 63 for n in node):
        return None
    return node


def _is_text(node) -> bool:
    return type(node) is str and 0 < len(node) <= _MAX_TEXT


def _short(node) -> str:
    """Never a whole tree: nodes may nest deeper than repr goes."""
    if type(node) is tuple:
        return f"({', '.join(map(_short, node[:4]))})"
    if type(node) is int and node.bit_length() > 256:
        return "a huge number"
    return repr(node)[:200] if type(node) in (str, int, float, bool, type(None)) else type(node).__name__
