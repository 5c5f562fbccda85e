"""Two passes over an object: `collect` finds the tensor storages in it, `dump` writes its pickle with compressed ones in place.

Both run the same pickler, so both meet the same tensors. A plain strided tensor is written as torch's own rebuild call with its
storage replaced; everything else (quantized, sparse, nested, meta, subclasses) is left to torch, and what those are made of comes
by again as plain tensors where torch pickles it so.
"""
from __future__ import annotations

import io
import pickle
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Container

import torch
from torch.serialization import location_tag, normalize_storage_type

from .seal import Sealed
from .storage import storage_dtype, unpack

_rebuilds = {torch._utils._rebuild_tensor_v2, torch._utils._rebuild_tensor_v3}  # v3: dtypes that came after typed storages
_rebuild_from_type = torch._tensor._rebuild_from_type_v2


@dataclass
class Span:
    """The bytes [`start`, `stop`) of a storage that the saved tensors use; all of them have `dtype`."""
    storage: torch.UntypedStorage
    dtype: torch.dtype
    name: str
    start: int
    stop: int
    location: str
    held: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def hold(self, device=None) -> None:
        """From now on `data` is what it is now, whatever happens to the storage; on another device, where one is given."""
        self.held = self.data.to(device or self.data.device, copy=True)

    def let_go(self) -> None:
        """Forget the storage, and the data unless held."""
        self.storage = None

    @property
    def data(self) -> torch.Tensor:
        """uint8 [nbytes], aliasing the storage unless held."""
        if self.held is not None:
            return self.held
        whole = torch.empty(0, dtype=torch.uint8, device=self.storage.device)
        return whole.set_(self.storage, self.start, (self.nbytes,), (1,))


class _Pickler(pickle.Pickler):
    """Calls `self.storage(tensor, storage, offset)` for the storage of every plain tensor: its stand-in and new offset."""

    def reducer_override(self, obj):
        if type(obj) is Frozen:
            tensor, reduced = obj.tensor, obj.reduced
            if tensor is None:
                return reduced
        elif type(obj) is torch.Tensor:
            tensor, reduced = obj, obj.__reduce_ex__(self.protocol)
        else:
            return NotImplemented
        if reduced[0] in _rebuilds:
            return (reduced[0], self._swap(tensor, reduced[1]), *reduced[2:])
        if reduced[0] is _rebuild_from_type and reduced[1][0] in _rebuilds:  # a tensor with attributes, such as ZeRO-3's ds_id
            func, kind, args, state = reduced[1]
            return (_rebuild_from_type, (func, kind, self._swap(tensor, args), state), *reduced[2:])
        return reduced

    def _swap(self, tensor, args):
        storage, offset, *rest = args
        return (*self.storage(tensor, storage, offset), *rest)


class _Placeholder:
    def __reduce__(self):
        return int, ()


