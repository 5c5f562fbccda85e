"""`save`: torch.save's contract, compressed."""
from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Collection, Iterable, Iterator, Mapping

import torch

from ..config import Config
from ..encoding import transforms
from ..pipeline import Payload, Source, encode
from . import files, pickler, seal
from .container import Container
from .link import Link
from .storage import describe, dtype_name


@dataclass(frozen=True)
class SaveReport:
    """`raw_bytes` are the tensor bytes that were saved, `stored_bytes` the size of the file, `digest` the CRC-32 of its zip directory.

    `seconds` are all that it took, `encode_seconds` until the last byte was encoded. `links` are what the file says of other files.
    """
    raw_bytes: int
    stored_bytes: int
    seconds: float
    digest: int = 0
    encode_seconds: float = 0.0
    links: tuple[str, ...] = ()

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
        with files.replacing(path, fsync=config.fsync) as part:
            report = write(obj, part, config, root=path.stem or "archive", pickle_protocol=pickle_protocol, progress=progress)
            if path.exists():
                part.chmod(stat.S_IMODE(path.stat().st_mode))
        return report
    return lay_out(Archive(obj, config, pickle_protocol, progress), lambda offset, buffers: _append(f, buffers), "archive")


def _append(file, buffers) -> None:
    """Write buffers to a file object; an unbuffered one may take less than it is given (on Linux, 2 GiB at most)."""
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        while view.nbytes:
            written = file.write(view)
            view = view[view.nbytes if written is None else written:]


Links = Mapping[int, Link]  # by the address of the fp32 numbers


def write(obj, path, config: Config, *, root: str, pickle_protocol: int = 2, progress=None, links: Links = {}) -> SaveReport:
    """Write the archive straight to `path`, truncating what is there; durable when this returns if `config.fsync`. What `links` has is
    stored as its difference from what it links to.

    What is encoded is written while the rest is being encoded.
    """
    began = time.perf_counter()
    with files.Writer(path, fsync=config.fsync, threads=config.write_threads) as file:
        report = lay_out(Archive(obj, config, pickle_protocol, progress, links=links), file.write_at, root, file.expect_room)
    return replace(report, seconds=time.perf_counter() - began)


class Snapshot:
    """An archive in host memory, of which nothing aliases the object."""

    def __init__(self, archive: "Archive", root: str):
        self._records, self._archive, self._root = list(archive.records()), archive.let_go(), root

    def write(self, path) -> SaveReport:
        """Write it to `path`, truncating what is there; durable when this returns if the configuration says so."""
        config = self._archive.config
        with files.Writer(path, fsync=config.fsync, threads=config.write_threads) as file:
            file.expect_room(sum(payload.nbytes for _, payload in self._records if isinstance(payload, Payload)))
            return lay_out(self._archive, file.write_at, self._root, records=self._records)


def snapshot(obj, config: Config, *, root: str, pickle_protocol: int = 2, links: Links = {}) -> Snapshot:
    """Encode `obj` to host memory. Raises `EncodeError`, `CodecUnavailableError`."""
    return Snapshot(Archive(obj, config, pickle_protocol, alias=False, links=links), root)


HELD = 1 << 20  # bytes; smaller storages are copied at once


def snapshot_later(obj, config: Config, *, root: str, moving: Collection[int] = (), pickle_protocol: int = 2,
                   links: Links = {}) -> Callable[[], Snapshot]:
    """A function that takes the snapshot of `obj` as it is now, when called, on any thread.

    Until it is done, the large storages of `obj`, and linked weights, must not change, but for those at the addresses `moving`. What
    else is in `obj` may: it is copied here.
    """
    plan = pickler.collect(obj)
    if plan.others:  # torch writes those when it comes to them
        taken = Snapshot(Archive(obj, config, pickle_protocol, alias=False, plan=plan, links=links), root)
        return lambda: taken
    frozen, _ = pickler.freeze(obj)  # tensors made anew whenever they are asked for are others
    archive = Archive(frozen, config, pickle_protocol, alias=False, links=links)
    for span in archive.spans:
        if span.nbytes < HELD or span.storage.data_ptr() in moving:
            span.hold()
    if not any(span.storage.device.type == "cuda" for span in archive.spans):
        return lambda: Snapshot(archive, root)
    device = torch.cuda.current_device()
    ready = torch.cuda.current_stream().record_event()

    def take():
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_event(ready)
            return Snapshot(archive, root)
    return take


def source(span: pickler.Span, link: Link | None = None) -> Source:
    return Source(span.data, transforms.for_dtype(dtype_name(span.dtype)), span.name, link and link.weights)


