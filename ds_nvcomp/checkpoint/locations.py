"""Load a file on the CPU and save it again with every tensor's own location (`cuda:3`) kept in the file.

torch.save writes where a storage is; a converter has everything on the CPU, and would turn a file that loads to the GPU into
one that does not. torch asks registered taggers for a storage's location first, so ours answers for the storages it has loaded.
"""
from __future__ import annotations

import os
import pickle
import threading

import torch

_local = threading.local()  # .known while a `Loaded` is being saved: {storage identity: location}
_registered = threading.Event()


def _tag(storage):
    return getattr(_local, "known", {}).get(storage._cdata)


class Loaded:
    """The object in a torch file, on the CPU, its tensors mapped from the file where they are plain. `with loaded:` around a
    save keeps the locations. The pickle is executed, as torch.load(weights_only=False) does. From a file object nothing is mapped."""

    def __init__(self, f):
        if not _registered.is_set():
            torch.serialization.register_package(1, _tag, lambda storage, location: None)
            _registered.set()
        self._known, self._keep = {}, []

        def on_cpu(storage, location):
            return self._remember(storage, location)

        class Unpickler(pickle.Unpickler):
            def find_class(unpickler, module, name):
                found = super().find_class(module, name)
                return self._decoder(found) if (module, name) == ("ds_nvcomp.archive", "unpack") else found

        # torch.load wants a module; these are the names of one that it uses.
        module = type("pickle", (), {"Unpickler": Unpickler, "Pickler": pickle.Pickler, "load": pickle.load})
        self.object = torch.load(f, map_location=on_cpu, pickle_module=module, weights_only=False,
                                 mmap=isinstance(f, (str, os.PathLike)))

    def _remember(self, storage, location):
        if location != "cpu":
            self._known[storage._cdata] = location
            self._keep.append(storage)  # or its identity may be another's
        return storage

    def _decoder(self, unpack):
        def decode(payload, meta):
            decoded = unpack(payload, meta)
            location = self._known.get(payload._untyped_storage._cdata)
            if location is not None:
                self._remember(decoded._untyped_storage, location)
            return decoded
        return decode

    def __enter__(self):
        _local.known = self._known
        return self.object

    def __exit__(self, *exception):
        _local.known = {}