def byte_range(tensor: torch.Tensor, offset: int) -> tuple[int, int]:
    """First byte, and the one behind the last, that a tensor with elements at `offset` elements uses of its storage."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
    return offset * tensor.element_size(), (offset + last + 1) * tensor.element_size()


class _Collector(_Pickler):
    def __init__(self):
        super().__init__(_Null(), protocol=2)
        self.protocol = 2
        self.storages, self.ranges, self.whole, self.dtypes = {}, {}, {}, {}

    def storage(self, tensor, storage, offset):
        storage = storage._untyped_storage if isinstance(storage, torch.storage.TypedStorage) else storage
        one_dtype(self.dtypes, storage, storage_dtype(tensor.dtype))
        _, dtype = self.storages.get(storage._cdata, (None, tensor.dtype))
        # The late dtypes may share a storage; then it is bytes.
        self.storages[storage._cdata] = storage, tensor.dtype if dtype == tensor.dtype else torch.uint8
        if tensor.numel():
            self.ranges.setdefault(storage._cdata, []).append(byte_range(tensor, offset))
        return _Placeholder(), 0

    def reducer_override(self, obj):  # asked for less than persistent_id would be, which is called for every int
        if isinstance(obj, torch.storage.TypedStorage):
            obj = obj._untyped_storage
        elif not torch.is_storage(obj):
            return super().reducer_override(obj)
        self.whole[obj._cdata] = obj  # met by itself, not under a plain tensor: torch's to write, and shared as torch shares it
        return int, ()


# Flat buffers pad between tensors for alignment. Wider gaps are other tensors, that this object does not save: an expert's file
# must not carry its neighbours.
GAP = 4096
ALIGN = 16  # spans start on this: a whole number of elements of every dtype, and of the GPU's widest loads


@dataclass
class Plan:
    """What `collect` found: the spans of each storage, in order of their bytes. It keeps the storages alive, so that no identity is used
    again."""
    storages: dict[int, tuple[torch.UntypedStorage, torch.dtype]]
    spans: dict[int, list[Span]]
    others: bool  # whether there are storages besides, which torch writes: of sparse tensors, or by themselves

    def all_spans(self) -> list[Span]:
        return [span for spans in self.spans.values() for span in spans]


def collect(obj) -> Plan:
    """Find the storages under the plain tensors of `obj` and the spans of them that are used.

    Tensors that overlap, and so may share memory, are in one span.
    """
    collector = _Collector()
    collector.dump(obj)
    names = _names(obj)
    spans = {}
    for key, ranges in collector.ranges.items():
        if key in collector.whole:
            continue
        storage, dtype = collector.storages[key]
        merged = spans[key] = []
        for first, stop in sorted(ranges):
            start = first - first % ALIGN
            if merged and first <= merged[-1].stop + GAP:
                merged[-1].stop = max(merged[-1].stop, stop)
            else:
                merged.append(Span(storage, dtype, names.get((key, first), ""), start, stop, location_tag(storage)))
    return Plan(collector.storages, spans, bool(collector.whole))


def is_simple(obj, least: int = 0) -> bool:
    """Whether `obj` is a tensor of at least so many bytes, not 0, about which pickling it would tell nothing that `span_of` does not."""
    return type(obj) is torch.Tensor and obj.layout is torch.strided and obj.device.type in ("cpu", "cuda") and \
        obj.nbytes >= max(1, least) and obj.dtype in torch.storage._dtype_to_storage_type_map() and \
        not (obj.requires_grad or obj.is_quantized or obj.is_conj() or obj.is_neg() or any(getattr(obj, "names", ())) or obj.__dict__)


def span_of(tensor: torch.Tensor, name: str) -> Span:
    """The one that `collect` would find for a simple tensor."""
    storage = tensor.untyped_storage()
    first, stop = byte_range(tensor, tensor.storage_offset())
    return Span(storage, tensor.dtype, name, first - first % ALIGN, stop, location_tag(storage))


class Frozen:
    """What a tensor was pickled as at some moment. `tensor` has its dtype, shape and stride, and no bytes; it is None where torch pickles a
    tensor by means of others."""

    def __init__(self, plain: bool, reduced: tuple):
        self.reduced, self.tensor = reduced, None
        if plain and (reduced[0] in _rebuilds or reduced[0] is _rebuild_from_type and reduced[1][0] in _rebuilds):
            args = reduced[1] if reduced[0] in _rebuilds else reduced[1][2]
            self.storage, self.offset, size, stride = args[:4]
            dtype = args[6] if len(args) > 6 and isinstance(args[6], torch.dtype) else self.storage.dtype
            self.tensor = torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device="meta")

    @classmethod
    def alone(cls, dtype: torch.dtype, offset: int, size: torch.Size, stride: tuple[int, ...]) -> "Frozen":
        """What torch pickles a simple tensor as, `offset` elements into a storage that is gone."""
        return cls(True, (torch._utils._rebuild_tensor_v2, (Gone(0, dtype), offset, tuple(size), stride, False, OrderedDict())))

    @property
    def key(self) -> int:
        """The storage's identity."""
        return getattr(self.storage, "_untyped_storage", self.storage)._cdata

    def let_go(self, encoded: Container[int]) -> None:
        """Keep of a storage in `encoded` its identity only."""
        if self.tensor is None or not self.tensor.numel() or self.key not in encoded:  # without elements it is in no span
            return
        self.storage = Gone(self.key, self.tensor.dtype)
        func, args, *rest = self.reduced
        args = (self.storage, *args[1:]) if func in _rebuilds else (*args[:2], (self.storage, *args[2][1:]), *args[3:])
        self.reduced = (func, args, *rest)


class Gone:
    """A storage that has been encoded and is not there any more."""

    def __init__(self, key: int, dtype: torch.dtype):
        self._cdata, self.dtype = key, dtype


