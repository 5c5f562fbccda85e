"""Is what was written still there? Everything that can be told without decoding or executing anything, and all of it reported.

Of a file: the zip directory and headers, the checksum of every record, the pickle, every compressed storage's header, chunk
table and chunk checksums, and tensors that lie inside their storages. Of a distributed checkpoint (DCP, Megatron's `torch_dist`) the
same of each item, and that items and files fit together. Of a DeepSpeed or Megatron directory: `latest` or its like, and files that the
names of the others announce. Memory is bounded by one chunk or `SLICE`, whichever is larger. `decode=True` decodes too, where
the codec can run. Of tensors that are stored as their difference from weights in another file (link.py), that file has to be there and
have such weights; whether they are the right ones is told with `decode`.
"""
from __future__ import annotations

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Iterable

import numpy as np
from isal.isal_zlib import crc32

from ..archive import link
from ..archive.records import SLICE, Record, Records
from ..archive.scan import Encoding, FileScan, Items, Stored, scan_records
from ..errors import ArchiveError, ChecksumError, CodecUnavailableError, DirectoryError, DsNvcompError
from . import STATES_SUFFIX, distributed, manifest

TORCH_SUFFIXES = (".pt", ".pth", ".bin")
LEGACY_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"  # torch.save before 1.6: no checksums to verify


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. `kind` is the error class that a reader would meet; `tensor` and `chunk` are None where not
    known.
    """
    path: str
    message: str
    tensor: str | None = None
    chunk: int | None = None
    kind: str = "DirectoryError"

    @classmethod
    def of(cls, error: DsNvcompError, path) -> "Problem":
        return cls(error.path or os.fspath(path), error.message, error.tensor, error.chunk, type(error).__name__)

    def __str__(self):
        where = [self.path] + ([f"tensor {self.tensor}"] if self.tensor else []) + \
            ([f"chunk {self.chunk}"] if self.chunk is not None else [])
        return f"{', '.join(where)}: {self.message}"


@dataclass
class Tally:
    """What a verification has looked at. `not_decoded` are tensors whose codec cannot run here; `unchecked` files without
    checksums, `opaque` items of distributed checkpoints that are no torch zips: bytes, or what another package has transformed.
    """
    files: int = 0
    bytes: int = 0
    tensors: int = 0
    compressed: int = 0
    chunks: int = 0
    not_decoded: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    opaque: list[str] = field(default_factory=list)


def verify(path, **options) -> list[Problem]:
    """`verify_tree` or `verify_file`, whichever `path` is. Raises `DirectoryError` where there is nothing."""
    if os.path.isdir(path):
        return verify_tree(path, **options)
    if not os.path.exists(path):
        raise DirectoryError("There is no such file or directory.", path=os.fspath(path))
    refuse_parts(path)
    return verify_file(path, **options)


def refuse_parts(path) -> None:
    """Raise `DirectoryError` for a file that means nothing without its directory."""
    if os.path.isfile(path) and os.fspath(path).endswith((distributed.SUFFIX, distributed.METADATA)):
        raise DirectoryError("The file is a part of a distributed checkpoint. Name the directory that it is in.", path=os.fspath(path))


def verify_file(path, *, decode: bool = False, tally: Tally | None = None,
                progress: Callable[[int], None] = lambda stored_bytes: None) -> list[Problem]:
    """What is wrong with a torch zip, compressed or plain; an empty list for nothing. `progress` gets file bytes as they are
    read.
    """
    return _verify_file(path, decode, tally or Tally(), progress)[0]


def verify_tree(path, *, decode: bool = False, tally: Tally | None = None,
                progress: Callable[[int], None] = lambda stored_bytes: None) -> list[Problem]:
    """What is wrong with the torch files under a directory, and with the DeepSpeed, Megatron and distributed checkpoints in it: a save_dir,
    a tag's or an iteration's, or any tree.

    Hidden names are skipped: they are saves that are not finished. Raises `DirectoryError` if no torch file is there at all.
    """
    root, tally, problems = Path(path), tally or Tally(), []
    found = False
    for directory, names in _walk(root):
        scans: dict[str, FileScan] = {}
        for name in names:
            file = directory / name
            kind = _kind(file)
            if kind is None:
                continue
            found = True
            if kind == "legacy":
                tally.unchecked.append(str(file))
                continue
            wrong, scanned = _verify_file(file, decode, tally, progress)
            problems += wrong
            if scanned is not None:
                scans[name] = scanned
        if distributed.is_distributed(directory):
            found = True
            problems += _verify_distributed(directory, decode, tally, progress)
        problems += _missing(directory, names, scans)
        problems += _missing_ranks(directory)
        problems += _unlike_manifest(directory)
        if "latest" in names:
            found = True
            problems += _check_latest(directory)
        if TRACKER in names:
            found = True
            problems += _check_tracker(directory)
    if not found:
        raise DirectoryError("No checkpoint is here: neither a torch file (*.pt, *.pth, *.bin), nor a distributed checkpoint (.metadata), "
                             "nor a `latest`.", path=str(root))
    return problems


def _unlike_manifest(directory: Path) -> list[Problem]:
    try:
        return [Problem.of(DirectoryError(f"{message[0].upper()}{message[1:]}. Restore it from a copy.", path=path), path)
                for path, message in manifest.problems(directory)]
    except DirectoryError as err:
        return [Problem.of(err, directory / manifest.NAME)]


def sizes(path) -> int:
    """Bytes that verifying `path` will read: the total of `progress`."""
    if not os.path.isdir(path):
        return os.path.getsize(path) if os.path.exists(path) else 0
    return sum((directory / name).stat().st_size for directory, names in _walk(Path(path)) for name in names
               if _kind(directory / name) == "zip" or name.endswith(distributed.SUFFIX))


def _walk(root: Path) -> Iterable[tuple[Path, list[str]]]:
    for directory, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield Path(directory), sorted(name for name in names if not name.startswith("."))


def _kind(file: Path) -> str | None:
    """`zip` for what should be a torch zip, `legacy` for torch's older format, None for another file."""
    if not file.name.endswith(TORCH_SUFFIXES) or not file.is_file():
        return None
    with open(file, "rb") as opened:
        start = opened.read(len(LEGACY_START))
    if start == LEGACY_START:
        return "legacy"
    # Other suffixes are used for other things too; these names only DeepSpeed gives.
    return "zip" if start[:4] == b"PK\3\4" or file.name.endswith(STATES_SUFFIX) else None


