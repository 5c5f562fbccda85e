"""Seeded corruptions of a whole file's bytes, and the little zip, seal and payload knowledge that making them takes.

Written from FORMAT.md and APPNOTE.TXT with structs of its own, so that what the implementation gets wrong is not got wrong here
too. Only the order of the chunk table's columns is taken from it.

A corruption is *accidental* if the seal or the pickle's `meta.crc` still contradicts it: whatever a disk, a network, a copying
tool or somebody without the intent to deceive our checksums does, also where zip's CRCs and a payload's own checksums were
computed anew. Such a file must be refused or load bit-identically. It is *forged* if everything that speaks for the file was
made right again, or if the pickle does not ask for the seal any more: that is an attacker's own file, which may load what it
likes.
"""
from __future__ import annotations

import json
import pickle
import pickletools
import random
import struct
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property

from ds_nvcomp.encoding.format import COLUMNS

LOCAL, CENTRAL, END = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I"), struct.Struct("<4s4H2IH")
LOCAL_FIELDS = "magic version flags method time date crc packed size name_bytes extra_bytes".split()
CENTRAL_FIELDS = ("magic made_by version flags method time date crc packed size name_bytes extra_bytes comment_bytes disk "
                  "internal external offset").split()
END_FIELDS = "magic disk first_disk here count bytes start comment_bytes".split()
MAGIC, SEAL = b"DSNVCOMP", b"ds_nvcomp/seal"
HEADER = {"version": (8, "H"), "features": (10, "H"), "transform": (12, "B"), "codec": (13, "B"), "revision": (14, "B"),
          "planes": (15, "B"), "chunk_elements": (16, "I"), "reserved_1": (20, "I"), "elements": (24, "Q"),
          "chunks": (32, "Q"), "data_bytes": (40, "Q"),
          "reserved_2": (48, "Q"), "table_crc": (56, "I"), "header_crc": (60, "I")}
