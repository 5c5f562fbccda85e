"""`load`: torch.load, straight from the file to the device, with errors that say which file."""
from __future__ import annotations

import os
import zipfile
from typing import Callable

import torch

from ..encoding.format import MAGIC
from ..errors import DsNvcompError
from .storage import leaving


def load(f, map_location=None, *, weights_only: bool | None = None, mmap: bool | None = None,
         select: str | Callable[[str], bool] | None = None, **pickle_load_args):
    """Load what `save` or `torch.save` wrote; the arguments are torch.load's. Tensors are decoded on the device `map_location` names.

    Compressed tensors of a file at a path go from it to their device tile by tile, on all threads, and never whole through host memory.
    With `mmap`, what is stored plain stays mapped, as torch.load does it. The file is mapped while it is read in any case, so it must not be
    cut short meanwhile; replacing it by another, as saves do, is fine.

    With `select`, only the tensors it matches are read and decoded, and returned as {name: tensor}; no pickle is executed. It is a
    pattern of names as `ds-nvcomp inspect` shows them (`optimizer_state_dict.*.exp_avg`, several separated by `|`), or a function of
    a name.

    Raises a `FormatError` naming file, tensor and chunk for damaged bytes, `CodecUnavailableError` where the codec cannot run
    on this machine, and whatever torch.load raises.
    """
    try:
        if select is not None:
            from .select import load_selected
            return load_selected(f, select, map_location)
        if not isinstance(f, (str, os.PathLike)) or not zipfile.is_zipfile(f):
            return torch.load(f, map_location=map_location, weights_only=weights_only, mmap=mmap, **pickle_load_args)
        placing = _Placing(map_location, keep_mapped=bool(mmap))
        with leaving(placing.bound):
            found = torch.load(f, map_location=placing, weights_only=weights_only, mmap=True, **pickle_load_args)
        if placing.bound:  # bytes that look like a payload and are a tensor: it is not where it should be
            return torch.load(f, map_location=map_location, weights_only=weights_only, mmap=mmap, **pickle_load_args)
        return found
    except DsNvcompError as err:
        raise err.at(path=os.fspath(f)) if isinstance(f, (str, os.PathLike)) else err


class _Placing:
    """A map_location that leaves payloads in the mapped file, and notes in `bound` where `map_location` would have them."""

    def __init__(self, map_location, keep_mapped: bool):
        self._place, self._keep_mapped = restorer(map_location), keep_mapped
        self.bound: dict[int, torch.device] = {}
        self._keep = []  # storages in `bound`, so that their identity is not reused

    def __call__(self, storage, location):
        if storage.device.type == "cpu" and _looks_like_a_payload(storage):
            device = self._place(torch.UntypedStorage(0), location).device
            if device.type != "meta":
                self.bound[storage._cdata] = device
                self._keep.append(storage)
                return storage
        placed = self._place(storage, location)
        return placed if self._keep_mapped or placed.device.type != "cpu" else placed.clone()


def restorer(map_location) -> Callable:
    """What torch.load makes of a map_location: a function of a storage and its location that returns the storage where it shall be."""
    return torch.serialization._get_restore_location(map_location)


def _looks_like_a_payload(storage) -> bool:
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage, 0, (min(len(MAGIC), storage.nbytes()),), (1,)).numpy()) == MAGIC
