"""What is in a checkpoint file, without executing anything in it: one row for each tensor.

The pickle is followed symbolically and of a compressed storage only the header and the chunk table are read, so a row costs
about 20 bytes of reading for each 64 Ki elements. Runs on hostile files: every size is checked against the bytes that are
there.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ..encoding import codecs, format
from ..encoding.codecs import CodecId
from ..errors import ArchiveError, ChecksumError, DsNvcompError, HeaderError, LinkError, TableError, TruncatedError, UnsupportedVersionError
from . import seal
from .linked import Linked, parse
from .records import Records
from .storage import check_header, check_version
from .symbolic import Call, Dict, Global, Items, Persistent, read as read_pickle

MAX_PICKLE_BYTES = 1 << 30  # tensors are outside the pickle: what is in it are names, sizes and settings
_NAME_DEPTH, NAME_CHARS = 32, 240  # links find tensors by their names: of longer ones none is made

_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "ComplexDoubleStorage": "complex128", "ComplexFloatStorage": "complex64", "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8", "QInt32Storage": "qint32", "QUInt4x2Storage": "quint4x2", "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": "uint8",
}
# torch's rebuild functions whose arguments start with storage, offset, size, stride; the value is where a dtype follows.
_REBUILDS = {"torch._utils._rebuild_tensor": None, "torch._utils._rebuild_tensor_v2": None,
             "torch._utils._rebuild_tensor_v3": 6, "torch._utils._rebuild_qtensor": None}
_FROM_TYPE = ("torch._tensor._rebuild_from_type", "torch._tensor._rebuild_from_type_v2")
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_UNPACK, _SEALED = "ds_nvcomp.archive.unpack", "ds_nvcomp.archive.sealed"


@dataclass(frozen=True)
class Encoding:
    """The header and chunk table of a compressed storage; `by` says who wrote it, `meta` is the pickle's description of it."""
    header: format.Header
    table: format.Table
    codec: CodecId
    meta: dict

    @property
    def by(self) -> str:
        return str(self.meta.get("by", ""))

    @property
    def link(self) -> str | None:
        """What the description says of a link, if it is one."""
        return self.meta.get("link")

    @cached_property
    def linked(self) -> Linked | None:
        """What the decoded numbers are differences from, where they are (see link.py). What a scan returns has been read once."""
        return None if self.link is None else parse(self.link, self.header.elements)

    @cached_property
    def pieces(self) -> dict[str, int]:
        """How many pieces (one plane of one chunk) are stored in which way."""
        counts = np.bincount(self.table.mode.ravel(), minlength=4).tolist()
        return {"coded": counts[format.CODED], "raw": counts[format.RAW], "zero": counts[format.ZERO],
                "unsigned": counts[format.UNSIGNED]}


@dataclass(frozen=True)
class Stored:
    """A storage in the file. `compressed` ones whose header or table is damaged have no `encoding`."""
    record: str
    location: str
    dtype: str
    raw_bytes: int
    stored_bytes: int
    compressed: bool
    name: str
    encoding: Encoding | None = None
    how: str = ""  # who stored it, where that was neither torch nor ds_nvcomp


@dataclass(frozen=True)
class TensorRow:
    """A tensor (`stride` and `offset` in elements), or with `stride` None a storage met by itself.

    `shares` names the tensor that is on the same storage and comes first; the storage's bytes are that one's.
    """
    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    offset: int
    storage: Stored
    shares: str | None

    @property
    def raw_bytes(self) -> int:
        """Bytes of the storage when decoded; 0 where another row has counted them."""
        return 0 if self.shares is not None else self.storage.raw_bytes

    @property
    def stored_bytes(self) -> int:
        """Bytes of the record in the file; 0 where another row has counted them."""
        return 0 if self.shares is not None else self.storage.stored_bytes


@dataclass(frozen=True)
class FileScan:
    """`bytes` is the size of the file, `globals` what its pickle would import, `root` the symbolic tree."""
    path: str
    bytes: int
    rows: list[TensorRow]
    globals: list[str]
    root: object = field(repr=False)

    @property
    def compressed(self) -> bool:
        return any(row.storage.compressed for row in self.rows)

    @property
    def raw_bytes(self) -> int:
        return sum(row.raw_bytes for row in self.rows)

    @property
    def storages(self) -> list[Stored]:
        return [row.storage for row in self.rows if row.shares is None]

    def value(self, *keys):
        """The plain value under nested dict keys, None where there is none."""
        node = self.root
        for key in keys:
            node = Dict.get(node, key) if isinstance(node, (Dict, Call)) else None
        return node


