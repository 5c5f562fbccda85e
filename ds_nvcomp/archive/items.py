"""Items: objects saved each by itself, to become part of a larger file. All of a group are encoded in one pipeline."""
from __future__ import annotations

import gc
import io
from contextlib import contextmanager
from typing import Callable, Collection, Sequence

import numpy as np
import torch

from ..config import Config
from ..log import logger
from ..pipeline import Payload, Source, encode
from . import pickler
from .writer import Archive, lay_out, source

PROTOCOL = 2  # torch.save's


class Item(io.BytesIO):
    """The bytes of `save(obj)`, for writers that take them from an io.BytesIO by `getbuffer`, also in another process.

    `build` returns them, as buffers that follow one another. It is called when they are first asked for. They stay in the memory that they
    were encoded to until all are wanted in one piece; pickling copies them once, to memory that the processes share.
    """

    def __init__(self, build: Callable[[], Sequence]):
        super().__init__()
        self._build = build
        self._parts: list[memoryview] | None = None
        self._whole: torch.Tensor | None = None

    @property
    def parts(self) -> list[memoryview]:
        if self._parts is None:
            self._parts = [memoryview(part).cast("B") for part in self._build() if memoryview(part).nbytes]
            self._build = None
        return self._parts

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts) if self._whole is None else self._whole.numel()

    def gather(self, *, shared: bool = False) -> "Item":
        """Have the bytes in one piece of ordinary memory: what was pinned is not there after a fork."""
        if self._whole is None:
            storage = torch.UntypedStorage._new_shared(self.nbytes) if shared else torch.UntypedStorage(self.nbytes)
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.nbytes,), (1,))
            at, target = 0, whole.numpy()
            for part in self.parts:
                np.copyto(target[at:at + part.nbytes], np.frombuffer(part, np.uint8))  # without the GIL
                at += part.nbytes
            self._whole, self._parts = whole, []
        return self

    def getbuffer(self) -> memoryview:
        return memoryview(self.gather()._whole.numpy())

    def getvalue(self) -> bytes:
        return bytes(self.getbuffer())

    def __reduce__(self):
        return _item_of, (self.gather(shared=True)._whole,)


def _item_of(whole: torch.Tensor) -> Item:
    item = Item(list)
    item._whole = whole
    return item


def encode_items(objs: Sequence, config: Config, names: Sequence[str] = ()) -> list[io.BytesIO]:
    """An `Item` for each of `objs`: a tensor, or an io.BytesIO that torch.save has written to, whose content is saved anew, however small:
    in a torch zip nobody would notice other bits. An `Item`, and what is no torch zip, stays as it is. `names` are what errors call them,
    also when they are read again.

    The objects may change when this returns, and nothing keeps their large storages. Raises `EncodeError`, `CodecUnavailableError`.
    """
    objs = [_content(obj) for obj in objs]
    worth = [i for i, obj in enumerate(objs) if not isinstance(obj, io.BytesIO)]
    with _no_collection():
        archives = _encode([_bare(objs[i]) for i in worth], config.concrete, [names[i] for i in worth] if names else ())
    found = {i: Item(archive.buffers) for i, archive in zip(worth, archives)}
    return [found.get(i, obj) for i, obj in enumerate(objs)]


class _Saved:
    """What was in a BytesIO."""

    def __init__(self, content):
        self.content = content


def _bare(obj):
    return obj.content if isinstance(obj, _Saved) else obj.detach()


def _content(obj):
    """What is to be saved in place of `obj`; a BytesIO where that is to stay. The bytes are this process's own, just written."""
    if not isinstance(obj, io.BytesIO) or isinstance(obj, Item):
        return obj
    if bytes(obj.getbuffer()[:4]) != b"PK\3\4":
        return obj
    try:
        return _Saved(torch.load(io.BytesIO(obj.getbuffer()), weights_only=False))
    except Exception as err:  # whatever an object's own classes raise: it is stored as it was
        logger.warning(f"an item of {obj.getbuffer().nbytes} bytes stays uncompressed, without a seal: it could not be read again "
                       f"({type(err).__name__}: {err}).")
        return obj


@contextmanager
def _no_collection():
    """Many small objects are made, and kept: the garbage collector finds nothing in them, and took twice as long as making them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _encode(objs: list, config: Config, names: Sequence[str]) -> "list[_Alone | _Still]":
    """All in one pipeline. What is left to do for each, on any thread, is not much, but there may be many."""
    names = names or [""] * len(objs)
    archives = [_Alone(obj, config, name) if pickler.is_simple(obj, config.min_bytes) else None for obj, name in zip(objs, names)]
    others = [i for i, archive in enumerate(archives) if archive is None]
    frozen, tensors = pickler.freeze([objs[i] for i in others])
    for i, obj in zip(others, frozen):
        archives[i] = _Still(obj, config, names[i])
    sources = [archive.sources() for archive in archives]
    owners = [(archive, i) for archive, own in zip(archives, sources) for i in range(len(own))]
    for at, payload in encode([source for own in sources for source in own], config, lambda raw_bytes: None):
        archive, i = owners[at]
        archive.payloads.append((i, payload))
    gone = {key for archive in archives for key in archive.let_go_of_storages()}
    for tensor in tensors:
        tensor.let_go(gone)
    return archives


class _Alone:
    """A simple tensor by itself: what pickling it would tell is known without. Training waits for ten microseconds of this, not for sixty;
    a model has thousands of tensors."""

    def __init__(self, tensor: torch.Tensor, config: Config, name: str):
        self._span, self._shape = pickler.span_of(tensor, name), (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._config = config
        self.payloads: list[tuple[int, Payload]] = []

    def sources(self) -> list[Source]:
        return [source(self._span)]

    def let_go_of_storages(self) -> Collection[int]:
        self._span.let_go()
        return ()

    def buffers(self) -> list:
        """What `save` would write, as buffers on the host that follow one another."""
        frozen = pickler.Frozen.alone(self._span.dtype, *self._shape)
        plan = pickler.Plan({}, {frozen.key: [self._span]}, False)
        return _laid_out(Archive(frozen, self._config, PROTOCOL, alias=False, plan=plan), self.payloads)


class _Still(Archive):
    """An archive of a frozen object that is encoded at once, and laid out later without the storages."""

    def __init__(self, frozen, config: Config, name: str):
        super().__init__(frozen, config, PROTOCOL, alias=False)
        for span in self.spans if name else ():
            span.name = f"{name}.{span.name}" if span.name else name
        self.payloads: list[tuple[int, Payload]] = []
        self._buffers: list | None = None

    def let_go_of_storages(self) -> Collection[int]:
        """Keep what is still needed of those that have been encoded; returns their identities."""
        if self._plan.others:  # torch writes those when it comes to them
            self.buffers()
            self.let_go()
            return ()
        for span in self.spans:
            if span.nbytes < self.config.min_bytes:
                span.hold("cpu")
            span.let_go()
        self._plan.storages.clear()
        return self._plan.spans

    def buffers(self) -> list:
        """What `save` would write, as buffers on the host that follow one another."""
        if self._buffers is None:
            self._buffers = _laid_out(self, self.payloads)
        return self._buffers


def _laid_out(archive: Archive, payloads: list[tuple[int, Payload]]) -> list:
    buffers: list = []
    lay_out(archive, lambda offset, given: buffers.extend(given), "archive", records=archive.records(payloads))
    return buffers
