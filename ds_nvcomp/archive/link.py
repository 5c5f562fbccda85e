"""Links: fp32 master weights in one file of a checkpoint, stored as their difference from the 16-bit weights in another.

The description of such a storage (`meta`, version 2) has a `link`: JSON with the `file` beside it, the `kind` of its weights, the
`fragments` of its tensors that follow one another in the storage, [name, first element, elements], and the `crc` of all those weights'
bytes. Behind the last fragment is padding, whose weights are zeros. What torch.load reads tells its own path, so a link is followed
wherever the two files are still beside one another, by any reader.
"""
from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Sequence

import torch

from ..encoding.link import KINDS
from ..errors import LinkError
from ..pipeline import Weights
from ..pipeline import link as pipeline
from .part import decode_range
from .records import Records
from .scan import FileScan, TensorRow, scan_records

_FREE = "restore both from one checkpoint, or resume from another"


@dataclass(frozen=True)
class Link:
    """The 16-bit weights of fp32 numbers that are in memory one after another, and where they will be in a file named `file`."""
    weights: Weights
    file: str
    fragments: Sequence[tuple[str, int, int]]
    digest: pipeline.Digest | None = None

    def of(self, count: int) -> "Link":
        """For the first `count` numbers."""
        fragments, left = [], min(count, self.weights.data.numel() // 2)
        weights = Weights(self.weights.data[:2 * left], self.weights.kind)
        for name, first, numbers in self.fragments:
            if left > 0:
                fragments.append((name, first, min(numbers, left)))
                left -= numbers
        return Link(weights, self.file, fragments, pipeline.Digest(weights.data))

    def fits(self, master: torch.Tensor) -> bool:
        """Whether `master` (uint8 [4 n]) was rounded to these weights, or nearly so."""
        return pipeline.fits(master, self.weights)

    def __str__(self) -> str:
        """What a description says of what `of` returned."""
        return json.dumps({"file": self.file, "kind": self.weights.kind, "crc": self.digest.value,
                           "fragments": self.fragments}, separators=(",", ":"))


def follow(text: str, data: torch.Tensor, directory, *, trusted: bool = False) -> None:
    """`data` (uint8 [4 n]), decoded, are differences: make them the numbers, in place. `directory` is where the file is that says so.

    Raises `LinkError` where the other file is not there, or not the one that was linked, and its own `FormatError`s.
    """
    link = _parse(text, data.numel() // 4)
    if directory is None:
        raise LinkError(f"The tensor is stored as its difference from the weights in {link.file!r}, and this reader does not say where it "
                        "reads from. Load the file by its path, or make it independent with `ds-nvcomp unpack`.")
    pipeline.restore(data, _weights(Path(directory) / link.file, link, data.device, trusted))


@dataclass(frozen=True)
class _Parsed:
    file: str
    kind: str
    crc: int
    fragments: list[tuple[str, int, int]]

    @property
    def count(self) -> int:
        return sum(numbers for _, _, numbers in self.fragments)


def _parse(text: str, count: int) -> _Parsed:
    """Validate what a file says of a link of a storage of `count` numbers."""
    try:
        found = json.loads(text)
        link = _Parsed(found["file"], found["kind"], found["crc"], [(name, first, numbers) for name, first, numbers in found["fragments"]])
        sound = link.kind in KINDS and type(link.file) is str and link.file not in ("", ".", "..") and os.path.basename(link.file) == link.file \
            and type(link.crc) is int and all(type(name) is str and type(first) is type(numbers) is int and 0 <= first < 1 << 62
                                              and 0 < numbers <= count for name, first, numbers in link.fragments) and link.count <= count
    except (ValueError, KeyError, TypeError, RecursionError):
        sound = False
    if not sound:
        raise LinkError(f"The link {str(text)[:200]!r} is not what ds_nvcomp writes. The file is damaged; restore it from a copy.")
    return link


def _weights(path: Path, link: _Parsed, device, trusted: bool) -> Weights:
    """The linked weights on `device`, checked."""
    try:
        status = os.stat(path)
        scanned = _scanned(os.fspath(path), status.st_mtime_ns, status.st_size)
        weights = torch.empty(2 * link.count, dtype=torch.uint8, device=device)
        with Records(path) as records:
            mapped = torch.UntypedStorage.from_file(os.fspath(path), False, status.st_size)
            for row, parts in _by_storage(scanned, link, path).values():
                _copy(records, mapped, row, parts, weights, trusted)
    except OSError as err:
        raise LinkError(f"The tensor is stored as its difference from the weights in {link.file!r}, which cannot be read "
                        f"({err.strerror or err}). The two files belong together: {_FREE}.") from err
    found = pipeline.digest(weights)
    if found != link.crc:
        raise LinkError(f"The weights in {link.file!r} have checksum {found:#010x}, expected {link.crc:#010x}: they are not those of this "
                        f"checkpoint. The two files belong together: {_FREE}.")
    return Weights(weights, link.kind)


@lru_cache(maxsize=1)
def _scanned(path: str, mtime: int, size: int) -> FileScan:
    with Records(path) as records:
        return scan_records(records)


def _by_storage(scanned: FileScan, link: _Parsed, path: Path) -> dict[str, tuple[TensorRow, list]]:
    """{record: (a row of it, [(first byte in the storage, bytes, place among the weights in bytes)])}."""
    rows = {row.name: row for row in reversed(scanned.rows)}
    found: dict[str, tuple[TensorRow, list]] = {}
    at = 0
    for name, first, numbers in link.fragments:
        row = rows.get(name)
        if row is None or row.dtype != link.kind or not _is_contiguous(row) or first + numbers > _elements(row.shape) or \
                row.storage.encoding is not None and row.storage.encoding.link is not None:
            raise LinkError(f"The file has no tensor {name!r} with elements {first} to {first + numbers} of {link.kind} one after another. "
                            f"It is not the file that was linked: {_FREE}.", path=os.fspath(path))
        found.setdefault(row.storage.record, (row, []))[1].append((2 * (row.offset + first), 2 * numbers, at))
        at += 2 * numbers
    return found


def _copy(records: Records, mapped, row: TensorRow, parts: list, weights: torch.Tensor, trusted: bool) -> None:
    """Parts of one storage to their places."""
    wanted = min(start for start, _, _ in parts), max(start + nbytes for start, nbytes, _ in parts)
    storage, begins = decode_range(records, mapped, row, wanted, weights.device, trusted)
    data = torch.empty(0, dtype=torch.uint8, device=weights.device).set_(storage)
    for start, nbytes, at in parts:
        weights[at:at + nbytes] = data[start - begins:start - begins + nbytes]


def _elements(shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _is_contiguous(row: TensorRow) -> bool:
    expected = 1
    for size, stride in zip(reversed(row.shape), reversed(row.stride or ())):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return row.stride is not None
