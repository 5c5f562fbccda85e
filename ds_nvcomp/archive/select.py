"""Some tensors of a file, by name: what is not asked for is not read. Nothing of the pickle is executed."""
from __future__ import annotations

import fnmatch
import os
from typing import Callable

import torch

from ..errors import ArchiveError, DsNvcompError
from ..pipeline import decode_payload
from .link import follow
from .part import checked
from .reader import restorer
from .records import Records
from .scan import Stored, scan_records


def load_selected(path, select: str | Callable[[str], bool], map_location=None) -> dict[str, torch.Tensor]:
    """{name: tensor} of the tensors that `select` matches, each on the device that `map_location` (torch.load's) names. Tensors that share
    a storage in the file share one here. A pattern that matches nothing gives an empty dict.

    Raises as `load` does, and `ArchiveError` for a tensor that is met without a shape (a storage by itself).
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError("select takes the path of a file, found " + type(path).__name__)
    matches = select if callable(select) else lambda name: any(fnmatch.fnmatchcase(name, one.strip()) for one in select.split("|"))
    place, storages, found = restorer(map_location), {}, {}
    with Records(path) as records:
        mapped = torch.UntypedStorage.from_file(os.fspath(path), False, os.stat(path).st_size)
        for row in scan_records(records).rows:
            if matches(row.name):
                try:
                    if row.stride is None:
                        raise ArchiveError("This is a storage by itself, and not a tensor. Load the whole file for it.")
                    if row.storage.record not in storages:
                        storages[row.storage.record] = _storage(records, mapped, row.storage, place)
                    storage = storages[row.storage.record]
                    empty = torch.empty(0, dtype=getattr(torch, row.dtype), device=storage.device)
                    found[row.name] = empty.set_(storage, row.offset, row.shape, row.stride)
                except DsNvcompError as err:
                    raise err.at(path=os.fspath(path), tensor=row.name)
    return found


def _storage(records: Records, mapped: torch.UntypedStorage, stored: Stored, place) -> torch.UntypedStorage:
    record = records.records[stored.record]
    if record.start is None:
        raise ArchiveError(f"Record {record.name!r} is deflated by zip, which its kind never is. Unpack the file and zip it with `zip -0`.")
    data = torch.empty(0, dtype=torch.uint8).set_(mapped, record.start, (stored.stored_bytes,), (1,))
    if stored.encoding is not None:
        device = place(torch.UntypedStorage(0), stored.location).device
        encoding = stored.encoding
        decoded = decode_payload(data, (encoding.header, encoding.table, encoding.codec), device=device, trusted=False)
        if encoding.linked is not None:
            follow(encoding.linked, decoded, records.path)
        return decoded.untyped_storage()
    return place(checked(data, record).untyped_storage(), stored.location)