HUGE = (0, 1, 15, 16, 17, 255, 1 << 15, (1 << 16) - 1, 1 << 16, 1 << 20, (1 << 20) + 16, 1 << 21, (1 << 31) - 1, 1 << 31,
        (1 << 32) - 16,
        (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 16, (1 << 64) - 1)


# --- the zip ----------------------------------------------------------------------------------------------------------

@dataclass
class Entry:
    """An entry; `local` and `central` replace fields of its headers, `at` its place by one that is there already."""
    name: bytes
    data: bytes
    local: dict = field(default_factory=dict)
    central: dict = field(default_factory=dict)
    extra: bytes = b""
    central_extra: bytes = b""
    at: int | None = None


def build(entries: list[Entry], comment: bytes = b"", end: dict | None = None, tail: bytes = b"") -> bytes:
    """A zip as torch.save lays it out, every field right but those that are replaced."""
    out, directory = bytearray(), bytearray()
    for entry in entries:
        common = dict(version=20, flags=1 << 11, method=0, time=0, date=0x21, crc=zlib.crc32(entry.data),
                      packed=len(entry.data),
                      size=len(entry.data), name_bytes=len(entry.name))
        offset = len(out) if entry.at is None else entry.at
        if entry.at is None:
            extra = entry.extra
            padding = -(len(out) + LOCAL.size + len(entry.name) + len(extra) + 4) % 64
            extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
            fields = {"magic": b"PK\3\4", **common, "extra_bytes": len(extra), **entry.local}
            out += _pack(LOCAL, LOCAL_FIELDS, fields) + entry.name + extra + entry.data
        fields = {"magic": b"PK\1\2", "made_by": 20, **common, "extra_bytes": len(entry.central_extra), "comment_bytes": 0,
                  "disk": 0,
                  "internal": 0, "external": 0, "offset": offset, **entry.central}
        directory += _pack(CENTRAL, CENTRAL_FIELDS, fields) + entry.name + entry.central_extra
    fields = dict(magic=b"PK\5\6", disk=0, first_disk=0, here=len(entries), count=len(entries), bytes=len(directory),
                  start=len(out),
                  comment_bytes=len(comment))
    return bytes(out + directory + tail + _pack(END, END_FIELDS, {**fields, **(end or {})}) + comment)


def _pack(kind: struct.Struct, names, fields) -> bytes:
    sizes = {"H": 16, "I": 32}
    values = []
    for name, code in zip(names, _codes(kind)):
        value = fields[name]
        values.append(value if isinstance(value, bytes) else value & (1 << sizes[code]) - 1)
    return kind.pack(*values)


def _codes(kind: struct.Struct):
    count, codes = "", []
    for letter in kind.format.lstrip("<"):
        if letter.isdigit():
            count += letter
        else:
            codes += [letter] if letter == "s" else [letter] * int(count or 1)
            count = ""
    return codes


class File:
    """A whole, freshly written file, taken to pieces."""

    def __init__(self, data: bytes, name: str = ""):
        self.data, self.name = bytes(data), name

    @cached_property
    def _parsed(self):
        regions = {name: [] for name in ("pickle", "seal", "directory", "end", "local header", "header", "table", "chunks",
                                         "plain", "small")}
        entries, end = [], len(self.data) - END.size
        found = dict(zip(END_FIELDS, END.unpack_from(self.data, end)))
        at = found["start"]
        for _ in range(found["count"]):
            fields = dict(zip(CENTRAL_FIELDS, CENTRAL.unpack_from(self.data, at)))
            name = self.data[at + CENTRAL.size:][:fields["name_bytes"]]
            local = dict(zip(LOCAL_FIELDS, LOCAL.unpack_from(self.data, fields["offset"])))
            start = fields["offset"] + LOCAL.size + local["name_bytes"] + local["extra_bytes"]
            data = self.data[start:start + fields["size"]]
            regions["local header"].append((fields["offset"], start))
            entries.append(Entry(name, data))
            if data[:8] == MAGIC:
                payload = Payload(data)
                regions["header"].append((start, start + 64))
                regions["table"].append((start + 64, start + payload.data_start))
                regions["chunks"].append((start + payload.data_start, start + len(data)))
            else:
                tail = name.partition(b"/")[2]
                kind = {b"data.pkl": "pickle", SEAL: "seal"}.get(tail, "plain" if tail.startswith(b"data/") else "small")
                regions[kind].append((start, start + len(data)))
            at += CENTRAL.size + fields["name_bytes"] + fields["extra_bytes"]
        regions["directory"].append((found["start"], end))
        regions["end"].append((end, len(self.data)))
        return entries, {name: [span for span in spans if span[1] > span[0]] for name, spans in regions.items()}

    @property
    def entries(self) -> list[Entry]:
        """Fresh copies, to change."""
        return [replace(entry, local={}, central={}) for entry in self._parsed[0]]

    @property
    def regions(self) -> dict[str, list[tuple[int, int]]]:
        return self._parsed[1]


def record(entries: list[Entry], tail: bytes) -> Entry:
    return next(entry for entry in entries if entry.name.endswith(b"/" + tail))


def payloads(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.data[:8] == MAGIC]


def plain(entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if b"/data/" in entry.name and entry.data[:8] != MAGIC]


def reseal(entries: list[Entry], guarded: set[bytes] | None = None) -> None:
    """Make the seal right for what is there."""
    guarded = {entry.name for entry in payloads(entries)} if guarded is None else guarded
    seal = record(entries, SEAL)
    records = {entry.name.partition(b"/")[2].decode(): [len(entry.data), zlib.crc32(entry.data)]
               for entry in entries if entry.name not in guarded and entry is not seal}
    text = json.dumps({"version": 1, "records": records}, separators=(",", ":")).encode()
    seal.data = text + b"\n%08x" % zlib.crc32(text)


# --- payloads ---------------------------------------------------------------------------------------------------------

def row_bytes(planes: int) -> int:
    return sum((1 if name == "mode" else 4) * (planes if name in ("size", "mode") else 1) for name in COLUMNS)


class Payload(bytearray):
    """A payload's bytes with its fields by name."""

    def get(self, name) -> int:
        offset, kind = HEADER[name]
        return struct.unpack_from("<" + kind, self, offset)[0]

    def put(self, name, value) -> None:
        offset, kind = HEADER[name]
        struct.pack_into("<" + kind, self, offset, value & (1 << 8 * struct.calcsize(kind)) - 1)

    def columns(self) -> dict[str, tuple[int, int, int]]:
        """Name -> (offset, bytes an item, rows)."""
        at, n, planes, found = 64, self.get("chunks"), self.get("planes"), {}
        if n * max(1, planes) > len(self):
            raise struct.error("a table that is not there")
        for name in COLUMNS:
            width, rows = (1 if name == "mode" else 4), (planes if name in ("size", "mode") else 1)
            found[name] = at, width, rows
            at += width * rows * n
        return found

    @property
    def table_end(self) -> int:
        return 64 + self.get("chunks") * row_bytes(self.get("planes"))

    @property
    def data_start(self) -> int:
        return -(-self.table_end // 16) * 16

    def cells(self, chunk: int) -> list[tuple[int, int]]:
        """(offset, bytes) of a chunk's cells in all columns."""
        n = self.get("chunks")
        return [(at + width * (row * n + chunk), width) for at, width, rows in self.columns().values() for row in range(rows)]

    def spans(self) -> list[tuple[int, int]]:
        """Where the stored bytes of each chunk are."""
        at, n, (first, _, planes), spans = self.data_start, self.get("chunks"), self.columns()["size"], []
        for c in range(n):
            start = at
            at += sum(-(-struct.unpack_from("<I", self, first + 4 * (p * n + c))[0] // 16) * 16 for p in range(planes))
            spans.append((start, at))
        return spans

    def seal(self, chunks: bool = False, table: bool = True, header: bool = True) -> "Payload":
        """Make checksums right for what is there; as far as the counts allow that."""
        n = self.get("chunks")
        if chunks and n * max(1, self.get("planes")) <= len(self) and self.data_start <= len(self):
            at = self.columns()["crc"][0]
            for c, (start, stop) in enumerate(self.spans()):
                struct.pack_into("<I", self, at + 4 * c, zlib.crc32(self[start:stop]))
        if table:
            self.put("table_crc", zlib.crc32(self[64:self.table_end]))
        if header:
            self.put("header_crc", zlib.crc32(self[:60]))
        return self

    def swap(self, a: int, b: int, columns: bool) -> None:
        """Two chunks change places, and their rows of the table with them or not."""
        a, b = sorted((a, b))
        spans = self.spans()
        (start, stop), (later, end) = spans[a], spans[b]
        self[start:end] = self[later:end] + self[stop:later] + self[start:stop]
        if columns:
            for (x, width), (y, _) in zip(self.cells(a), self.cells(b)):
                self[x:x + width], self[y:y + width] = self[y:y + width], self[x:x + width]


def change_payload(rng: random.Random, payload: Payload) -> Payload:
    """Something wrong in a payload, without any checksum made right."""
    n = payload.get("chunks")
    kind = rng.choice(["field", "field", "cell", "cell", "swap", "swap columns", "data", "cut", "grow", "copy"])
    if kind == "field":
        name = rng.choice([name for name in HEADER if not name.endswith("crc")])
        payload.put(name, rng.choice([rng.choice(HUGE), payload.get(name) + rng.choice([-16, -1, 1, 16]), rng.getrandbits(64)]))
    elif kind == "cell" and n:
        at, width = rng.choice(payload.cells(rng.randrange(n)))
        old = int.from_bytes(payload[at:at + width], "little")
        new = rng.choice([rng.choice(HUGE), old + rng.choice([-16, -1, 1, 16]), rng.getrandbits(32), rng.randrange(5)])
        payload[at:at + width] = (new & (1 << 8 * width) - 1).to_bytes(width, "little")
    elif kind.startswith("swap") and n > 1:
        payload.swap(*rng.sample(range(n), 2), columns=kind == "swap columns")
    elif kind == "cut":
        del payload[rng.randrange(len(payload)):]
    elif kind == "grow":
        payload += bytes(rng.choice([1, 15, 16, 160]))
    elif kind == "copy" and n > 1:
        (a, b), (c, d) = (payload.spans()[i] for i in rng.sample(range(n), 2))
        length = min(b - a, d - c)
        payload[a:a + length] = payload[c:c + length]
    else:
        damage(rng, payload, payload.data_start, len(payload))
    return payload


# --- bytes ------------------------------------------------------------------------------------------------------------

def damage(rng: random.Random, data: bytearray, start: int, stop: int) -> None:
    """Flip bits or replace bytes between `start` and `stop`."""
    if stop <= start:
        return
    kind = rng.choice(["bit", "bit", "bit", "bits", "byte", "bytes", "run", "zeros", "ones"])
    at = rng.randrange(start, stop)
    if kind == "bit":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "bits":
        for _ in range(rng.randrange(2, 9)):
            data[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    elif kind == "byte":
        data[at] = rng.randrange(256)
    elif kind == "bytes":
        for _ in range(rng.randrange(2, 9)):
            data[rng.randrange(start, stop)] = rng.randrange(256)
    else:
        end = min(stop, at + rng.choice([2, 4, 8, 16, 64, 512, 4096]))
        data[at:end] = rng.randbytes(end - at) if kind == "run" else (b"\0" if kind == "zeros" else b"\xff") * (end - at)


def integers(data: bytes):
    """(position, end, value) of the integers in a pickle."""
    ops = list(pickletools.genops(data))
    for (op, arg, at), (_, _, end) in zip(ops, ops[1:]):
        if type(arg) is int and op.name in ("BININT", "BININT1", "BININT2", "LONG1"):
            yield at, end, arg


def number(value: int) -> bytes:
    return pickle.dumps(value, 2)[2:-1]


def change_pickle(rng: random.Random, data: bytes) -> bytes:
    kind = rng.choice(["flip", "flip", "integer", "integer", "string", "key", "class", "delete", "double", "exchange", "cut"])
    ops = list(pickletools.genops(data))
    ends = [at for _, _, at in ops[1:]] + [len(data)]
    if kind == "integer":
        at, end, value = rng.choice(list(integers(data)))
        return data[:at] + number(rng.choice([value + rng.choice([-1, 1, 8]), rng.choice(HUGE), -1, value * 2])) + data[end:]
    if kind in ("string", "key", "class"):
        wanted = {"string": lambda arg: True, "key": lambda arg: arg.isdigit(), "class": lambda arg: False}[kind]
        places = [(at, end, arg) for (op, arg, at), end in zip(ops, ends) if op.name == "BINUNICODE" and wanted(arg)]
        if kind == "class":
            places = [(at, end, arg) for (op, arg, at), end in zip(ops, ends) if op.name == "GLOBAL"]
        if places:
            at, end, arg = rng.choice(places)
            other = rng.choice(places)[2]
            if kind == "class":
                other = rng.choice([other, "torch LongStorage", "torch FloatStorage", "torch BFloat16Storage",
                                    "collections OrderedDict"])
                return data[:at] + b"c" + other.replace(" ", "\n").encode() + b"\n" + data[end:]
            other = rng.choice([other, arg + "x", arg[:-1], arg[::-1]]).encode()
            return data[:at] + b"X" + struct.pack("<I", len(other)) + other + data[end:]
    if kind in ("delete", "double"):
        i = rng.randrange(len(ops))
        at, end = ops[i][2], ends[i]
        return data[:at] + (data[at:end] * 2 if kind == "double" else b"") + data[end:]
    if kind == "exchange":
        i, j = sorted(rng.sample(range(len(ops)), 2))
        (a, b), (c, d) = (ops[i][2], ends[i]), (ops[j][2], ends[j])
        return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]
    if kind == "cut":
        return data[:rng.randrange(len(data))]
    changed = bytearray(data)
    damage(rng, changed, 0, len(changed))
    return bytes(changed)


# --- corruptions ------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Corruption:
    """`other` names a file whose content may come out as well: a splice can leave all that counts of one file whole.
    `runs` tells that the pickle itself asks for code to be run.
    """
    kind: str
    data: bytes
    forged: bool
    other: str | None = None
    runs: bool = False


ACCIDENTAL, FORGED = {}, {}


def accidental(weight):
    return lambda function: ACCIDENTAL.setdefault(function, weight) and function


def forged(weight):
    return lambda function: FORGED.setdefault(function, weight) and function


def corrupt(seed: int, files: list[File]) -> tuple[File, Corruption]:
    """The corruption number `seed` of one of `files`; every fifth is forged."""
    rng = random.Random(seed)
    kinds = FORGED if seed % 5 == 4 else ACCIDENTAL
    while True:
        file = rng.choice(files)
        function = rng.choices(list(kinds), list(kinds.values()))[0]
        try:
            made = function(rng, file, files)
        except (struct.error, OverflowError):  # the second change of a payload whose counts the first one spoiled
            continue
        data, extra = made if isinstance(made, tuple) else (made, {})
        if data is not None and bytes(data) != file.data:
            return file, Corruption(function.__name__.replace("_", " "), bytes(data), kinds is FORGED, **extra)


REGIONS = {"pickle": 4, "seal": 2, "directory": 4, "end": 1, "local header": 3, "header": 3, "table": 3, "chunks": 3,
           "plain": 3, "small": 1}


@accidental(40)
def flips(rng, file, files):
    data = bytearray(file.data)
    regions = {name: weight for name, weight in REGIONS.items() if file.regions[name]}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choices(list(regions), list(regions.values()))[0]
        damage(rng, data, *rng.choice(file.regions[name]))
    return data


@accidental(4)
def truncation(rng, file, files):
    borders = [at for spans in file.regions.values() for span in spans for at in span]
    return file.data[:rng.choice([rng.randrange(len(file.data)), rng.choice(borders), len(file.data) - rng.randrange(1, 64)])]


@accidental(2)
def extension(rng, file, files):
    size = rng.choice([1, 22, 64, 512, 70_000])
    return file.data + rng.choice([bytes(size), rng.randbytes(size), file.data[:size], file.data[-size:]])


@accidental(4)
def bytes_moved(rng, file, files):
    """Lost, inserted or doubled: what lies behind is elsewhere."""
    a, size = rng.randrange(len(file.data)), rng.choice([1, 2, 16, 64, 512, 4096])
    part = rng.choice([b"", file.data[a:a + size] * 2, rng.randbytes(size) + file.data[a:a + size]])
    return file.data[:a] + part + file.data[a + size:]


@accidental(8)
def splice(rng, file, files):
    """A part of one file in another: an old block of an earlier save, the end of another file."""
    other = rng.choice(files)
    if rng.random() < 0.5:
        a = rng.choice([rng.randrange(len(file.data)), rng.randrange(len(file.data)) & ~511])
        return file.data[:a] + other.data[a:], {"other": other.name}
    a, size = rng.randrange(len(file.data)) & ~63, rng.choice([64, 512, 4096, 16384])
    return file.data[:a] + other.data[a:a + size] + file.data[a + size:], {"other": other.name}


@accidental(10)
def payload_changed(rng, file, files):
    """In one or two places, with its own checksums made right or not; the pickle's `meta.crc` is for another."""
    entries = file.entries
    for _ in range(rng.choice([1, 1, 2])):
        if not payloads(entries):
            return None
        entry = rng.choice(payloads(entries))
        payload = change_payload(rng, Payload(entry.data))
        if len(payload) > 64 and rng.random() < 0.7:
            _seal_some(rng, payload)
        entry.data = bytes(payload)
    return build(entries)


def _seal_some(rng, payload):
    try:
        payload.seal(chunks=rng.random() < 0.7, table=rng.random() < 0.9, header=rng.random() < 0.9)
    except (struct.error, MemoryError, OverflowError):  # counts beyond what is there: only the header's own can be right
        payload.put("header_crc", zlib.crc32(payload[:60]))


@accidental(6)
def records_exchanged(rng, file, files):
    """Two records of one file, or one with the record of that name in another file; names or data."""
    entries, other = file.entries, rng.choice(files)
    mine = [entry for entry in entries if rng.random() < 0.2 or b"/data/" in entry.name]
    a = rng.choice(mine)
    if rng.random() < 0.4:
        theirs = [entry for entry in other.entries if entry.name.partition(b"/")[2] == a.name.partition(b"/")[2]]
        if not theirs:
            return None
        a.data = theirs[0].data
        return build(entries), {"other": other.name}
    same = [entry for entry in mine if entry is not a and len(entry.data) == len(a.data)]
    b = rng.choice(same or [entry for entry in mine if entry is not a] or [a])
    a.data, b.data = b.data, a.data
    return build(entries)


@accidental(6)
def plain_record_changed(rng, file, files):
    entries = file.entries
    entry = rng.choice([entry for entry in entries if entry.data[:8] != MAGIC])
    data = bytearray(entry.data)
    damage(rng, data, 0, len(data))
    if rng.random() < 0.2:
        data = rng.choice([data[:-1], data + b"\0", data[:len(data) // 2], bytearray()])
    entry.data = bytes(data)
    return build(entries)


@accidental(14)
def zip_attack(rng, file, files):
    entries, end, comment, tail = file.entries, {}, b"", b""
    a, b = rng.choice(entries), rng.choice(entries)
    where = [a.local, a.central]
    kind = rng.choice(["size", "packed", "sizes", "offset", "name", "case", "root", "method", "flags", "crc", "double",
                       "double changed", "overlap",
                       "zip64", "zip64 sizes", "comment", "end", "external", "local names", "lost", "order", "end64",
                       "followed"])
    sized = len(a.data) + rng.choice([-len(a.data), -1, 1, -16, 64, len(a.data), rng.choice(HUGE)])
    if kind in ("size", "packed"):
        rng.choice(where)[kind] = sized
    elif kind == "sizes":
        for fields in rng.choice([where, where[:1], where[1:]]):
            fields.update(size=sized, packed=sized)
    elif kind == "offset":
        places = [start for start, _ in file.regions["local header"]]
        a.central["offset"] = rng.choice([*places, rng.choice(HUGE), rng.randrange(len(file.data))])
    elif kind == "name":
        a.name = rng.choice([b.name, a.name + b"x", a.name[:-1], b"../" + a.name, b"/etc/x", a.name.replace(b"/", b"\\"),
                             a.name + b"\0x",
                             b"\xff\xfe", a.name + b"/", b""])
    elif kind == "case":
        a.name = a.name.swapcase()
    elif kind == "root":
        for entry in rng.choice([entries, entries[:1], entries[1:]]):
            entry.name = b"other/" + entry.name.partition(b"/")[2]
    elif kind == "method":
        method = rng.choice([8, 12, 1, 255])
        if rng.random() < 0.5 and method == 8:  # really deflated: the content is what it was
            coder = zlib.compressobj(6, zlib.DEFLATED, -15)
            raw, a.data = a.data, coder.compress(a.data) + coder.flush()
            for fields in where:
                fields.update(method=8, size=len(raw), crc=zlib.crc32(raw))
        else:
            for fields in rng.choice([where, where[:1], where[1:]]):
                fields["method"] = method
    elif kind in ("flags", "crc", "external"):
        for fields in rng.choice([where, where[:1], where[1:]]):
            fields[kind] = rng.choice([rng.getrandbits(32), 1 << rng.randrange(32)])
    elif kind.startswith("double"):
        twin = replace(a, local={}, central={})
        if kind == "double changed":
            data = bytearray(twin.data or b"x")
            damage(rng, data, 0, len(data))
            twin.data = bytes(data)
        if rng.random() < 0.3:
            twin.name = twin.name.upper()
        entries.insert(rng.randrange(len(entries) + 1), twin)
    elif kind == "overlap":
        start = file.regions["local header"][[entry.name for entry in entries].index(b.name)][0]
        if a is b:
            return None
        a.at, a.local = start, {}
        a.central.update(crc=zlib.crc32(b.data), size=len(b.data), packed=len(b.data))
    elif kind == "zip64":
        extra = struct.pack("<HHQQQ", 1, 24, *(rng.choice([len(a.data), rng.choice(HUGE)])
                                               for _ in range(3)))[:rng.choice([28, 20, 12])]
        a.extra, a.central_extra = rng.choice([(extra, b""), (b"", extra), (extra, extra)])
    elif kind == "zip64 sizes":
        extra = struct.pack("<HHQQ", 1, 16, *([rng.choice([len(a.data), rng.choice(HUGE)])] * 2))
        a.extra = a.central_extra = extra
        for fields in where:
            fields.update(size=0xFFFFFFFF, packed=0xFFFFFFFF)
    elif kind == "comment":
        comment = rng.choice([rng.randbytes(30), b"PK\5\6" + bytes(18), file.data[-22:], bytes(65535)])
    elif kind == "end":
        name = rng.choice(END_FIELDS[1:])
        end[name] = rng.choice([rng.choice(HUGE), rng.randrange(len(file.data)), len(entries) - 1, len(entries) + 1])
    elif kind == "local names":
        a.local["name_bytes"] = len(a.name) + rng.choice([-1, 1, 4, 64, 1000])
    elif kind == "lost":
        entries.remove(a)
    elif kind == "order":
        rng.shuffle(entries)
    elif kind == "end64":
        place = rng.choice([len(file.data), rng.randrange(len(file.data)), rng.choice(HUGE)])
        tail = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, len(entries), len(entries), rng.choice(HUGE),
                           rng.choice(HUGE))
        tail += struct.pack("<4sIQI", b"PK\6\7", 0, place, 1)
        end.update(rng.choice([{}, {"start": 0xFFFFFFFF}, {"count": 0xFFFF, "here": 0xFFFF}]))
    elif kind == "followed":
        return build(entries) + rng.choice([b"PK\5\6" + bytes(18), b"PK\1\2", bytes(100)])
    return build(entries, comment, end, tail)


@accidental(10)
def pickle_changed(rng, file, files):
    """The zip is right for it, the seal is not. Only behind the seal's call: without that there is nothing to contradict it."""
    entries = file.entries
    entry = record(entries, b"data.pkl")
    head = seal_call(entry.data)
    changed = change_pickle(rng, entry.data)
    if changed[:head] != entry.data[:head]:
        return None
    entry.data = changed
    return build(entries)


def seal_call(data: bytes) -> int:
    """Where the call that verifies the seal ends."""
    return next(at + 1 for op, _, at in pickletools.genops(data) if op.name == "REDUCE")


@forged(4)
def pickle_forged(rng, file, files):
    entries = file.entries
    entry = record(entries, b"data.pkl")
    for _ in range(rng.choice([1, 1, 2, 3])):
        try:
            entry.data = change_pickle(rng, entry.data)
        except Exception:  # what the first change left is no pickle any more
            break
    if rng.random() < 0.8:
        reseal(entries)
    return build(entries)


@forged(4)
def payload_forged(rng, file, files):
    """Everything that speaks for the payload is made right: its checksums, the pickle's, the seal."""
    entries = file.entries
    if not payloads(entries):
        return None
    entry = rng.choice(payloads(entries))
    before = Payload(entry.data)
    payload = change_payload(rng, Payload(entry.data))
    if len(payload) <= 64:
        return None
    try:
        payload.seal(chunks=True)
    except (struct.error, MemoryError, OverflowError):
        payload.put("header_crc", zlib.crc32(payload[:60]))
    entry.data = bytes(payload)
    widths = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8}
    width = widths.get(payload.get("transform"), 1)
    swap_numbers(entries, {before.get("header_crc"): payload.get("header_crc"), len(before): len(payload),
                           before.get("elements") * width: payload.get("elements") * width})
    guarded = {entry.name for entry in payloads(file.entries)}
    reseal(entries, guarded)
    return build(entries)


def swap_numbers(entries: list[Entry], numbers: dict[int, int]) -> None:
    """Replace integers all over the pickle."""
    entry = record(entries, b"data.pkl")
    for at, end, value in reversed(list(integers(entry.data))):
        if numbers.get(value, value) != value:
            entry.data = entry.data[:at] + number(numbers[value]) + entry.data[end:]


@forged(1)
def zeros_forged(rng, file, files):
    """A payload of nothing but zero chunks: as large when decoded as its table allows, here up to 64 MiB."""
    entries = file.entries
    if not payloads(entries):
        return None
    entry = rng.choice(payloads(entries))
    before, payload = Payload(entry.data), Payload(entry.data[:64])
    planes, transform = before.get("planes"), before.get("transform")
    width = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8}[transform]
    chunks, most = rng.randrange(1, 9), 1 << 20
    for name, value in dict(chunk_elements=most, elements=chunks * most, chunks=chunks, data_bytes=0).items():
        payload.put(name, value)
    payload += bytes(chunks * row_bytes(planes))
    payload += bytes(-len(payload) % 16)
    payload.seal()
    entry.data = bytes(payload)
    swap_numbers(entries, {before.get("header_crc"): payload.get("header_crc"), len(before): len(payload),
                           before.get("elements") * width: chunks * most * width})
    reseal(entries)
    return build(entries)


@forged(2)
def records_forged(rng, file, files):
    entries = file.entries
    entry = rng.choice(plain(entries) or entries)
    data = bytearray(entry.data)
    damage(rng, data, 0, len(data))
    entry.data = bytes(data) if rng.random() < 0.7 else bytes(data[:rng.randrange(len(data) + 1)])
    reseal(entries)
    return build(entries)


@forged(1)
def unsealed(rng, file, files):
    """The pickle without the calls around it: a file that never heard of the seal."""
    entries = file.entries
    entry = record(entries, b"data.pkl")
    changed = change_pickle(rng, entry.data)
    head = seal_call(entry.data)
    entry.data = b"\x80\x02" + changed[head:] if rng.random() < 0.5 else b"\x80\x02" + changed[head:-4] + b"."
    return build(entries)


@forged(1)
def code_in_the_pickle(rng, file, files):
    """A call of something that weights_only refuses; `hostile_probe` is the worker's own, and notes that it was called."""
    entries = file.entries
    entry = record(entries, b"data.pkl")
    call = rng.choice([b"chostile_probe\ntouch\n)R0", b"cposix\nsystem\nX\x04\0\0\0true\x85R0",
                       b"cbuiltins\neval\nX\x03\0\0\x001+1\x85R0"])
    head = rng.choice([2, seal_call(entry.data)])
    entry.data = entry.data[:head] + call + entry.data[head:]
    reseal(entries)
    return build(entries), {"runs": True}
