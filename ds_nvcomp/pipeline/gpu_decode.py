"""Decode on the GPU, tile by tile, from host or device memory to host or device memory.

The way of a tile, of which each step works on another tile while the others go on:

    gather in pinned memory (host threads) -> to the device -> checksums -> decode and merge -> to pinned memory -> scatter (host threads)

What is on the device already skips the first two, what stays there the last two. Pageable memory is read and filled by many threads:
one alone, as in a plain copy, is slower than the bus, most of all where the pages of a mapped file or of a new tensor come to be.

A tile is as many chunks as the work memory allows, of any number of payloads that are alike: one that is alone waits for each of its steps.
"""
from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch

from ..encoding import codecs, format, kernels
from ..encoding.format import ALIGN, CODED, aligned
from ..errors import ChecksumError, DecodeError
from . import threads
from .cpu import wrongly_coded
from .device import SLOTS, coders, streams, upload

MEMORY = 512 << 20       # bytes of GPU work memory
STAGED_TILE = 256 << 20  # raw bytes of a tile that comes from or goes to the host: steps are to overlap, and a call to nvCOMP takes 6 ms
PART = 4 << 20           # bytes that a host thread copies at once


def decode(data: torch.Tensor, header: format.Header, table: format.Table, codec, device: torch.device | None = None) -> torch.Tensor:
    """Decode a payload (uint8 [bytes], on a GPU or on the host) to uint8 [header.raw_bytes] on `device`, by default that of `data`.

    Raises `ChecksumError`, `DecodeError`. The checksums of a tile are verified before nvCOMP sees a byte of it.
    """
    device = device or data.device
    if not header.chunks:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return _Decoder([(data, header, table)], codec, device).run()[0]


def decode_many(payloads: Sequence[tuple], device: torch.device) -> list[torch.Tensor]:
    """Decode payloads (data, header, table, codec), each as `decode` does, to `device`; what is on the host goes through one pipeline for
    all that have codec, transform and chunk size in common. Results may be parts of one storage, which has room for whole chunks of each.

    Raises `ChecksumError`, `DecodeError`; the chunk that they name is counted in its own payload.
    """
    found: list = [None] * len(payloads)
    alike = defaultdict(list)
    for i, (data, header, table, codec) in enumerate(payloads):
        if data.is_cuda or not header.chunks:
            found[i] = decode(data, header, table, codec, device)
        else:
            alike[codec.name, header.transform.name, header.chunk_elements].append(i)
    for members in alike.values():
        decoder = _Decoder([payloads[i][:3] for i in members], payloads[members[0]][3], device)
        for i, part in zip(members, decoder.run()):
            found[i] = part
    return found


@dataclass
class _Tile:
    part: slice
    slot: int
    start: int                # of its stored bytes
    stop: int
    stored: torch.Tensor | None = None
    target: torch.Tensor | None = None
    keep: object = None
    event: torch.cuda.Event | None = None


