"""Write the files of a distributed checkpoint anew with their items packed or unpacked, one item in memory at a time, and `.metadata` with
where they are now. Each item is read back from the new file and compared; then the new `.metadata` is read as any other.
"""
from __future__ import annotations

import os
import pickle
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Callable

from isal.isal_zlib import crc32

from ..archive.records import SLICE, Records, is_torch_zip, opened_range
from ..archive.scan import FileScan
from ..errors import ArchiveError, ChecksumError, DirectoryError, DsNvcompError
from .distributed import Item, Listing, by_file, faults, is_zip, read_items, scan_item


class Progress:
    """What a conversion tells while it works; override what is of interest."""

    def total(self, stored_bytes: int) -> None:
        """Bytes of the files that will be converted."""

    def file(self, name: str) -> None:
        """A file is begun."""

    def advance(self, stored_bytes: int) -> None:
        """So many bytes of it, or all the rest of it, are done."""


class Portion:
    """Progress through so many stored bytes, told by work that may count otherwise: what it says beyond is left out."""

    def __init__(self, progress: Progress, stored_bytes: int):
        self._progress, self._left = progress, stored_bytes

    def note(self, done: int) -> None:
        done = min(done, self._left)
        self._left -= done
        self._progress.advance(done)

    def finish(self) -> None:
        self.note(self._left)


@contextmanager
def explaining(path, tensor: str | None = None):
    """Whatever executing and writing a pickle raises, as this package's errors, and OSError as it is."""
    try:
        yield
    except DsNvcompError as err:
        raise err.at(path=str(path), tensor=tensor)
    except ModuleNotFoundError as err:
        raise ArchiveError(f"The file's pickle needs the module {err.name!r}, which is not installed here. Install it, "
                           "or convert where training runs.", path=str(path), tensor=tensor) from err
    except OSError:
        raise
    except Exception as err:  # whatever a pickle's classes and torch raise
        raise ArchiveError(f"The file could not be converted: {type(err).__name__}: {err}. `ds-nvcomp verify` tells "
                           "whether it is damaged.", path=str(path), tensor=tensor) from err


def plan(listing: Listing, wanted: Callable[[FileScan], bool]) -> dict[str, set[Item]]:
    """The items of each file that are torch zips and `wanted`. Raises a `FormatError` or `DirectoryError` for damaged ones."""
    for _, error in faults(listing):
        raise error
    found: dict[str, set[Item]] = {}
    for item in listing.items:
        path = listing.path(item)
        if is_zip(listing, item) and (item.offsets is not None or is_torch_zip(path, item.start, item.length)):
            with Records(path, start=item.start, length=item.length) as records:
                if wanted(scan_item(records, item)):
                    found.setdefault(item.file, set()).add(item)
    return found


class Repacking:
    """`write(obj, file, note)` appends an object to a file. With `must_shrink`, plain items that it does not make smaller stay as they are.

    `run` raises `FormatError`s for damaged items, `ChecksumError` where what was written reads differently, `DirectoryError` and OSError.
    """

    def __init__(self, listing: Listing, wanted: dict[str, set[Item]], write, *, must_shrink: bool, check: bool, progress: Progress):
        self.listing, self.wanted, self.write = listing, wanted, write
        self.must_shrink, self.check, self.progress = must_shrink, check, progress
        self._places = {item: (item.start, item.length) for item in listing.items}

    def run(self, new: Path) -> list[str]:
        """Write the files of the plan, and `.metadata`, into the directory `new`, and return the names of those that have converted items.

        The other files are to be there already, as they were.
        """
        files = by_file(self.listing)
        converted = [file for file in self.wanted if self._file(files[file], self.listing.directory / file, new / file)]
        for name in self.listing.metadata:
            self._metadata(name, new / name)
        self._check_places(new)
        return converted

    def _file(self, items: list[Item], source: Path, target: Path) -> bool:
        self.progress.file(os.path.relpath(source, self.listing.directory.parent))
        at, converted = 0, False
        with open(source, "rb") as old, open(target, "xb+") as new:
            for item in items:
                self._copy(old, new, at, item.start - at)  # what is no item's
                start = new.tell()
                if item in self.wanted[item.file] and self._item(item, old, new):
                    converted = True
                else:
                    self._copy(old, new, item.start, item.length)
                self._places[item] = start, new.tell() - start
                at = item.end
            self._copy(old, new, at, os.fstat(old.fileno()).st_size - at)
        return converted

    def _item(self, item: Item, old: BinaryIO, new: BinaryIO) -> bool:
        """Append `item` converted; False, and nothing is appended, if that does not make it smaller."""
        from .compare import assert_same
        from .locations import Loaded
        source, start, done = self.listing.path(item), new.tell(), Portion(self.progress, item.length)
        with explaining(source, item.name):
            compressed = self._source(item).compressed
            loaded = Loaded(opened_range(old, item.start, item.length))
            with loaded as obj:
                self.write(obj, new, done.note)
            new.flush()
            length = new.tell() - start
            if self.must_shrink and not compressed and length >= item.length:
                new.seek(start)
                new.truncate()
                return False
            if self.check:
                assert_same(loaded.object, Loaded(opened_range(new, start, length)).object, path=source)
        done.finish()
        return True

    def _source(self, item: Item) -> FileScan:
        """What is in an item. Checksums of what is plain are compared: torch.load does not, and what is damaged must not get new ones."""
        with Records(self.listing.path(item), start=item.start, length=item.length) as records:
            scanned = scan_item(records, item)
            for record in records.records.values() if self.check and not scanned.compressed else ():
                crc = 0
                for data in records.slices(record):
                    crc = crc32(data, crc)
                if crc != record.crc:
                    raise ChecksumError(f"Record {record.name!r} has checksum {crc:#010x}, expected {record.crc:#010x}. The file is "
                                        "damaged; restore it from a copy, or resume from an earlier checkpoint.")
            return scanned

    def _copy(self, old: BinaryIO, new: BinaryIO, start: int, length: int) -> None:
        """Append bytes of `old`, and read them back."""
        for at in range(start, start + length, SLICE):
            size = min(SLICE, start + length - at)
            data, to = os.pread(old.fileno(), size, at), new.tell()
            if len(data) != size:
                raise DirectoryError("The file has become shorter while it was read. Convert when nothing writes here.", path=old.name)
            new.write(data)
            new.flush()
            if self.check and os.pread(new.fileno(), size, to) != data:
                raise DirectoryError("The copy of a file reads differently from the file. The disk or memory is faulty; the source is "
                                     "as it was.", path=old.name)
            self.progress.advance(size)

    def _metadata(self, name: str, target: Path) -> None:
        source = self.listing.directory / name
        places = {item.key: place for item, place in self._places.items()}
        with explaining(source):
            with open(source, "rb") as file:
                metadata = pickle.load(file)
            for index, info in metadata.storage_data.items():
                info.offset, info.length = places[name, index.fqn, None if index.offset is None else tuple(index.offset)]
            with open(target, "xb") as file:
                pickle.dump(metadata, file)

    def _check_places(self, new: Path) -> None:
        """The new `.metadata` says of each item where it was put, and those places fit the files."""
        found = read_items(new)
        expected = {item.key: (item.file, *place) for item, place in self._places.items()}
        if expected != {item.key: (item.file, item.start, item.length) for item in found.items} or next(faults(found), None):
            raise ChecksumError("What was read back has other items than what was written. The source is untouched. Please report it.",
                                path=str(self.listing.directory / self.listing.metadata[0]))
