"""Links: fp32 master weights in one file of a checkpoint, stored as their difference from the 16-bit weights in another.

The description of such a storage (`meta`, version 2) has a `link`: JSON with the `file` beside it, the `kind` of its weights, the
`fragments` of its tensors that follow one another in the storage, [name, first element, elements], and the `crc` of all those weights'
bytes (linked.py). Behind the last fragment is padding, whose weights are zeros. What torch.load reads tells its own path, so a link is
followed wherever the two files are still beside one another, by any reader.
"""
from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from typing import Sequence

import torch

from ..errors import DsNvcompError, FormatError, LinkError
from ..pipeline import Weights
from ..pipeline import link as pipeline
from .linked import Linked
from .part import decode_range
from .records import Records
from .scan import FileScan, TensorRow, scan_records

_MEND = "The two files belong together: restore both from one checkpoint, or resume from another."
PLACES = 1024  # of one storage that a link may refer to. We write one; each costs the decoding of a chunk


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


def follow(linked: Linked, data: torch.Tensor, path: str | None, *, trusted: bool = False) -> None:
    """`data` (uint8 [4 n]), decoded, are differences: make them the numbers, in place. `path` is the file that says so.

    Raises `LinkError` where the other file is not there, is damaged, or not the one that was linked; and what decoding raises that is no
    fault of the file's.
    """
    with _of(linked, path) as (sibling, records, parts):
        weights = torch.empty(2 * linked.count, dtype=torch.uint8, device=data.device)
        mapped = torch.UntypedStorage.from_file(sibling, False, records.bytes)
        for row, places in parts:
            _copy(records, mapped, row, places, weights, trusted)
        found = pipeline.digest(weights)
        if found != linked.crc:
            raise LinkError(f"The weights in {sibling!r} have checksum {found:#010x}, expected {linked.crc:#010x}: they are not those that "
                            f"the tensor is stored as its difference from. {_MEND}")
    pipeline.restore(data, Weights(weights, linked.kind))


def check(linked: Linked, path: str | None) -> None:
    """Raise `LinkError` unless the other file is there and has tensors that could be the linked ones. Nothing is decoded."""
    with _of(linked, path):
        pass


class _of:
    """The file that is linked, opened: (its path, its records, [(a row of each storage, [(first byte, bytes, place in bytes)])])."""

    def __init__(self, linked: Linked, path: str | None):
        self._linked, self._path, self._sibling, self._records = linked, path, None, None

    def __enter__(self):
        try:
            return self._open()
        except BaseException as err:
            self.__exit__(type(err), err, None)
            raise

    def _open(self):
        linked = self._linked
        if self._path is None:
            raise LinkError(f"The tensor is stored as its difference from the weights in {linked.file!r}, and this reader does not say "
                            "where it reads from. Load the file by its path, or make it independent with `ds-nvcomp unpack`.")
        self._sibling = sibling = beside(self._path, linked.file)
        status = os.stat(sibling)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{sibling!r} is not a file")
        self._records = Records(sibling)
        scanned = _scanned(sibling, status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size)
        found = _by_storage(scanned, linked, sibling)
        for row, _ in found:
            record = self._records.records.get(row.storage.record)
            if record is None or record.size != row.storage.stored_bytes:
                raise LinkError(f"{sibling!r} was replaced while it was read. Load again.")
        return sibling, self._records, found

    def __exit__(self, kind, err, traceback):
        if self._records is not None:
            self._records.__exit__()
        if isinstance(err, OSError) and not isinstance(err, DsNvcompError):
            raise LinkError(f"The tensor is stored as its difference from the weights in {self._linked.file!r}, which cannot be read "
                            f"beside it ({err.strerror or err}). {_MEND}", path=self._path) from err
        if isinstance(err, FormatError) and not isinstance(err, LinkError):
            raise LinkError(f"The tensor is stored as its difference from the weights in {self._sibling!r}, which cannot be "
                            f"read: {type(err).__name__}: {err}. {_MEND}", path=self._path) from err
        if isinstance(err, DsNvcompError):
            err.at(path=self._path)


def beside(path: str, file: str) -> str:
    """The file of that name beside `path`, as that is given; where none is there and `path` is a symbolic link, beside what it leads to."""
    given = os.path.join(os.path.dirname(path), file)
    real = os.path.join(os.path.dirname(os.path.realpath(path)), file)
    return real if not os.path.lexists(given) and os.path.exists(real) else given


@lru_cache(maxsize=1)
def _scanned(path: str, *identity: int) -> FileScan:
    with Records(path) as records:
        return scan_records(records)


def _by_storage(scanned: FileScan, linked: Linked, sibling: str) -> list[tuple[TensorRow, list]]:
    rows = {row.name: row for row in reversed(scanned.rows)}
    found: dict[str, tuple[TensorRow, list]] = {}
    at = 0
    for name, first, numbers in linked.fragments:
        row = rows.get(name)
        if row is None or row.dtype != linked.kind or not _is_contiguous(row) or first + numbers > math.prod(row.shape) or \
                row.storage.encoding is not None and row.storage.encoding.linked is not None:
            raise LinkError(f"{sibling!r} has no tensor {name[:120]!r} with elements {first} to {first + numbers} of {linked.kind} one "
                            f"after another: it is not the file that was linked. {_MEND}")
        found.setdefault(row.storage.record, (row, []))[1].append((2 * (row.offset + first), 2 * numbers, at))
        at += 2 * numbers
    return list(found.values())


def _copy(records: Records, mapped, row: TensorRow, places: list, weights: torch.Tensor, trusted: bool) -> None:
    """Parts of one storage to their places. What lies between them is not decoded: nobody knows how much that is."""
    together: list[list] = []
    for start, nbytes, at in sorted(places):
        if not together or start > together[-1][1]:
            together.append([start, start, []])
        together[-1][1] = max(together[-1][1], start + nbytes)
        together[-1][2].append((start, nbytes, at))
    if len(together) > PLACES:
        raise LinkError(f"A link refers to {len(together)} places of one storage; more than {PLACES} are not read. {_MEND}")
    for first, stop, parts in together:
        storage, begins = decode_range(records, mapped, row, (first, stop), weights.device, trusted)
        data = torch.empty(0, dtype=torch.uint8, device=weights.device).set_(storage)
        for start, nbytes, at in parts:
            weights[at:at + nbytes] = data[start - begins:start - begins + nbytes]


def _is_contiguous(row: TensorRow) -> bool:
    expected = 1
    for size, stride in zip(reversed(row.shape), reversed(row.stride or ())):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return row.stride is not None
