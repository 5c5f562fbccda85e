"""Are two loaded checkpoints the same, to the bit? Never a comparison of numbers: NaN payloads, -0.0 and padding count.

Compared are tensors (class, dtype, shape, stride, requires_grad, attributes, and the bytes from their first element to their
last), which tensors overlap which, and everything else by its pickle.
"""
from __future__ import annotations

import io
import pickle

import torch

from ..errors import ChecksumError


def assert_same(expected, found, *, path: str) -> None:
    """Raise `ChecksumError` naming the first thing in `found` that is not what it is in `expected`."""
    whole = _flatten(expected), _flatten(found)
    if whole[0].pickle == whole[1].pickle:  # the usual case
        difference = _tensors(*whole)
        if difference is None:
            return
    # Find out where; and pickles may differ only in what they share (two equal strings that are one object here and two there).
    where, parts = "", list(_parts(found))
    if [name for name, _ in _parts(expected)] != [name for name, _ in parts]:
        raise ChecksumError("What was read back has other keys than what was written. The source is untouched. Please report "
                            "it.", path=path)
    for (name, mine), (_, other) in zip(_parts(expected), parts):
        a, b = _flatten(mine), _flatten(other)
        difference = "its value" if a.pickle != b.pickle and not _equal(mine, other) else _tensors(a, b, overlaps=False)
        if difference is not None:
            where = name
            break
    else:
        difference = _tensors(*whole)
    if difference is not None:
        raise ChecksumError(f"What was read back differs in {difference} from what was written. The source is untouched. "
                            "Faulty memory or a bug in ds_nvcomp: please report it.", path=path, tensor=where or None)


class _Flat(pickle.Pickler):
    """Pickles an object with its tensors' bytes left out: `spans` are those, in the order they are met."""

    def __init__(self, file):
        super().__init__(file, protocol=4)
        self.spans: list[tuple[torch.UntypedStorage, int, int]] = []

    def reducer_override(self, obj):
        if torch.is_storage(obj) or isinstance(obj, torch.storage.TypedStorage):
            storage = obj if torch.is_storage(obj) and not isinstance(obj, torch.storage.TypedStorage) else obj._untyped_storage
            return _storage, (self._span(storage, 0, storage.nbytes()), str(getattr(obj, "dtype", "")))
        if type(obj) not in (torch.Tensor, torch.nn.Parameter) or obj.layout is not torch.strided or obj.is_quantized or \
                obj.device.type == "meta" or obj.is_nested:
            return NotImplemented  # torch's own reduction takes it to pieces that come by here
        size, start = obj.element_size(), obj.storage_offset() * obj.element_size()
        last = sum((n - 1) * step for n, step in zip(obj.shape, obj.stride())) if obj.numel() else -1
        number = self._span(obj.untyped_storage(), start, start + (last + 1) * size)
        return _tensor, (number, type(obj).__name__, str(obj.dtype), tuple(obj.shape), obj.stride(), obj.requires_grad,
                         obj.is_conj(), obj.is_neg(), obj.__dict__)

    def _span(self, storage, start, stop):
        self.spans.append((storage, start, stop))
        return len(self.spans) - 1


def _storage(*description):
    """Stands in pickles for a storage."""


def _tensor(*description):
    """Stands in pickles for a tensor."""


class _flatten:
    def __init__(self, obj):
        file = io.BytesIO()
        pickler = _Flat(file)
        pickler.dump(obj)
        self.pickle, self.spans = file.getvalue(), pickler.spans

    def overlaps(self):
        """For each span, (number of the group of overlapping spans it is in, its start in that group)."""
        order = sorted((i for i, (_, start, stop) in enumerate(self.spans) if stop > start),
                       key=lambda i: (self.spans[i][0]._cdata, *self.spans[i][1:]))
        group = {}
        key = end = first = None
        for i in order:
            storage, start, stop = self.spans[i]
            if storage._cdata != key or start >= end:
                key, end, first = storage._cdata, stop, i
            end = max(end, stop)
            group[i] = first, start - self.spans[first][1]
        numbers: dict[int, int] = {}
        return [(numbers.setdefault(group[i][0], len(numbers)), group[i][1]) if i in group else None
                for i in range(len(self.spans))]


def _tensors(a: _flatten, b: _flatten, *, overlaps: bool = True) -> str | None:
    """In what the tensors differ, or None."""
    if len(a.spans) != len(b.spans):
        return "its tensors"
    if overlaps and a.overlaps() != b.overlaps():
        return "which tensors share memory"
    done = set()
    for mine, other in zip(a.spans, b.spans):
        key = mine[0]._cdata, *mine[1:], other[0]._cdata, *other[1:]
        if key not in done and not torch.equal(_bytes(*mine), _bytes(*other)):
            return "the bytes of a tensor"
        done.add(key)
    return None


def _bytes(storage, start, stop) -> torch.Tensor:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return data.set_(storage, start, (stop - start,), (1,)) if stop > start else data


def _parts(obj):
    """(name, leaf) of nested dicts, lists and tuples, in order; cycles are left to the pickle."""
    stack, open_ids = [("", obj)], set()
    while stack:
        name, value = stack.pop()
        if type(value) in (dict, list, tuple) and id(value) not in open_ids and value:
            open_ids.add(id(value))
            items = value.items() if type(value) is dict else enumerate(value)
            stack += reversed([(f"{name}.{key}" if name else str(key), item) for key, item in items])
        else:
            yield name, value


def _equal(a, b) -> bool:
    """Sets have no order, and so no pickle of their own."""
    return type(a) is type(b) and isinstance(a, (set, frozenset)) and a == b
