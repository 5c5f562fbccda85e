"""Encode and decode on CPU threads: a task is a tile of chunks, so that its planes stay in the cache."""
from __future__ import annotations

import warnings
from collections import deque
from concurrent.futures import Future, wait
from typing import Iterator

import numpy as np
from isal.isal_zlib import crc32

from ..encoding import codecs, format, link, transforms
from ..encoding.codecs import CodecId
from ..encoding.format import CODED, RAW, UNSIGNED, ZERO
from ..errors import ChecksumError, DecodeError, DsNvcompError, EncodeError
from .payload import Payload, Source, chunk_elements
from .threads import pool

TILE_CHUNKS = 16
_PADDING = [bytes(n) for n in range(format.ALIGN)]


def encode(sources: list[Source], config, progress=lambda raw_bytes: None) -> Iterator[tuple[int, Payload]]:
    """Encode host sources: (index, payload) in order. Raises `EncodeError`, `CodecUnavailableError`.

    `progress` is called from this thread with raw bytes done.
    """
    codec = codecs.BY_NAME[config.codec]
    coder = None if codec is codecs.NONE or not sources else codecs.cpu(codec)
    threads = pool(config.threads)
    running: deque[tuple[int, list[Future]]] = deque()
    for source in sources:
        per_chunk = chunk_elements(source.transform, codec, config.chunk_bytes)
        raw = source.data.numpy()
        tile = per_chunk * source.transform.width * TILE_CHUNKS
        running.append((per_chunk, [
            threads.submit(_encode_tile, source, at, raw[at:at + tile], per_chunk, coder, config.verifies)
            for at in range(0, len(raw), tile)]))
    try:
        for i, source in enumerate(sources):
            per_chunk, tiles = running[0]
            done = []
            for tile in tiles:
                done.append(tile.result())
                progress(done[-1][2])
            running.popleft()  # or it would keep what the caller has written already
            tiles = tile = None
            table = format.Table(*(np.concatenate([getattr(t[0], column) for t in done], axis=-1)
                                   for column in format.COLUMNS)) if done else format.Table.empty(source.transform, 0)
            yield i, Payload.assemble(source, codec, per_chunk, table, [t[1] for t in done])
    finally:  # after a failure, or where the caller gives up: nothing may still read the sources
        for _, tiles in running:
            for tile in tiles:
                tile.cancel()
        wait([tile for _, tiles in running for tile in tiles])