def freeze(obj) -> tuple[object, list[Frozen]]:
    """A copy of `obj` in which tensors are `Frozen`, on the same storages, that no change to `obj` but to the bytes of those reaches: also
    not that a tensor is given other bytes, as ZeRO-3 does to parameters. And all that are in it. Raises what pickling raises."""
    file = io.BytesIO()
    freezer = _Freezer(file, protocol=pickle.HIGHEST_PROTOCOL)
    freezer.dump(obj)
    file.seek(0)
    thawer = _Thawer(file, freezer.storages)
    return thawer.load(), thawer.made


class _Freezer(pickle.Pickler):
    def __init__(self, file, protocol):
        super().__init__(file, protocol=protocol)
        self.storages = []

    def reducer_override(self, value):
        if isinstance(value, torch.Tensor):
            return Frozen, (type(value) is torch.Tensor, value.__reduce_ex__(2))
        if torch.is_storage(value) or isinstance(value, torch.storage.TypedStorage):
            self.storages.append(value)
            return _there, (len(self.storages) - 1,)
        return NotImplemented


class _Thawer(pickle.Unpickler):
    """It must not refer to itself: the storages it knows would stay until the garbage collector came by."""

    def __init__(self, file, storages):
        super().__init__(file)
        self.made = []
        self._known = {"Frozen": partial(_frozen, self.made), "_there": storages.__getitem__}

    def find_class(self, module, name):
        return self._known[name] if module == __name__ and name in self._known else super().find_class(module, name)


def _frozen(made: list, *args) -> Frozen:
    made.append(Frozen(*args))
    return made[-1]


def _there(number: int):
    """Stands for a storage in what a `_Freezer` writes."""
    raise NotImplementedError


@dataclass
class Entry:
    """A storage as it goes into the zip: `meta` is None for one that is written as torch writes it."""
    key: str
    dtype: torch.dtype
    nbytes: int
    location: str
    start: int
    stop: int
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

    def storage(self, tensor, storage, offset):
        entries = self.entries.get(getattr(storage, "_untyped_storage", storage)._cdata)
        if entries is None:
            return storage, offset
        if not tensor.numel():  # it has no bytes of its own: any storage of its dtype will do
            return entries[0], 0
        start, stop = byte_range(tensor, offset)
        entry = entries[max(0, bisect_right(entries, start, key=lambda entry: entry.start) - 1)]
        if not entry.start <= start <= stop <= entry.stop:
            return storage, offset  # an object that shows other tensors every time it is pickled: this one as torch writes it
        return entry, offset - entry.start // tensor.element_size()

    def persistent_id(self, obj):
        if type(obj) is _Record:
            entry = obj.entry
            return "storage", torch.ByteStorage, entry.key, entry.location, entry.nbytes
        if type(obj) is Entry:
            if obj.meta is not None:
                return None
            if storage_dtype(obj.dtype) != obj.dtype:
                return "storage", torch.UntypedStorage, obj.key, obj.location, obj.nbytes
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


def dump(obj, protocol: int, entries: dict[int, list[Entry]], plain) -> bytes:
    """The pickle of `obj` with the spans of storages in `entries` in place, ordered as in the plan; `plain(storage)` gives the record
    key of any other storage."""
    file = io.BytesIO()
    _Writer(file, protocol, entries, plain).dump(Sealed(obj))
    return file.getvalue()


def one_dtype(dtypes: dict[int, torch.dtype], storage, dtype) -> None:
    """torch.save's own rule, in its own words: the format has one dtype for a storage."""
    if storage.device.type != "meta" and storage.data_ptr() and dtypes.setdefault(storage.data_ptr(), dtype) != dtype:
        raise RuntimeError("Cannot save multiple tensors or storages that view the same data as different types")


def _names(obj) -> dict[tuple[int, int], str]:
    """Where the tensor at each storage and byte is first met among dicts, lists and tuples: `optimizer_state_dict.state.0.exp_avg`."""
    names, seen = {}, set()
    stack = [("", obj)]
    while stack:
        path, value = stack.pop()
        while type(value) is Frozen and value.tensor is None and value.reduced[1] and type(value.reduced[1][0]) is Frozen:
            value = value.reduced[1][0]  # a Parameter's data
        if type(value) is Frozen:
            if value.tensor is not None:
                place = value.key, value.offset * value.tensor.element_size()
                names.setdefault(place, path)
        elif isinstance(value, torch.Tensor):
            try:
                names.setdefault((value.untyped_storage()._cdata, value.storage_offset() * value.element_size()), path)
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