class _Decoder:
    """Of payloads (data, header, table) that have codec, transform and chunk size in common, and chunks. Several are all on the host.

    Chunks are numbered through, and so are the bytes of chunk data, as if those of all payloads followed one another.
    """

    def __init__(self, payloads, codec, device):
        datas, self.headers, tables = zip(*payloads)
        header, on_gpu = self.headers[0], datas[0].is_cuda
        self.gpu = next((d for d in (datas[0].device, device) if d.type == "cuda"), torch.device("cuda", torch.cuda.current_device()))
        if on_gpu and datas[0].data_ptr() % ALIGN:
            datas = [datas[0].clone()]
        self.stored = [data[h.data_start:h.data_start + h.data_bytes] for data, h in zip(datas, self.headers)]
        self.codec, self.transform = codec, header.transform
        self.from_host, self.to_host = not on_gpu, device.type == "cpu"
        ends = np.cumsum([h.data_bytes for h in self.headers]).tolist()
        self.bases = [0, *ends[:-1]]  # of each payload's chunk data
        self.firsts = [0, *np.cumsum([h.chunks for h in self.headers]).tolist()]  # chunk of each payload, and how many there are
        self.chunks = self.firsts.pop()
        self.table = format.Table(*(np.concatenate([getattr(table, name) for table in tables], axis=-1) for name in format.COLUMNS))
        self.offsets = np.concatenate([table.piece_offsets + base for table, base in zip(tables, self.bases)], axis=1)
        self.spans = self.table.chunk_bytes
        self.elements = np.concatenate([h.elements_of(np.arange(h.chunks, dtype=np.int64)) for h in self.headers])
        self.step = header.chunk_elements * self.transform.width
        self.chunk_bytes = self.transform.planes[0].raw_bytes(header.chunk_elements)
        self.plane_stride = int(aligned(self.chunk_bytes))
        self.raw_bytes = (self.chunks - 1) * self.step + int(self.elements[-1]) * self.transform.width
        self.out = torch.empty(self.raw_bytes, dtype=torch.uint8, device=device)
        self.found, self.heads, self.decoded = (torch.zeros(self.chunks, dtype=torch.int32, device="cpu", pin_memory=True)
                                                for _ in range(3))
        self.pool = threads.pool()

    def run(self) -> list[torch.Tensor]:
        self.streams = streams(self.gpu)[:SLOTS]
        coded = (self.table.mode == CODED).any()
        self.coders = coders(self.codec if coded else codecs.NONE, self.transform, self.chunk_bytes, self.streams)
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream(self.gpu))
        tiles = self._tiles()
        self._staging(tiles)
        try:
            for i in range(len(tiles) + 2):
                if i < len(tiles):
                    self._bring(tiles[i])
                if 1 <= i <= len(tiles):
                    self._decode(tiles[i - 1])
                if i >= 2:
                    self._deliver(tiles[i - 2])
        finally:  # also after a failure: no stream may still write when the caller frees the result
            for stream in self.streams:
                stream.synchronize()
            for coder in filter(None, self.coders):
                coder.release()
        coded = np.flatnonzero(self.table.mode[0] == CODED)
        wrong = coded[self.decoded.numpy().view(np.uint32)[coded] != self.table.decoded[coded]]
        if len(wrong):
            raise wrongly_coded(self._own(int(wrong[0])))
        return [self.out[first * self.step:first * self.step + header.raw_bytes] for first, header in zip(self.firsts, self.headers)]

    def _own(self, chunk: int) -> int:
        """The number of a chunk in its payload."""
        return chunk - self.firsts[bisect_right(self.firsts, chunk) - 1]

    def _tiles(self):
        staged = self.from_host or self.to_host
        per_chunk = self.plane_stride + self.step * (self.from_host + self.to_host)
        count = max(1, min(MEMORY // SLOTS // per_chunk, 65535, self.chunks, max(1, STAGED_TILE // self.step) if staged else 65535))
        ends = self.offsets[0] + self.spans
        parts = [slice(first, min(first + count, self.chunks)) for first in range(0, self.chunks, count)]
        return [_Tile(part, i % SLOTS, int(self.offsets[0, part.start]), int(ends[part.stop - 1])) for i, part in enumerate(parts)]

    def _staging(self, tiles):
        def pinned(nbytes):
            return [torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(min(SLOTS, len(tiles)))]
        self.arriving = pinned(max(tile.stop - tile.start for tile in tiles)) if self.from_host else []
        self.leaving = pinned(max(tile.part.stop - tile.part.start for tile in tiles) * self.step) if self.to_host else []

    def _bring(self, tile):
        """Stored bytes to the device, and their checksums on the way back."""
        stream, part = self.streams[tile.slot], tile.part
        if self.from_host:
            here = self.arriving[tile.slot][:tile.stop - tile.start]
            self._gather(here, tile.start, tile.stop)  # the tile before in this slot is on the device: its checksums are known
        with torch.cuda.stream(stream):
            tile.stored = here.to(self.gpu, non_blocking=True) if self.from_host else self.stored[0][tile.start:tile.stop]
            places, lengths = upload(self.gpu, self.offsets[0, part] - tile.start, self.spans[part])
            kernels.checksum(stream, tile.stored, places, lengths, self.found[part])
            if self.codec.checked:
                raw, limits = upload(self.gpu, self._plane_bytes(part).astype(np.int32),
                                     np.where(self.table.mode[0, part] == CODED, self.table.size[0, part], 0).astype(np.int32))
                kernels.ans_stream_bytes(stream, tile.stored, places, raw, limits, self.heads[part])
            tile.event = stream.record_event()

    def _plane_bytes(self, part):
        return self.transform.planes[0].raw_bytes(self.elements[part])

    def _check(self, tile, coded):
        """Raise `ChecksumError` where stored bytes are not those that were written, `DecodeError` where nvCOMP would leave its bounds."""
        part = tile.part
        tile.event.synchronize()
        found = self.found[part].numpy().view(np.uint32)
        wrong = np.flatnonzero(found != self.table.crc[part])
        if len(wrong):
            c = int(wrong[0])
            raise ChecksumError(
                f"The stored bytes of a chunk have checksum {found[c]:#010x}, expected {int(self.table.crc[part][c]):#010x} ({len(wrong)} "
                f"of {len(found)} chunks looked at are damaged). The file is damaged; restore it from a copy, or resume from an earlier "
                "checkpoint.", chunk=self._own(part.start + c))
        if self.codec.checked:
            wrong = coded[self.heads[part].numpy()[coded] != self.table.size[0, part][coded]]
            if len(wrong):
                raise DecodeError("A chunk's coded stream is not one that an encoder makes, and nvCOMP would follow it out of bounds. It "
                                  "was written wrongly, by a faulty encoder or on purpose.", chunk=self._own(part.start + int(wrong[0])))

    def _decode(self, tile):
        stream, part, coder = self.streams[tile.slot], tile.part, self.coders[tile.slot]
        coded = np.flatnonzero(self.table.mode[0, part] == CODED)
        self._check(tile, coded)
        offsets = self.offsets[:, part] - tile.start
        first, last = part.start * self.step, min(part.stop * self.step, self.raw_bytes)
        with torch.cuda.stream(stream):
            result = torch.empty(last - first, dtype=torch.uint8, device=self.gpu) if self.to_host else self.out[first:last]
            count = part.stop - part.start
            planes = torch.zeros(count * self.plane_stride if len(coded) else 0, dtype=torch.uint8, device=self.gpu)
            raw_sizes = self._plane_bytes(part)
            if len(coded):
                try:
                    tile.keep = coder.decode(tile.stored, offsets[0, coded].tolist(), self.table.size[0, part][coded].tolist(), planes,
                                             (coded * self.plane_stride).tolist(), raw_sizes[coded].tolist())
                except Exception as err:
                    raise DecodeError(f"nvCOMP's {self.codec.name} refused chunks whose checksums are right: {err}. They were written "
                                      "wrongly, by a faulty encoder or on purpose.", chunk=self._own(part.start + int(coded[0]))) from err
                places, lengths = upload(self.gpu, np.arange(count) * self.plane_stride,
                                         np.where(self.table.mode[0, part] == CODED, aligned(raw_sizes), 0))
                kernels.checksum(stream, planes, places, lengths, self.decoded[part])
            elements, modes, there = upload(self.gpu, self.elements[part].astype(np.int32), self.table.mode[:, part], offsets)
            kernels.merge(self.transform, stream, self.headers[0].chunk_elements, tile.stored, elements, planes, self.plane_stride, modes,
                          there, result)
            if self.to_host:
                self.leaving[tile.slot][:last - first].copy_(result, non_blocking=True)
            tile.event = stream.record_event()

    def _deliver(self, tile):
        tile.event.synchronize()
        tile.stored = tile.keep = None
        if self.to_host:
            first, last = tile.part.start * self.step, min(tile.part.stop * self.step, self.raw_bytes)
            self._copy([(self.out[first:last], self.leaving[tile.slot][:last - first])])

    def _gather(self, to: torch.Tensor, start: int, stop: int) -> None:
        """Bytes [`start`, `stop`) of the chunk data of all payloads, as they follow one another."""
        pieces = []
        for i in range(bisect_right(self.bases, start) - 1, bisect_right(self.bases, stop - 1)):
            first, last = max(start, self.bases[i]), min(stop, self.bases[i] + self.headers[i].data_bytes)
            pieces.append((to[first - start:last - start], self.stored[i][first - self.bases[i]:last - self.bases[i]]))
        self._copy(pieces)

    def _copy(self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Each (to, source), between buffers on the host, on all threads, without the GIL."""
        arrays = [(to.numpy(), source.numpy()) for to, source in pieces]
        parts = [(to[at:at + PART], source[at:at + PART]) for to, source in arrays for at in range(0, len(to), PART)]
        list(self.pool.map(lambda part: np.copyto(*part), parts))
