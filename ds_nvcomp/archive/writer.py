"""`save`: torch.save's contract, compressed."""
from __future__ import annotations

import functools
import os
import secrets
import stat
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.serialization import location_tag

from ..config import Config
from ..encoding import transforms
from ..pipeline import Payload, Source, encode
from . import files, pickler, seal
from .container import Container
from .storage import describe, dtype_name


@dataclass(frozen=True)
class SaveReport:
    """`raw_bytes` are the tensor bytes that were saved, `stored_bytes` the size of the file, `digest` the CRC-32 of its zip directory."""
    raw_bytes: int
    stored_bytes: int
    seconds: float
    digest: int = 0

    @property
    def ratio(self) -> float:
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else 1.0


def save(obj, f, config=None, *, pickle_protocol: int = 2, progress=None) -> SaveReport:
    """Save `obj` as `torch.save(obj, f)` would, with tensor storages compressed; plain `torch.load` opens the file.

    `f` is a path or a binary file object; a path is replaced only when the new file is whole (and durable, unless the
    configuration says otherwise). `config` is a `Config` or a mapping of its keys; `progress(raw_bytes)` is called as work is done.
    Raises `ConfigError`, `CodecUnavailableError`, `EncodeError` and the operating system's own errors; then `f` is as it was.
    """
    config = Config.of(config)
    if isinstance(f, (str, os.PathLike)):
        path = Path(os.path.realpath(f))  # a link stays one
        part = path.with_name(f".ds_nvcomp-{secrets.token_hex(4)}.part")
        try:
            report = write(obj, part, config, root=path.stem or "archive", pickle_protocol=pickle_protocol, progress=progress)
            if path.exists():
                part.chmod(stat.S_IMODE(path.stat().st_mode))
            os.replace(part, path)
            if config.fsync:
                files.sync_directory(path.parent)
        finally:
            part.unlink(missing_ok=True)
        return report
    return _write(obj, lambda offset, buffers: _append(f, buffers), config, "archive", pickle_protocol, progress)


def _append(file, buffers) -> None:
    """Write buffers to a file object; an unbuffered one may take less than it is given (on Linux, 2 GiB at most)."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view.nbytes:
            written = file.write(view)
            view = view[view.nbytes if written is None else written:]


def write(obj, path, config: Config, *, root: str, pickle_protocol: int = 2, progress=None) -> SaveReport:
    """Write the archive straight to `path`, truncating what is there; durable when this returns if `config.fsync`."""
    with files.Writer(path, fsync=config.fsync) as file:
        return _write(obj, file.write_at, config, root, pickle_protocol, progress, functools.partial(files.expect_room, path))


def _write(obj, write_at, config, root, protocol, progress, room=lambda nbytes: None):
    """`room(nbytes)` may refuse to go on when it is known how much will be written at least."""
    began = time.perf_counter()
    plan = pickler.collect(obj)
    worth = [span for span in plan.all_spans() if span.nbytes >= config.min_bytes]
    sources = [Source(span.data, transforms.for_dtype(dtype_name(span.dtype)), span.name) for span in worth]
    payloads = dict(zip(map(id, worth), encode(sources, config, progress or (lambda raw_bytes: None))))

    zipped = Container(write_at, root)
    records = {}  # what goes into the zip as data/KEY: a Payload, a Span or bytes
    entries: dict[int, list[pickler.Entry]] = {}
    plain_keys: dict[int, str] = {}
    keep = []  # storages met in the second pass only stay alive, so that their identity is not reused

    def plain(storage):
        if storage._cdata not in plain_keys:
            plain_keys[storage._cdata] = str(len(records))
            records[plain_keys[storage._cdata]] = _host_bytes(storage)
            keep.append(storage)
        return plain_keys[storage._cdata]

    for key, spans in plan.spans.items():
        entries[key] = []
        for span in spans:
            payload = payloads.get(id(span))
            entry = pickler.Entry(str(len(records)), span.dtype, span.nbytes, location_tag(span.storage), span.start, span.stop)
            if payload is not None:  # also where it did not shrink: its checksums are worth more than its 0.01 %
                entry.nbytes, entry.meta = payload.nbytes, describe(span.dtype, payload, span.name)
                records[entry.key] = payload
            else:
                records[entry.key] = span
            entries[key].append(entry)

    room(sum(payload.nbytes for payload in payloads.values()))
    data = pickler.dump(obj, protocol, entries, plain)
    # No `.format_version`: it promises torch.save's own order and sizes of records, from which torch may compute their offsets.
    zipped.add("byteorder", [b"little"])
    for key, record in records.items():
        if isinstance(record, Payload):
            zipped.add(f"data/{key}", record.parts, record.checksum())
        else:
            zipped.add(f"data/{key}", [_host_bytes(record) if isinstance(record, pickler.Span) else record])
    zipped.add("data.pkl", [data])
    zipped.add("version", [b"3\n"])
    guarded = {f"data/{entry.key}" for spans in entries.values() for entry in spans if entry.meta is not None}
    zipped.add(seal.RECORD, [seal.write_seal({name: check for name, check in zipped.checksums.items() if name not in guarded})])
    stored, digest = zipped.close()
    raw = sum(span.nbytes for span in plan.all_spans()) + sum(storage.nbytes() for storage in keep)
    return SaveReport(raw, stored, time.perf_counter() - began, digest)


def _host_bytes(storage):
    """The bytes of a storage or span as a buffer on the host."""
    if isinstance(storage, pickler.Span):
        data = storage.data
    else:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        data = data.set_(storage, 0, (storage.nbytes(),), (1,)) if storage.nbytes() else data
    return data.cpu().numpy()