def _verify_file(path, decode, tally, progress) -> tuple[list[Problem], FileScan | None]:
    tally.files += 1
    with suppress(OSError):
        tally.bytes += os.path.getsize(path)
    return _verify_zip(path, decode, tally, progress)


def _verify_zip(path, decode, tally, progress, item: distributed.Item | None = None) -> tuple[list[Problem], FileScan | None]:
    """Of a torch zip: a file, or an item of one."""
    errors: list[DsNvcompError] = []
    scanned = None
    try:
        with Records(path, errors, **({"start": item.start, "length": item.length} if item else {})) as records:
            try:
                scanned = distributed.scan_item(records, item) if item else scan_records(records)
            except DsNvcompError as err:  # without its pickle a file still has records to check
                errors.append(err)
            _check_records(records, scanned, tally, progress)
            if scanned is not None:
                tally.tensors += len(scanned.rows)
                if decode:
                    _decode_all(records, scanned, tally)
                else:
                    _check_links(records, scanned)
    except DsNvcompError as err:
        errors.append(err)
    except OSError as err:
        errors.append(ArchiveError(f"The file cannot be read: {err.strerror or err}.", path=os.fspath(path)))
    return [Problem.of(err.at(tensor=item and item.name), path) for err in errors], scanned


def _check_records(records: Records, scanned: FileScan | None, tally: Tally, progress) -> None:
    """Read every record once: its own checksum, and those of the chunks in it."""
    owners: dict[str, Stored] = {}
    for stored in scanned.storages if scanned else []:
        owners.setdefault(stored.record, stored)
    for name, record in records.records.items():
        owner = owners.get(name)
        encoding = owner.encoding if owner else None
        tally.compressed += encoding is not None
        crc = 0
        try:
            for data in _chunks(records, record, encoding, owner, tally) if encoding else records.slices(record):
                crc = crc32(data, crc)
                progress(len(data))
        except DsNvcompError as err:
            records.problem(err.at(tensor=owner.name if owner else None))
            continue
        if crc != record.crc:
            records.problem(ChecksumError(
                f"Record {name!r} has checksum {crc:#010x}, expected {record.crc:#010x}. The file is damaged; restore it "
                "from a copy, or resume from an earlier checkpoint.", tensor=owner.name if owner else None))


def _chunks(records: Records, record: Record, encoding: Encoding, owner: Stored, tally: Tally):
    """The data of a compressed record in slices, each chunk's checksum compared on the way."""
    header, table = encoding.header, encoding.table
    yield records.read(record, 0, header.data_start)
    spans = table.chunk_bytes
    ends = np.cumsum(spans)
    first = 0
    while first < header.chunks:
        start = int(ends[first] - spans[first])
        last = max(first + 1, int(np.searchsorted(ends, start + SLICE, side="right")))
        data = memoryview(records.read(record, header.data_start + start, int(ends[last - 1]) - start))
        for c in range(first, last):
            found = crc32(data[int(ends[c] - spans[c]) - start:int(ends[c]) - start])
            if found != table.crc[c]:
                records.problem(ChecksumError(
                    f"The stored bytes of a chunk have checksum {found:#010x}, expected {int(table.crc[c]):#010x}. The file "
                    "is damaged; restore it from a copy, or resume from an earlier checkpoint.", tensor=owner.name, chunk=c))
        tally.chunks += last - first
        yield data
        first = last