def scan(path) -> FileScan:
    """Read what a torch zip holds. Raises a `FormatError` (with path and tensor) for the first thing that is wrong, and
    OSError.
    """
    with Records(path) as records:
        return scan_records(records)


def scan_records(records: Records, name: str | None = None) -> FileScan:
    """As `scan`, on an open file. If `records` collects errors, damaged tensors are left out and reported there. Tensors' names start
    with `name`, which is what the object in the file is called elsewhere.

    Raises `ArchiveError`, `TruncatedError` where there is no pickle to read.
    """
    try:
        record = records.records.get("data.pkl")
        if record is None:
            raise ArchiveError("The zip has no data.pkl; torch.save writes one. Restore the file from a copy.")
        if record.size > MAX_PICKLE_BYTES:
            raise ArchiveError(f"data.pkl has {record.size} bytes; more than {MAX_PICKLE_BYTES} are not read.")
        root = read_pickle(b"".join(records.slices(record)))
    except DsNvcompError as err:
        raise err.at(path=records.path)
    walk = _Walk(records)
    is_sealed = _calls(root, _SEALED) and type(root.args) is tuple and len(root.args) == 2
    if is_sealed:
        walk.globals.add(_SEALED)
        root = root.args[1]
    walk.run(root, None if name is None else _Name(None, name))
    if is_sealed or seal.RECORD in records.records:  # a damaged pickle may still call for the check, and not be what has a seal
        _check_seal(records)
    return FileScan(records.path, records.bytes, walk.rows, sorted(walk.globals), root)


def _calls(node, name: str) -> bool:
    return type(node) is Call and type(node.func) is Global and str(node.func) == name


def _check_seal(records: Records) -> None:
    """What torch.load would verify of a sealed file, by the zip's own checksums."""
    record = records.records.get(seal.RECORD)
    try:
        for other in records.records.values():
            if other.start is None:
                raise ArchiveError(f"Record {other.name[:200]!r} is deflated, which none of a sealed file is. The file was repacked; "
                                   "unpack it and zip it with `zip -0`, or restore it from a copy.")
        if record is None:
            raise ArchiveError(f"The file's record {seal.RECORD!r} is missing. The file is damaged, or was repacked.")
        for name, check in seal.read_seal(b"".join(records.slices(record))).items():
            there = records.records.get(name)
            found = None if there is None else (there.size, there.crc)
            if found != check:
                raise ChecksumError(f"The seal says that record {name!r} has {check} as bytes and checksum, the zip says {found}. The "
                                    "file is damaged; restore it from a copy.")
    except DsNvcompError as err:
        records.problem(err)


class _Name:
    """Where a node is first met, as a chain; written out for tensors only, or deep nesting would cost its square."""
    __slots__ = ("parent", "key")

    def __init__(self, parent, key):
        self.parent, self.key = parent, key

    def __str__(self):
        keys, name = [], self
        while name is not None and len(keys) < _NAME_DEPTH:
            keys.append(name.key)
            name = name.parent
        return ".".join((["..."] if name is not None else []) + keys[::-1])


def _key_name(key) -> str:
    if type(key) in (str, int, float, bool, type(None)):
        return str(key)[:NAME_CHARS] if type(key) is not int or key.bit_length() < 256 else "<int>"
    return f"<{type(key).__name__.lower()}>"