def _encode_tile(source, at, raw, per_chunk, coder, verify):
    """(table of the tile at byte `at`, its chunk data as one buffer, raw bytes)."""
    if source.weights is not None:
        raw = link.difference(raw, source.weights.part(at, at + len(raw)).numpy(), source.weights.kind)
    step = per_chunk * source.transform.width
    table = format.Table.empty(source.transform, -(-len(raw) // step))
    data = []
    for c in range(len(table.crc)):
        crc = 0
        planes = transforms.split(source.transform, raw[c * step:(c + 1) * step])
        for p, (mode, piece) in enumerate(_encode_chunk(source, planes, len(raw[c * step:(c + 1) * step]), coder, verify)):
            table.mode[p, c], table.size[p, c] = mode, len(piece)
            if len(piece):
                padding = _PADDING[-len(piece) % format.ALIGN]
                crc = crc32(padding, crc32(piece, crc))
                data += (piece, padding)
            if mode == CODED:
                table.decoded[c] = padded_crc(planes[p])
        table.crc[c] = crc
    return table, b"".join(data), len(raw)


def padded_crc(plane: np.ndarray) -> int:
    """CRC-32 of a raw plane, zero-padded to `format.ALIGN`."""
    return crc32(_PADDING[-len(plane) % format.ALIGN], crc32(plane))


def _encode_chunk(source, planes, nbytes, coder, verify):
    transform = source.transform
    elements = nbytes // transform.width
    pieces = []
    for plane, raw in zip(transform.planes, planes):
        if not raw.any():
            pieces.append((ZERO, b""))
        elif plane.codable and coder is not None:
            pieces.append(_code(source, transform, raw, coder, verify))
        elif plane.has_sign and not transforms.has_sign(transform, raw):
            pieces.append((UNSIGNED, transforms.drop_sign(transform, raw, elements)))
        else:
            pieces.append((RAW, raw))
    return pieces


def _code(source, transform, raw, coder, verify):
    try:
        coded = coder.encode(raw, exponents=transform is not transforms.WHOLE)
        if len(coded) >= len(raw):
            return RAW, raw
        if verify and bytes(coder.decode(coded, len(raw))) != raw.tobytes():
            raise EncodeError("decoding gave other bytes")
        return CODED, coded
    except DsNvcompError as err:
        reason = err
    except Exception as err:  # any complaint of a codec library: the bytes are kept uncoded, never lost
        reason = err
    warnings.warn(f"ds_nvcomp: {coder.__name__} failed on a chunk of {source.name or 'a tensor'} ({reason}); stored uncoded.",
                  RuntimeWarning, stacklevel=2)
    return RAW, raw


def decode(payload: np.ndarray, header: format.Header, table: format.Table, codec: CodecId, out: np.ndarray,
           threads: int = 0) -> None:
    """Decode the payload (uint8 [bytes]) into `out` (uint8 [header.raw_bytes]); header and table are validated already.

    Raises `ChecksumError`, `DecodeError`, `CodecUnavailableError`.
    """
    coder = codecs.cpu(codec) if (table.mode == CODED).any() else None
    offsets = table.piece_offsets + header.data_start
    step = header.chunk_elements * header.transform.width
    tiles = [pool(threads).submit(_decode_tile, payload, header, table, offsets, coder, out, step, at)
             for at in range(0, header.chunks, TILE_CHUNKS)]
    failure = None
    for tile in tiles:  # all of them, also after a failure: none may still write when the caller frees `out`
        try:
            tile.result()
        except DsNvcompError as err:
            failure = failure or err
    if failure:
        raise failure


def _decode_tile(payload, header, table, offsets, coder, out, step, first):
    for c in range(first, min(first + TILE_CHUNKS, header.chunks)):
        check(payload, table, offsets, c)
        chunk = out[c * step:(c + 1) * step]
        elements = len(chunk) // header.transform.width
        planes = []
        for p, plane in enumerate(header.transform.planes):
            mode, size, at = table.mode[p, c], int(table.size[p, c]), int(offsets[p, c])
            piece = payload[at:at + size]
            if mode == CODED:
                planes.append(_decode_piece(coder, piece, plane.raw_bytes(elements), int(table.decoded[c]), c))
            elif mode == UNSIGNED:
                planes.append(transforms.restore_sign(header.transform, piece, elements))
            else:
                planes.append(None if mode == ZERO else piece)
        transforms.merge(header.transform, planes, chunk)


def check(payload: np.ndarray, table: format.Table, offsets: np.ndarray, chunk: int) -> None:
    """Raise `ChecksumError` unless the stored bytes of a chunk are the ones that were written."""
    start = int(offsets[0, chunk])
    stored = payload[start:int(offsets[-1, chunk]) + int(format.aligned(int(table.size[-1, chunk])))]
    found = crc32(stored)
    if found != table.crc[chunk]:
        raise ChecksumError(f"The stored bytes of a chunk have checksum {found:#010x}, expected {int(table.crc[chunk]):#010x}. "
                            "The file is damaged; restore it from a copy, or resume from an earlier checkpoint.", chunk=chunk)


def _decode_piece(coder, piece, raw_bytes, crc, chunk):
    try:
        raw = np.frombuffer(coder.decode(piece, raw_bytes), np.uint8)
    except Exception as err:  # decoder libraries raise whatever they like; the chunk passed its checksum
        raise DecodeError(f"{coder.__name__} refused a chunk whose checksum is right: {err}. It was written wrongly, by a faulty "
                          "encoder or on purpose.", chunk=chunk) from err
    if len(raw) != raw_bytes:
        raise DecodeError(f"A chunk decodes to {len(raw)} bytes, expected {raw_bytes}. It was written wrongly, by a faulty "
                          "encoder or on purpose.", chunk=chunk)
    if padded_crc(raw) != crc:
        raise wrongly_coded(chunk)
    return raw


def wrongly_coded(chunk: int) -> DecodeError:
    return DecodeError("A chunk's stored bytes are the ones that were written, but do not decode to what they were made from. The encoder "
                       "or this decoder is at fault; resume from an earlier checkpoint, or decode on another device.", chunk=chunk)