def _check_links(records: Records, scanned: FileScan) -> None:
    """Whether what is linked is there. Whether it is what was linked takes decoding."""
    for stored in scanned.storages:
        if stored.encoding is not None and stored.encoding.linked is not None:
            try:
                link.check(stored.encoding.linked, records.path)
            except DsNvcompError as err:
                records.problem(err.at(tensor=stored.name))


def _decode_all(records: Records, scanned: FileScan, tally: Tally) -> None:
    import torch

    from ..pipeline import decode_payload
    for stored in scanned.storages:
        if stored.encoding is None:
            continue
        encoding = stored.encoding
        try:
            payload = bytearray(records.read(records.records[stored.record], 0, stored.stored_bytes))
            decoded = decode_payload(torch.frombuffer(payload, dtype=torch.uint8), (encoding.header, encoding.table, encoding.codec),
                                     trusted=False)
            if encoding.linked is not None:
                link.follow(encoding.linked, decoded, records.path)
        except CodecUnavailableError:
            tally.not_decoded.append(f"{records.path}: {stored.name}")
        except ChecksumError:
            pass  # said already, with every chunk that has it
        except DsNvcompError as err:
            records.problem(err.at(tensor=stored.name))


def _verify_distributed(directory: Path, decode, tally, progress) -> list[Problem]:
    """Of a DCP directory: every item, and that items and files fit together."""
    try:
        listing = distributed.read_items(directory)
    except DsNvcompError as err:
        return [Problem.of(err, directory)]
    except OSError as err:
        return [Problem(str(directory / distributed.METADATA), f"The file cannot be read: {err.strerror or err}.", kind="ArchiveError")]
    problems, beyond = [], set()
    for item, error in distributed.faults(listing):
        problems.append(Problem.of(error, directory))
        beyond.add(item)
    problems += [Problem.of(error, directory) for error in distributed.leftovers(listing)]
    for file, items in distributed.by_file(listing).items():
        if not os.path.isfile(directory / file):
            continue
        tally.files += 1
        tally.bytes += os.path.getsize(directory / file)
        for item in items:
            if item not in beyond:
                problems += _verify_item(listing, item, decode, tally, progress)
    return problems


def _verify_item(listing: distributed.Listing, item: distributed.Item, decode, tally, progress) -> list[Problem]:
    path = listing.path(item)
    try:
        if not distributed.is_zip(listing, item):
            tally.opaque.append(f"{path}: {item.name}" + (f" ({', '.join(item.transforms)})" if item.transforms else ""))
            progress(item.length)
            return []
    except OSError as err:
        return [Problem(path, f"The file cannot be read: {err.strerror or err}.", item.name, kind="ArchiveError")]
    return _verify_zip(path, decode, tally, progress, item)[0]


def _check_latest(directory: Path) -> list[Problem]:
    latest = directory / "latest"
    try:
        with open(latest, "rb") as file:
            tag = file.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError) as err:
        return [Problem(str(latest), f"`latest` cannot be read: {err}. Write the name of a complete tag directory into it.")]
    if not tag:
        return [Problem(str(latest), "`latest` is empty. Write the name of a complete tag directory into it.")]
    if not (directory / tag).is_dir():
        return [Problem(str(latest), f"`latest` names {tag!r}, and there is no such directory beside it. The save did not "
                                     "finish, or the directory was removed; write the name of a complete tag directory into "
                                     "it.")]
    return []


TRACKER = "latest_checkpointed_iteration.txt"


def _check_tracker(directory: Path) -> list[Problem]:
    """Megatron's `latest`: the number of an iteration, or `release`."""
    tracker = directory / TRACKER
    mend = "Write the number of a complete iteration into it."
    try:
        with open(tracker, "rb") as file:
            said = file.read(4096).decode().strip()
    except (OSError, UnicodeDecodeError) as err:
        return [Problem(str(tracker), f"{TRACKER} cannot be read: {err}. {mend}")]
    if said != "release" and not re.fullmatch(r"[0-9]{1,18}", said):
        return [Problem(str(tracker), f"{TRACKER} should have the number of an iteration, found {said[:50]!r}. {mend}")]
    name = said if said == "release" else f"iter_{int(said):07d}"
    if not (directory / name).is_dir():
        return [Problem(str(tracker), f"{TRACKER} names {said}, and there is no directory {name!r} beside it. The save did not finish, or "
                                      f"the directory was removed. {mend}")]
    names = os.listdir(directory / name)
    complete = any(map(_RANK.fullmatch, names)) or distributed.is_finished(directory / name)
    if not complete and not _is_of_another_kind(directory / name):
        return [Problem(str(tracker), f"{TRACKER} names {said}, and {name!r} is no complete checkpoint: it has neither a "
                                      f"{distributed.METADATA} nor directories of ranks. The save did not finish. {mend}")]
    return []