class _Walk:
    def __init__(self, records):
        self.records, self.rows, self.globals = records, [], set()
        self._stored: dict[str | int, Stored] = {}  # by record name, or by the id of the unpack call
        self._made = []  # nodes that are not in the tree, kept so that no id is used again

    def run(self, root, name=None):
        seen, stack = set(), [(name, root)]
        while stack:
            name, node = stack.pop()
            if type(node) is Global:
                self.globals.add(str(node))
                continue
            if not isinstance(node, (Call, Dict, Items, tuple, Persistent)) or id(node) in seen:
                continue
            seen.add(id(node))
            try:
                children = self._visit(name, node)
            except DsNvcompError as err:
                self.records.problem(err.at(tensor=str(name or "")))
                continue
            stack += reversed(children)

    def _visit(self, name, node):
        """Add the node's row if it is a tensor or storage; return what is to be walked further."""
        if type(node) is Persistent:
            stored, first = self._storage(node, name)
            self._add(name, stored, first, (stored.raw_bytes // itemsize(stored.dtype),), None, 0)
            return [(name, node.id)]
        if type(node) is Dict:
            return _pairs(name, node.pairs)
        if type(node) is Items:
            return [(_Name(name, str(i)), item) for i, item in enumerate(node.items)]
        if type(node) is tuple:
            return [(_Name(name, str(i)), item) for i, item in enumerate(node)]
        func = str(node.func) if type(node.func) is Global else None
        rest = [(name, node.func), *_state(name, node)]
        args = node.args if type(node.args) is tuple else ()
        if func in _REBUILDS and len(args) >= 4:
            self._tensor(name, args, _REBUILDS[func])
            return [*rest, *((name, arg) for arg in args[4:])]
        if func == _UNPACK:
            stored, first = self._storage(node, name)
            self._add(name, stored, first, (stored.raw_bytes // itemsize(stored.dtype),), None, 0)
            return rest
        if func in _FROM_TYPE and len(args) >= 4:
            self._made.append(Call(args[0], args[2]))
            return [*rest, (name, args[1]), (name, self._made[-1]), *_attributes(name, args[3])]
        if func in _PARAMETERS and args:
            return [*rest, *((name, arg) for arg in args)]
        return [*rest, *((_Name(name, str(i)), arg) for i, arg in enumerate(args))]

    def _tensor(self, name, args, dtype_at):
        storage, offset, shape, stride = args[:4]
        stored, first = self._storage(storage, name)
        dtype = stored.dtype
        if dtype_at is not None:
            dtype = args[dtype_at] if len(args) > dtype_at else None
            dtype = dtype.name if type(dtype) is Global and dtype.module == "torch" else repr(dtype)[:NAME_CHARS]
        shape, stride = size_of(shape), size_of(stride)
        numbers = (offset, *shape, *stride) if type(shape) is type(stride) is tuple else (None,)
        if any(type(n) is not int or not 0 <= n < 1 << 63 for n in numbers) or len(shape) != len(stride):
            raise ArchiveError("The pickle describes a tensor whose offset, shape and stride are not lists of as many sizes. "
                               "The file is damaged; restore it from a copy.")
        last = offset + sum((n - 1) * step for n, step in zip(shape, stride)) if all(shape) else -1
        # Sub-byte quantized types pack elements; torch checks those itself.
        if not dtype.startswith("quint") and (last + 1) * itemsize(dtype) > stored.raw_bytes:
            raise TruncatedError(f"The tensor reaches to byte {(last + 1) * itemsize(dtype)} of a storage of "
                                 f"{stored.raw_bytes} bytes. The file is damaged; restore it from a copy.")
        self._add(name, stored, first, shape, stride, offset, dtype)

    def _add(self, name, stored, first, shape, stride, offset, dtype=None):
        self.rows.append(TensorRow(str(name or ""), dtype or stored.dtype, shape, stride, offset, stored, first))

    def _storage(self, node, name) -> tuple[Stored, str | None]:
        """The storage of a node, and the name of the tensor that counts its bytes if there is one already."""
        if type(node) is Persistent:
            record, location, dtype, nbytes = self._reference(node)
            key = record.name
        elif _calls(node, _UNPACK):
            self.globals.add(str(node.func))
            key = id(node)
        else:
            raise ArchiveError("The pickle builds a tensor on something that is no storage. The file is damaged; restore it "
                               "from a copy.")
        if key in self._stored:
            stored = self._stored[key]
            if type(node) is Persistent and nbytes > stored.raw_bytes:
                raise TruncatedError(f"Record {key!r} is used with {stored.raw_bytes} and with {nbytes} bytes. The file is "
                                     "damaged.")
            return stored, stored.name
        if type(node) is Persistent:
            if record.size < nbytes:
                raise TruncatedError(f"Record {record.name!r} has {record.size} bytes, the pickle expects {nbytes}. The file "
                                     "is damaged; restore it from a copy.")
            stored = Stored(record.name, location, dtype, nbytes, record.size, False, str(name or ""))
        else:
            stored = self._compressed(node, str(name or ""))
        self._stored[key] = stored
        return stored, None

    def _reference(self, node):
        """(record, location, dtype, bytes) of a persistent id."""
        pid = node.id
        if type(pid) is not tuple or len(pid) != 5 or pid[0] != "storage" or type(pid[1]) is not Global or \
                type(pid[2]) is not str or type(pid[3]) is not str or type(pid[4]) is not int or pid[4] < 0:
            raise ArchiveError("The pickle refers to a record in a way that torch does not write. The file is damaged; "
                               "restore it from a copy.")
        _, kind, key, location, numel = pid
        dtype = _STORAGES.get(kind.name)
        if dtype is None:
            raise UnsupportedVersionError(f"The pickle has a storage of class {str(kind)[:200]!r}, which is unknown here.")
        record = self.records.records.get(f"data/{key}")
        if record is None:
            raise ArchiveError(f"The pickle refers to record 'data/{key[:NAME_CHARS]}', which the zip does not have "
                               "(intact). Restore the file from a copy.")
        return record, location, dtype, numel * itemsize(dtype)

    def _compressed(self, node, name) -> Stored:
        args = node.args if type(node.args) is tuple else ()
        if len(args) != 2 or type(args[0]) is not Persistent or type(args[1]) is not Dict:
            raise HeaderError("A compressed storage comes with its payload and a description. The file is damaged; restore "
                              "it from a copy.")
        record, location, dtype, nbytes = self._reference(args[0])
        if dtype != "uint8" or nbytes != record.size:
            raise TruncatedError(f"Record {record.name!r} has {record.size} bytes, the pickle expects {nbytes} of {dtype}. "
                                 "The file is damaged; restore it from a copy.")
        meta = {k: v for k, v in args[1].pairs if type(k) is str and (type(v) in (str, int) or k in ("link", "version"))}
        raw_bytes, meta_dtype = _validate(meta)
        stored = Stored(record.name, location, meta_dtype, raw_bytes, record.size, True, name)
        try:
            encoding = self._encoding(record, meta)
            check_header(encoding.header, meta)
            if encoding.linked is not None and self.records.is_item:
                raise LinkError("An item of a distributed checkpoint has no file beside it that it could be linked to. The file is "
                                "damaged; restore it from a copy.")
        except DsNvcompError as err:
            self.records.problem(err.at(tensor=name))
            return stored
        return Stored(record.name, location, meta_dtype, raw_bytes, record.size, True, name, encoding)

    def _encoding(self, record, meta) -> Encoding:
        head = self.records.read(record, 0, min(format.HEADER.size, record.size))
        header = format.parse_header(head, record.size)
        codec = codecs.resolve(header.codec_id, header.codec_revision)
        rows = self.records.read(record, format.HEADER.size, header.data_start - format.HEADER.size)
        table = format.parse_table(rows, header)
        if codec is codecs.NONE and (table.mode == format.CODED).any():
            raise TableError("A chunk is marked as coded in a payload whose codec is none. The file is damaged.")
        return Encoding(header, table, codec, meta)


def _validate(meta) -> tuple[int, str]:
    """(decoded bytes, dtype) of a compressed storage's description, by the same rules as `storage.unpack`."""
    if type(meta.get("version")) is not int:
        raise HeaderError("A compressed storage has no description of a known kind. The file is damaged; restore it from a "
                          "copy.")
    check_version(meta)
    nbytes, dtype = meta.get("bytes"), meta.get("dtype")
    if type(dtype) is not str or type(nbytes) is not int or nbytes <= 0 or nbytes % itemsize(dtype):
        raise HeaderError(f"The storage is described as {nbytes!r} bytes of {dtype!r}. The file is damaged; restore it from "
                          "a copy.")
    return nbytes, dtype


def itemsize(name: str) -> int:
    """Bytes an element. Looks no further than what torch has imported: its `__getattr__` imports modules by name."""
    dtype = vars(torch).get(name)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedVersionError(f"A tensor is of dtype {name[:NAME_CHARS]!r}, which torch {torch.__version__} does "
                                      "not have. Install a newer torch.")
    return dtype.itemsize


def size_of(node):
    """The tuple in a torch.Size(...), or the node itself."""
    return node.args[0] if type(node) is Call and type(node.args) is tuple and len(node.args) == 1 else node


def _pairs(name, pairs):
    children = []
    for key, value in pairs:
        children += [(_Name(name, _key_name(key)), key), (_Name(name, _key_name(key)), value)]
    return children


def _state(name, call):
    return [*_attributes(name, call.state), *((_Name(name, str(i)), item) for i, item in enumerate(call.items)),
            *_pairs(name, call.pairs)]


def _attributes(name, state):
    return _pairs(name, state.pairs) if type(state) is Dict else [(name, state)] if state is not None else []