class Archive:
    """What becomes of an object: `records` are what goes into the zip. With `alias`, buffers in them may be memory of the object."""

    def __init__(self, obj, config: Config, protocol: int, progress=None, alias=True, plan=None, links: Links = {}):
        self.began = time.perf_counter()
        self.config = config.concrete
        self._obj, self._protocol, self._progress, self._alias = obj, protocol, progress or (lambda raw_bytes: None), alias
        self._plan = plan or pickler.collect(obj)
        self.spans = self._plan.all_spans()
        self._worth = [span for span in self.spans if span.nbytes >= self.config.min_bytes]
        self.raw_bytes, self.encode_seconds = sum(span.nbytes for span in self.spans), 0.0
        self._all_links, self._links = links, {}  # the latter by the identity of spans
        self.links: list[str] = []  # what has been written of them

    def let_go(self) -> "Archive":
        """Forget the object; what is left is for the report."""
        self._obj = self._plan = self.spans = self._worth = self._progress = self._all_links = self._links = None
        return self

    def sources(self) -> list[Source]:
        """What is to be encoded."""
        for span in self._worth if self._all_links else ():
            data, link = span.data, self._all_links.get(span.data.data_ptr())
            if link is not None and span.dtype is torch.float32 and span.held is None and link.fits(data):
                self._links[id(span)] = link.of(span.nbytes // 4)
        return [source(span, self._links.get(id(span))) for span in self._worth]

    def records(self, encoded: Iterable[tuple[int, Payload]] | None = None) -> Iterator[tuple[str, "Payload | bytes"]]:
        """(name, content) in the order of the file. Payloads come as they are encoded, here or, with `encoded`, where that comes from."""
        spans, worth = self.spans, self._worth
        encoded = encode(self.sources(), self.config, self._progress) if encoded is None else encoded
        entries = {id(span): pickler.Entry(str(key), span.dtype, span.nbytes, span.location, span.start, span.stop)
                   for key, span in enumerate(spans)}
        # No `.format_version`: it promises torch.save's own order and sizes of records, from which torch may compute their offsets.
        yield "byteorder", b"little"
        for i, payload in encoded:
            # Also what did not shrink is a payload: its checksums are worth more than its 0.01 %.
            entry = entries[id(worth[i])]
            link = self._links.get(id(worth[i]))
            text = None if link is None else str(link)
            self.links += [text] if text else []
            entry.nbytes, entry.meta = payload.nbytes, describe(entry.dtype, payload, worth[i].name, text)
            yield f"data/{entry.key}", payload
        for span in spans:
            if entries[id(span)].meta is None:
                yield f"data/{entries[id(span)].key}", _host_bytes(span, self._alias)
        keys: dict[int, str] = {}
        met = []  # storages met in the second pass only; kept, so that their identity is not reused

        def plain(storage):
            if storage._cdata not in keys:
                keys[storage._cdata] = str(len(spans) + len(keys))
                met.append((f"data/{keys[storage._cdata]}", storage, _host_bytes(storage, self._alias)))
            return keys[storage._cdata]

        data = pickler.dump(self._obj, self._protocol, {key: [entries[id(span)] for span in group]
                                                        for key, group in self._plan.spans.items()}, plain)
        self.raw_bytes += sum(storage.nbytes() for _, storage, _ in met)
        for name, _, content in met:
            yield name, content
        self.encode_seconds = time.perf_counter() - self.began
        yield "data.pkl", data
        yield "version", b"3\n"


def lay_out(archive: Archive, write_at, root: str, room=lambda nbytes: None, records=None) -> SaveReport:
    """Lay the records out as a zip. `room(nbytes)` may refuse to go on when it is known how much will be written next."""
    zipped, guarded = Container(write_at, root), set()
    for name, content in archive.records() if records is None else records:
        if isinstance(content, Payload):
            room(content.nbytes)
            zipped.add(name, content.parts, content.checksum())
            guarded.add(name)
        else:
            zipped.add(name, [content])
    zipped.add(seal.RECORD, [seal.write_seal({name: check for name, check in zipped.checksums.items() if name not in guarded})])
    stored, digest = zipped.close()
    return SaveReport(archive.raw_bytes, stored, time.perf_counter() - archive.began, digest, archive.encode_seconds, tuple(archive.links))


def _host_bytes(storage, alias):
    """The bytes of a storage or span as a buffer on the host; with `alias`, that may be its own memory."""
    if isinstance(storage, pickler.Span):
        data = storage.data
    else:
        data = torch.empty(0, dtype=torch.uint8, device=storage.device)
        data = data.set_(storage, 0, (storage.nbytes(),), (1,)) if storage.nbytes() else data
    return data.cpu().numpy() if alias or data.device.type != "cpu" else data.numpy().copy()
