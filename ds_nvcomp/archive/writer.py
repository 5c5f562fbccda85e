"""`save`: torch.save's contract, compressed."""
from __future__ import annotations

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
from ..pipeline import Source, encode
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
    """Write the archive straight to `path`, truncating what is there; durable when this returns if `config.fsync`.

    What is encoded is written while the rest is being encoded.
    """
    with files.Writer(path, fsync=config.fsync, threads=config.write_threads) as file:
        return _write(obj, file.write_at, config, root, pickle_protocol, progress, file.expect_room)


@dataclass(frozen=True)
class Snapshot:
    """An archive in host memory: `pieces` are (offset, buffers). Nothing of it aliases the object, which may change."""
    pieces: list
    report: SaveReport
    config: Config

    def write(self, path) -> None:
        """Write it to `path`, truncating what is there; durable when this returns if the configuration says so."""
        with files.Writer(path, fsync=self.config.fsync, threads=self.config.write_threads) as file:
            file.expect_room(self.report.stored_bytes)
            for offset, buffers in self.pieces:
                file.write_at(offset, buffers)


def snapshot(obj, config: Config, *, root: str, pickle_protocol: int = 2) -> Snapshot:
    """Encode `obj` to host memory. Raises `EncodeError`, `CodecUnavailableError`."""
    pieces = []
    report = _write(obj, lambda offset, buffers: pieces.append((offset, buffers)), config, root, pickle_protocol, alias=False)
    return Snapshot(pieces, report, config)


def _write(obj, write_at, config, root, protocol, progress=None, room=lambda nbytes: None, alias=True):
    """`room(nbytes)` may refuse to go on when it is known how much will be written next. With `alias`, what is handed to `write_at`
    may be memory of `obj`."""
    began = time.perf_counter()
    plan = pickler.collect(obj)
    spans = plan.all_spans()
    worth = [span for span in spans if span.nbytes >= config.min_bytes]
    sources = [Source(span.data, transforms.for_dtype(dtype_name(span.dtype)), span.name) for span in worth]
    entries = {id(span): pickler.Entry(str(key), span.dtype, span.nbytes, location_tag(span.storage), span.start, span.stop)
               for key, span in enumerate(spans)}
    zipped = Container(write_at, root)
    # No `.format_version`: it promises torch.save's own order and sizes of records, from which torch may compute their offsets.
    zipped.add("byteorder", [b"little"])
    guarded = set()
    for i, payload in encode(sources, config, progress or (lambda raw_bytes: None)):
        # Also what did not shrink is a payload: its checksums are worth more than its 0.01 %.
        entry = entries[id(worth[i])]
        entry.nbytes, entry.meta = payload.nbytes, describe(entry.dtype, payload, worth[i].name)
        room(payload.nbytes)
        zipped.add(f"data/{entry.key}", payload.parts, payload.checksum())
        guarded.add(f"data/{entry.key}")
    for span in spans:
        if entries[id(span)].meta is None:
            zipped.add(f"data/{entries[id(span)].key}", [_host_bytes(span, alias)])

    keys: dict[int, str] = {}
    keep = []  # storages met in the second pass only stay alive, so that their identity is not reused

    def plain(storage):
        if storage._cdata not in keys:
            keys[storage._cdata] = str(len(spans) + len(keys))
            zipped.add(f"data/{keys[storage._cdata]}", [_host_bytes(storage, alias)])
            keep.append(storage)
        return keys[storage._cdata]

    data = pickler.dump(obj, protocol, {key: [entries[id(span)] for span in group] for key, group in plan.spans.items()}, plain)
    zipped.add("data.pkl", [data])
    zipped.add("version", [b"3\n"])
    zipped.add(seal.RECORD, [seal.write_seal({name: check for name, check in zipped.checksums.items() if name not in guarded})])
    stored, digest = zipped.close()
    raw = sum(span.nbytes for span in spans) + sum(storage.nbytes() for storage in keep)
    return SaveReport(raw, stored, time.perf_counter() - began, digest)


def _host_bytes(storage, alias):
    """The bytes of a storage or span as a buffer on the host; with `alias`, that may be its own memory."""
    if isinstance(storage, pickler.Span):
        data = storage.data
    else:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        data = data.set_(storage, 0, (storage.nbytes(),), (1,)) if storage.nbytes() else data
    return data.cpu().numpy() if alias or data.device.type != "cpu" else data.numpy().copy()
