"""Two passes over an object: `collect` finds the tensor storages in it, `dump` writes its pickle with compressed ones in place.

Both run the same pickler, so both meet the same tensors. A plain strided tensor is written as torch's own rebuild call with its
storage replaced; everything else (quantized, sparse, nested, meta, subclasses) is left to torch, and what those are made of comes
by again as plain tensors where torch pickles it so.
"""
from __future__ import annotations

import io
import pickle
from dataclasses import dataclass

import torch
from torch.serialization import location_tag, normalize_storage_type

from .storage import unpack

_rebuild = torch._utils._rebuild_tensor_v2
_rebuild_from_type = torch._tensor._rebuild_from_type_v2


@dataclass
class Span:
    """The bytes [`start`, `stop`) of a storage that the saved tensors use; all of them have `dtype`."""
    storage: torch.UntypedStorage
    dtype: torch.dtype
    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def data(self) -> torch.Tensor:
        """uint8 [nbytes], aliasing the storage."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, self.start, (self.nbytes,), (1,))


class _Pickler(pickle.Pickler):
    """Calls `self.storage(tensor, typed_storage, offset)` for the storage of every plain tensor: its stand-in and new offset."""

    def reducer_override(self, obj):
        if type(obj) is not torch.Tensor:
            return NotImplemented
        reduced = obj.__reduce_ex__(self.protocol)
        if reduced[0] is _rebuild:
            return (_rebuild, self._swap(obj, reduced[1]), *reduced[2:])
        if reduced[0] is _rebuild_from_type and reduced[1][0] is _rebuild:  # a tensor with attributes, such as ZeRO-3's ds_id
            func, kind, args, state = reduced[1]
            return (_rebuild_from_type, (func, kind, self._swap(obj, args), state), *reduced[2:])
        return reduced

    def _swap(self, tensor, args):
        storage, offset, *rest = args
        if not isinstance(storage, torch.storage.TypedStorage):
            return args
        return (*self.storage(tensor, storage, offset), *rest)


class _Placeholder:
    def __reduce__(self):
        return int, ()


class _Collector(_Pickler):
    def __init__(self, names):
        super().__init__(_Null(), protocol=2)
        self.protocol = 2
        self.names, self.spans, self.whole, self.dtypes = names, {}, set(), {}

    def storage(self, tensor, typed, offset):
        storage = typed._untyped_storage
        one_dtype(self.dtypes, storage, tensor.dtype)
        size = tensor.element_size()
        span = self.spans.get(storage._cdata)
        if span is None:
            span = Span(storage, tensor.dtype, self.names.get(storage._cdata, ""), storage.nbytes(), 0)
            self.spans[storage._cdata] = span
        if tensor.numel():
            last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
            span.start, span.stop = min(span.start, offset * size), max(span.stop, (offset + last + 1) * size)
        return _Placeholder(), 0

    def persistent_id(self, obj):
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        elif not torch.is_storage(obj):
            return None
        self.whole.add(obj._cdata)  # met by itself, not under a plain tensor: torch's to write, and shared as torch shares it
        return "storage"


def collect(obj) -> dict[int, Span]:
    """The storages under the plain tensors of `obj`, by their identity, with the span that is used of each."""
    collector = _Collector(_names(obj))
    collector.dump(obj)
    return {key: span for key, span in collector.spans.items() if key not in collector.whole and span.stop > span.start}


@dataclass
class Entry:
    """A storage as it goes into the zip: `meta` is None for one that is written as torch writes it."""
    key: str
    dtype: torch.dtype
    nbytes: int
    location: str
    start: int = 0
    meta: dict | None = None

    def __reduce__(self):  # reached for compressed ones only; the plain ones are persistent ids
        return unpack, (_Record(self), self.meta)


class _Record:
    """The payload of a compressed storage, which the pickle refers to as a uint8 storage."""

    def __init__(self, entry):
        self.entry = entry


class _Writer(_Pickler):
    def __init__(self, file, protocol, entries, plain):
        super().__init__(file, protocol=protocol)
        self.protocol, self.entries, self.plain, self.dtypes = protocol, entries, plain, {}

    def storage(self, tensor, typed, offset):
        entry = self.entries.get(typed._untyped_storage._cdata)
        if entry is None:
            return typed, offset
        start = entry.start // tensor.element_size()
        return entry, offset - start if tensor.numel() else 0

    def persistent_id(self, obj):
        if type(obj) is _Record:
            entry = obj.entry
            return "storage", torch.ByteStorage, entry.key, entry.location, entry.nbytes
        if type(obj) is Entry:
            if obj.meta is not None:
                return None
            kind = getattr(torch, torch.storage._dtype_to_storage_type_map()[obj.dtype])
            return "storage", kind, obj.key, obj.location, obj.nbytes // obj.dtype.itemsize
        if isinstance(obj, torch.storage.TypedStorage):
            storage, dtype, numel = obj._untyped_storage, obj.dtype, obj._size()
            kind = getattr(torch, obj._pickle_storage_type())
        elif torch.is_storage(obj):
            storage, dtype, numel = obj, torch.uint8, obj.nbytes()
            kind = normalize_storage_type(type(obj))
        else:
            return None
        one_dtype(self.dtypes, storage, dtype)
        return "storage", kind, self.plain(storage), location_tag(storage), numel


def dump(obj, protocol: int, entries: dict[int, Entry], plain) -> bytes:
    """The pickle of `obj` with the storages in `entries` in place; `plain(storage)` gives the record key of any other."""
    file = io.BytesIO()
    _Writer(file, protocol, entries, plain).dump(obj)
    return file.getvalue()


def one_dtype(dtypes: dict[int, torch.dtype], storage, dtype) -> None:
    """torch.save's own rule, in its own words: the format has one dtype for a storage."""
    if storage.device.type != "meta" and storage.data_ptr() and dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
        raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")


def _names(obj) -> dict[int, str]:
    """Where each storage is first met among dicts, lists and tuples, such as `optimizer_state_dict.state.0.exp_avg`."""
    names, seen = {}, set()
    stack = [("", obj)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, torch.Tensor):
            try:
                names.setdefault(value.untyped_storage()._cdata, path)
            except (NotImplementedError, RuntimeError):  # sparse and functional tensors have none
                pass
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += reversed([(f"{path}.{key}" if path else str(key), item) for key, item in items])
    return names


class _Null:
    def write(self, data):
        return len(data)