def _is_of_another_kind(iteration: Path) -> bool:
    """Whether Megatron says that it wrote the items in a format that is unknown here, such as zarr."""
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        backend = json.loads((iteration / "metadata.json").read_text()[:4096]).get("sharded_backend")
        return isinstance(backend, str) and backend not in ("torch_dist", "torch_dcp", "fsdp_dtensor")
    return False


_RANK = re.compile(r"mp_rank(?:_\d{2,9}){1,3}")


def _missing_ranks(directory: Path) -> list[Problem]:
    """Of Megatron's `torch` format: mp_rank_<tensor>[_<pipeline>][_<expert>]/model_optim_rng.pt. Each rank counts from 0 without gaps."""
    ranks = sorted(name for name in os.listdir(directory) if _RANK.fullmatch(name) and (directory / name).is_dir())
    problems = [Problem(str(directory / name / "model_optim_rng.pt"), "The file is missing: the directory of a rank has it. The rank did "
                                                                      "not finish its save; resume from another checkpoint.")
                for name in ranks if not (directory / name / "model_optim_rng.pt").exists()]
    numbers = [[int(n) for n in name.split("_")[2:]] for name in ranks]
    for column in range(max(map(len, numbers), default=0)):
        there = {row[column] for row in numbers if len(row) > column}
        missing = sorted(set(range(min(max(there), 1 << 16))) - there)
        if missing:
            some = ", ".join(map(str, missing[:8])) + (" ..." if missing[8:] else "")
            problems.append(Problem(str(directory), f"There are directories of ranks up to {max(there)} (number {column + 1} in mp_rank_*) "
                                                    f"and none of {some}. They did not finish their save, or were removed; resume from "
                                                    "another checkpoint."))
    return problems


_SHARD = re.compile(r"(?P<kind>(?:bf16_|fp16_)?zero_pp_rank_)(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_(?P<what>optim|model)_states\.pt")
_MODEL = re.compile(r"mp_rank_(?P<mp>\d+)_model_states\.pt")


def _missing(directory: Path, names: list[str], scans: dict[str, FileScan]) -> list[Problem]:
    """Files that the others announce: ranks count from 0 without gaps, and an optimizer shard says how many there are."""
    problems = []
    shards: dict[tuple[str, str, int], dict[int, str]] = {}  # (kind, what, mp): dp -> name
    models = {}
    for name in names:
        if match := _SHARD.fullmatch(name):
            shards.setdefault((match["kind"], match["what"], int(match["mp"])), {})[int(match["dp"])] = name
        elif match := _MODEL.fullmatch(name):
            models[int(match["mp"])] = name

    def report(name, why):
        problems.append(Problem(str(directory / name), f"The file is missing: {why}. A rank did not finish its save, or the "
                                                       "file was removed; resume from another checkpoint."))

    for mp in sorted(set(range(max(models, default=-1) + 1)) - set(models)):
        report(f"mp_rank_{mp:02d}_model_states.pt", f"there is one for rank {max(models)}")
    for kind, what in sorted({key[:2] for key in shards}):
        ranks = {mp: found for (k, w, mp), found in shards.items() if (k, w) == (kind, what)}
        most = max(max(found) + 1 for found in ranks.values())
        said = f"others reach data-parallel rank {most - 1}"
        for found in ranks.values():
            for name in found.values():
                count = _partitions(scans.get(name))
                if count > most:
                    most, said = count, f"{name} is one of {count} partitions"
        for mp in range(max(ranks) + 1):
            for dp in sorted(set(range(min(most, 1 << 20))) - set(ranks.get(mp, ()))):
                report(f"{kind}{dp}_mp_rank_{mp:02d}_{what}_states.pt", said)
    return problems


def _partitions(scanned: FileScan | None) -> int:
    """How many optimizer partitions a shard says there are, 0 where it does not. Expert groups have fewer; the largest
    counts.
    """
    count = scanned.value("optimizer_state_dict", "partition_count") if scanned else None
    counts = count.items if isinstance(count, Items) else [count]
    return max((n for n in counts if type(n) is int), default=0)
