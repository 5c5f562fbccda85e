"""Items: objects saved each by itself, to become part of a larger file. All of a group are encoded in one pipeline."""
from __future__ import annotations

import io
from typing import Sequence

import numpy as np
import torch

from ..config import Config
from ..log import logger
from .writer import buffers

REPACKED = 64 << 10  # bytes; smaller objects are left as torch.save has written them


class Item(io.BytesIO):
    """The bytes of `save(obj)`, for writers that take them from an io.BytesIO by `getbuffer`, also in another process.

    They stay in pieces, in the memory that they were encoded to, until they are asked for: pickling copies them once, to memory that the
    processes share.
    """

    def __init__(self, parts: Sequence):
        super().__init__()
        self._parts = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
        self._whole: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts) if self._whole is None else self._whole.numel()

    def gather(self, *, shared: bool = False) -> "Item":
        """Have the bytes in one piece of ordinary memory: what was pinned is not there after a fork."""
        if self._whole is None:
            storage = torch.UntypedStorage._new_shared(self.nbytes) if shared else torch.UntypedStorage(self.nbytes)
            whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (self.nbytes,), (1,))
            at, target = 0, whole.numpy()
            for part in self._parts:
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
    item = Item([])
    item._whole = whole
    return item


def encode_items(objs: Sequence, config: Config, names: Sequence[str] = ()) -> list[io.BytesIO]:
    """An `Item` for each of `objs`: a tensor, or an io.BytesIO that torch.save has written to, whose content is saved anew. An `Item`, and
    what is small or no torch zip, stays as it is. `names` are what errors call them.

    Raises `EncodeError`, `CodecUnavailableError`.
    """
    objs = [_content(obj) for obj in objs]
    worth = [i for i, obj in enumerate(objs) if not isinstance(obj, io.BytesIO)]
    found = dict(zip(worth, map(Item, buffers([_bare(objs[i]) for i in worth], config, names=[names[i] for i in worth] if names else ()))))
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
    if obj.getbuffer().nbytes < REPACKED or bytes(obj.getbuffer()[:4]) != b"PK\3\4":
        return obj
    try:
        return _Saved(torch.load(io.BytesIO(obj.getbuffer()), weights_only=False))
    except Exception as err:  # whatever an object's own classes raise: it is stored as it was
        logger.warning(f"an item of {obj.getbuffer().nbytes} bytes stays uncompressed: it could not be read again "
                       f"({type(err).__name__}: {err}).")
        return obj
