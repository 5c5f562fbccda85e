"""`unpack`: what a compressed storage in a file calls to become a storage again. Its name and arguments are part of the format.

A pickle says `unpack(payload, meta)`: `payload` is an ordinary uint8 storage of the zip, put by torch.load where `map_location`
says; `meta` is plain ints and strings. So any torch.load decodes, on the device where the tensor will live.
"""
from __future__ import annotations

import contextlib
import threading

import torch

from .. import __version__
from ..encoding import transforms
from ..encoding.format import Header
from ..errors import ChecksumError, DsNvcompError, HeaderError, UnsupportedVersionError
from ..pipeline import Payload, decode_payload, parse_payload
from . import seal
from .linked import parse

META_VERSION = 1
LINKED_VERSION = 2  # of a description that has a link: who knows only version 1 refuses it


def describe(dtype: torch.dtype, payload: Payload, name: str, link: str | None = None) -> dict:
    """The `meta` of a payload that decodes to `dtype`; `name` is where in the object it was first met, `link` what it is
    the difference from.

    `crc` is the header's checksum. Through the table's, it covers every chunk: no other payload can be put in this one's place.
    """
    return {"version": META_VERSION, "dtype": dtype_name(dtype), "bytes": payload.header.raw_bytes,
            "crc": payload.crc, "name": name, "by": f"ds_nvcomp {__version__}"} | \
        ({} if link is None else {"version": LINKED_VERSION, "link": link})


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def check_header(header: Header, meta: dict) -> None:
    """Raise `HeaderError` or `ChecksumError` unless `header` is that of the payload which `meta` describes."""
    if header.raw_bytes != meta["bytes"] or header.transform is not transforms.for_dtype(meta["dtype"]):
        raise HeaderError(f"The payload holds {header.raw_bytes} bytes by {header.transform.name}, the pickle expects "
                          f"{meta['bytes']} bytes of {meta['dtype']}. The file is damaged; restore it from a copy.")
    if header.crc != meta.get("crc"):
        raise ChecksumError(f"The payload's header has checksum {header.crc:#010x}, the pickle expects {meta.get('crc')!r}: it "
                            "is another tensor's. The file is damaged; restore it from a copy.")


def storage_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a storage of `dtype` elements in torch's format: bytes for those that came after typed storages, such as fp8."""
    return dtype if dtype in torch.storage._dtype_to_storage_type_map() else torch.uint8


def unpack(payload: torch.storage.TypedStorage, meta: dict) -> torch.storage.TypedStorage:
    """Decode `payload` (uint8) to a storage of `meta["bytes"]` bytes of `meta["dtype"]` on the payload's device.

    Raises a `FormatError` for damaged or hostile bytes, `CodecUnavailableError` where the codec cannot run, `NotEnoughMemoryError`
    where there is no room for what the payload announces.
    """
    return _unpack(payload, meta, trusted=True)


def unpack_untrusted(payload: torch.storage.TypedStorage, meta: dict) -> torch.storage.TypedStorage:
    """What weights_only=True finds under the name of `unpack`: the same for bytes from a stranger, by decoders that are safe on them.

    Raises `UntrustedCodecError` besides, for codecs of which there is none.
    """
    return _unpack(payload, meta, trusted=False)


# The name in the files, whatever becomes of this module. torch knows allowed functions by their names.
unpack.__module__ = unpack_untrusted.__module__ = "ds_nvcomp.archive"
unpack_untrusted.__name__ = unpack_untrusted.__qualname__ = "unpack"


_local = threading.local()  # .bound while `leaving` is in use: {payload storage's identity: device}


@contextlib.contextmanager
def leaving(bound: dict[int, torch.device]):
    """While inside, payloads in `bound` (by the identity of their storages), which are still where the file is, decode to that device."""
    _local.bound = bound
    try:
        yield
    finally:
        _local.bound = {}


def bound_for(storage) -> torch.device:
    """The device on which what `storage` decodes to shall be."""
    return getattr(_local, "bound", {}).pop(storage._cdata, storage.device)


def _unpack(payload, meta, trusted):
    name = meta.get("name") if isinstance(meta, dict) else None
    try:
        dtype, nbytes = _validate(meta)
        if not isinstance(payload, torch.storage.TypedStorage):
            raise HeaderError(f"A compressed storage comes with its payload, found {type(payload).__name__}. The file is damaged.")
        stored = payload._untyped_storage
        if stored.device.type == "meta":  # torch.load(map_location="meta"): shapes only
            decoded = torch.UntypedStorage(nbytes, device="meta")
        else:
            data = torch.empty(0, dtype=torch.uint8, device=stored.device).set_(stored, 0, (stored.nbytes(),), (1,))
            parsed = parse_payload(data)
            check_header(parsed[0], meta)
            linked = parse(meta["link"], nbytes // 4) if "link" in meta else None
            decoded = decode_payload(data, parsed, device=bound_for(stored), trusted=trusted)
            if linked is not None:
                from .link import follow  # not before: it reads files by what is built on this module
                follow(linked, decoded, seal.opened_path(), trusted=trusted)
            decoded = decoded.untyped_storage()
        return torch.storage.TypedStorage(wrap_storage=decoded, dtype=storage_dtype(dtype), _internal=True)
    except DsNvcompError as err:
        raise err.at(tensor=name)


def check_version(meta: dict) -> None:
    """Raise `UnsupportedVersionError` for a description of an unknown version, `HeaderError` for one that is not what its version says."""
    if meta["version"] not in (META_VERSION, LINKED_VERSION):
        raise UnsupportedVersionError(f"The storage is described in version {meta['version']}; this ds_nvcomp reads versions up to "
                                      f"{LINKED_VERSION}. Install a ds_nvcomp that is at least as new as the one that wrote it.")
    if (meta["version"] == LINKED_VERSION) != ("link" in meta) or "link" in meta and \
            (type(meta["link"]) is not str or meta.get("dtype") != "float32"):
        raise HeaderError("A storage that is linked to another file is of float32, and described in version 2 with a link; this is not. "
                          "The file is damaged; restore it from a copy.")


def _validate(meta) -> tuple[torch.dtype, int]:
    if not isinstance(meta, dict) or not isinstance(meta.get("version"), int):
        raise HeaderError(f"A compressed storage comes with a description, found {meta!r}. The file is damaged.")
    check_version(meta)
    dtype, nbytes = getattr(torch, str(meta.get("dtype")), None), meta.get("bytes")
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedVersionError(f"The storage is of dtype {meta.get('dtype')!r}, which torch {torch.__version__} does not "
                                      "have. Install a newer torch.")
    if not isinstance(nbytes, int) or nbytes <= 0 or nbytes % dtype.itemsize:
        raise HeaderError(f"The storage is described as {nbytes!r} bytes of {meta['dtype']}. The file is damaged.")
    return dtype, nbytes
