"""Encode and decode on the GPU, tile by tile on two streams of our own.

A tile is as many chunks as the work memory allows, of any number of storages with the same transform. While the coder works on
tile i, the sizes of tile i - 1 are read, its pieces packed and copied to the host, and tile i - 2 is collected: the host never waits
for what it just launched. Per tile there is a fixed number of Python calls, whatever the number of chunks.
"""
from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..encoding import codecs, format, kernels
from ..encoding.codecs import nvcomp
from ..encoding.format import ALIGN, CODED, RAW, UNSIGNED, ZERO, aligned
from ..encoding.transforms import SPLIT8, WHOLE
from ..errors import ChecksumError, DecodeError, EncodeError
from ..log import logger
from . import cpu
from .payload import Payload, Source, chunk_elements

SLOTS = 2
LEAST_MEMORY = 32 << 20
MAX_TILE = 256 << 20   # raw bytes; larger ones gain nothing (measured), and the last one leaves the coder idle for longer
MAX_CHUNKS = 65535     # of a tile: CUDA's limit for the second grid dimension


@dataclass
class _Chunks:
    """The chunks of all sources with one transform on one device, one after the other: source number, first byte, elements."""
    source: np.ndarray
    start: np.ndarray
    elements: np.ndarray

    def __getitem__(self, part: slice) -> "_Chunks":
        return _Chunks(self.source[part], self.start[part], self.elements[part])


def encode(sources: list[Source], config, progress=lambda raw_bytes: None) -> list[Payload]:
    """Encode sources on their GPU (host sources on the current one); payloads come back in order, in host memory."""
    groups = defaultdict(list)
    for i, source in enumerate(sources):
        device = source.data.device if source.data.is_cuda else torch.device("cuda", torch.cuda.current_device())
        groups[device, source.transform, source.data.is_cuda].append(i)
    payloads: dict[int, Payload] = {}
    for (device, transform, _), members in groups.items():
        payloads.update(zip(members, _encode_within_memory(device, transform, config, [sources[i] for i in members], progress)))
    return [payloads[i] for i in range(len(sources))]


def _encode_within_memory(device, transform, config, sources, progress):
    """Encode, with smaller tiles while the GPU has no room for larger ones, and at last on the CPU."""
    codec = codecs.BY_NAME[config.codec]
    while True:
        try:
            return _Encoder(device, transform, codec, config, sources).run(progress)
        except torch.OutOfMemoryError as err:
            # The failed attempt's work memory is gone with its frame; cached blocks of other sizes may be in the way.
            torch.cuda.empty_cache()
            smaller = config.gpu_memory // 4
            if smaller >= LEAST_MEMORY:
                logger.warning(f"no {config.gpu_memory >> 20} MiB of GPU memory for the encoder; trying with {smaller >> 20} MiB.")
                config = replace(config, gpu_memory=smaller)
            elif codec.cpu is not None or codec is codecs.NONE:
                logger.warning("no GPU memory for the encoder; encoding on the CPU.")
                return cpu.encode([replace(source, data=source.data.cpu()) for source in sources], config, progress)
            else:
                raise EncodeError(f"The GPU has no {config.gpu_memory >> 20} MiB left for the encoder, and {codec.name} has no CPU "
                                  "implementation. Leave the encoder more memory, or use codec deflate.", tensor=sources[0].name) from err


_local = threading.local()


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """This thread's streams: made once, since codecs and the allocator's blocks are bound to them."""
    cache = _local.__dict__.setdefault("streams", {})
    if device not in cache:
        cache[device] = [torch.cuda.Stream(device) for _ in range(SLOTS)]
    return cache[device]


def _upload(device: torch.device, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Copies of small arrays on the device, in one transfer."""
    places, end = [], 0
    for array in arrays:
        places.append(slice(end, end + array.nbytes))
        end = int(aligned(end + array.nbytes))
    together = np.empty(max(end, ALIGN), np.uint8)  # views of an empty tensor have no stride to speak of
    for array, place in zip(arrays, places):
        together[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.from_numpy(together).to(device, non_blocking=True)
    return [there[place].view(_TORCH[array.dtype.name]).view(array.shape) for array, place in zip(arrays, places)]


_TORCH = {"uint8": torch.uint8, "int32": torch.int32, "uint32": torch.int32, "int64": torch.int64}


class _Slot:
    """Work memory of one tile in flight."""

    def __init__(self, stream, coder, chunks, plane_stride, coded_stride, out_bytes, staging_bytes):
        self.stream, self.coder = stream, coder
        self.plane_stride, self.coded_stride = plane_stride, coded_stride
        with torch.cuda.stream(stream):
            new = lambda n: torch.empty(n, dtype=torch.uint8, device=stream.device)  # noqa: E731
            self.planes, self.coded = new(chunks * plane_stride), new(chunks * coded_stride)
            self.out, self.staging = new(out_bytes), new(staging_bytes)
        self.host_flags = torch.empty(3 * chunks, dtype=torch.int32, device="cpu", pin_memory=True)
        self.host_crc, self.host_decoded = (torch.empty(chunks, dtype=torch.int32, device="cpu", pin_memory=True) for _ in range(2))


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start the copy of a device tensor to pinned memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


class _Encoder:
    """`deliver` takes a tile's packed chunks away from the device; benchmarks pass one that leaves them there."""

    def __init__(self, device, transform, codec, config, sources, deliver=_to_host):
        self.device, self.transform, self.codec, self.config, self.sources = device, transform, codec, config, sources
        self.deliver = deliver
        self.per_chunk = chunk_elements(transform, codec, config.chunk_bytes)
        self.chunk_bytes = codec.chunk_bytes if not config.chunk_bytes else config.chunk_bytes
        self.chunks = self._cut()

    def _cut(self) -> _Chunks:
        columns = []
        for i, source in enumerate(self.sources):
            firsts = np.arange(0, source.elements, self.per_chunk, dtype=np.int64)
            columns.append((np.full(len(firsts), i), firsts * self.transform.width,
                            np.minimum(source.elements - firsts, self.per_chunk)))
        return _Chunks(*(np.concatenate(column) for column in zip(*columns)))

    def run(self, progress) -> list[Payload]:
        """Payloads of the sources, in order."""
        for stream in _streams(self.device):
            stream.wait_stream(torch.cuda.current_stream(self.device))
        count = len(self.chunks.source)
        tile_chunks, slots = self._slots(count)
        tiles = [self.chunks[at:at + tile_chunks] for at in range(0, count, tile_chunks)]
        tables, buffers, in_flight = [], [], {}
        try:
            for i in range(len(tiles) + SLOTS):
                if i >= SLOTS:
                    table, buffer = self._collect(in_flight.pop(i - SLOTS))
                    tables.append(table)
                    buffers.append(buffer)
                    progress(int(tiles[i - SLOTS].elements.sum()) * self.transform.width)
                if i < len(tiles):
                    in_flight[i] = self._launch(slots[i % SLOTS], tiles[i])
                if 1 <= i <= len(tiles):
                    self._pack(in_flight[i - 1])
        finally:  # also after a failure: the caller may change the sources, and the work memory must be free for another attempt
            for stream, slot in zip(_streams(self.device), slots):
                torch.cuda.current_stream(self.device).wait_stream(stream)
                if slot.coder:
                    slot.coder.release()
        return self._assemble(tables, buffers, tile_chunks)

    def _slots(self, count):
        """Chunks per tile and the work memory for it, within the budget."""
        coder = [None if self.codec is codecs.NONE else
                 nvcomp.codec_for(self.codec, self.chunk_bytes, stream, exponents=self.transform is not WHOLE)
                 for stream in _streams(self.device)]
        plane_stride = int(aligned(self.transform.planes[0].raw_bytes(self.per_chunk)))
        coded_stride = 0
        if coder[0]:
            coded_stride = coder[0].slot_bytes(torch.empty(plane_stride, dtype=torch.uint8, device=self.device))
        raw = self.per_chunk * self.transform.width
        out = sum(int(aligned(plane.raw_bytes(self.per_chunk))) for plane in self.transform.planes)
        staging = 0 if self.sources[0].data.is_cuda else raw + ALIGN
        per_chunk = plane_stride * (2 if self.config.verifies else 1) + coded_stride + out + staging
        tile_chunks = max(1, min(self.config.gpu_memory // SLOTS // per_chunk, MAX_TILE // raw, MAX_CHUNKS, count))
        return tile_chunks, [_Slot(stream, c, tile_chunks, plane_stride, coded_stride, tile_chunks * out, tile_chunks * staging)
                             for stream, c in zip(_streams(self.device), coder)]

    def _launch(self, slot, tile):
        """Split a tile and start the coder on its exponents."""
        with torch.cuda.stream(slot.stream):
            src, elements = _upload(self.device, self._addresses(slot, tile), tile.elements.astype(np.int32))
            flags = torch.zeros((3, len(src)), dtype=torch.int32, device=self.device)
            kernels.split(self.transform, slot.stream, self.per_chunk, src, elements, slot.planes, slot.plane_stride, flags)
            sizes = self.transform.planes[0].raw_bytes(tile.elements)
            places, lengths = _upload(self.device, np.arange(len(sizes)) * slot.plane_stride, aligned(sizes))
            crc = torch.empty(len(sizes), dtype=torch.int32, device=self.device)
            kernels.checksum(slot.stream, slot.planes, places, lengths, crc)
            slot.host_decoded[:len(sizes)].copy_(crc, non_blocking=True)
            batch = None
            if slot.coder:
                try:
                    batch = slot.coder.encode(slot.planes, slot.plane_stride, sizes.tolist(), slot.coded, slot.coded_stride)
                except Exception as err:  # whatever nvCOMP raises: the tile is kept uncoded, never lost
                    self._complain(err)
            slot.host_flags[:flags.numel()].copy_(flags.view(-1), non_blocking=True)
            split_done = slot.stream.record_event()
        return dict(slot=slot, tile=tile, src=src, elements=elements, sizes=sizes, batch=batch, split_done=split_done)

    def _addresses(self, slot, tile):
        bases = np.array([source.data.data_ptr() for source in self.sources], np.int64)
        if self.sources[0].data.is_cuda:
            return bases[tile.source] + tile.start
        # Host sources: the tile's part of each, one copy a source, to 16-byte aligned places.
        addresses, at = np.empty(len(tile.source), np.int64), 0
        for i in np.unique(tile.source):
            mine = np.flatnonzero(tile.source == i)
            start = int(tile.start[mine[0]])
            stop = int(tile.start[mine[-1]] + tile.elements[mine[-1]] * self.transform.width)
            slot.staging[at:at + stop - start].copy_(self.sources[i].data[start:stop], non_blocking=True)
            addresses[mine] = slot.staging.data_ptr() + at + tile.start[mine] - start
            at = int(aligned(at + stop - start))
        return addresses

    def _pack(self, work):
        """Decide how each piece is stored, pack the pieces and start their copy to the host."""
        slot, tile, transform, chunks = work["slot"], work["tile"], self.transform, len(work["sizes"])
        work["split_done"].synchronize()
        flags = slot.host_flags[:3 * chunks].numpy().reshape(3, chunks)
        table = format.Table.empty(transform, chunks)
        for p, plane in enumerate(transform.planes):
            table.mode[p] = np.where(flags[p] == 0, ZERO, RAW)
            table.size[p] = np.where(flags[p] == 0, 0, plane.raw_bytes(tile.elements))
            if plane.has_sign:
                unsigned = (flags[p] != 0) & (flags[p] & (0x08 if transform is SPLIT8 else 0x80) == 0)
                table.mode[p][unsigned] = UNSIGNED
                table.size[p][unsigned] = plane.unsigned_bytes(tile.elements)[unsigned]
        if work["batch"] is not None:
            try:
                coded = np.array(work["batch"].sizes(), np.int64)
            except Exception as err:
                self._complain(err)
            else:
                better = (table.mode[0] == RAW) & (coded > 0) & (coded < work["sizes"])
                if self.config.verifies and better.any():
                    better &= self._verified(slot, work["sizes"], coded, better)
                table.mode[0][better] = CODED
                table.size[0][better] = coded[better]
                table.decoded[better] = slot.host_decoded[:chunks].numpy().view(np.uint32)[better]
        offsets = np.ascontiguousarray(table.piece_offsets)
        spans = table.chunk_bytes
        total = int(spans.sum())
        with torch.cuda.stream(slot.stream):
            modes, there, sizes, lengths = _upload(self.device, table.mode, offsets, table.size, spans)
            kernels.pack(transform, slot.stream, self.per_chunk, work["src"], work["elements"], slot.planes, slot.plane_stride,
                         slot.coded, slot.coded_stride, modes, there, sizes, slot.out)
            crc = torch.empty(chunks, dtype=torch.int32, device=self.device)
            kernels.checksum(slot.stream, slot.out, there[0], lengths, crc)
            work["host"] = self.deliver(slot.out[:total])
            slot.host_crc[:chunks].copy_(crc, non_blocking=True)
            work["done"] = slot.stream.record_event()
        work["table"] = table

    def _verified(self, slot, sizes, coded, better):
        """Which of the coded planes decode to what they were made from, bool [chunks]."""
        which = np.flatnonzero(better)
        with torch.cuda.stream(slot.stream):
            again = torch.empty_like(slot.planes)
            differ = torch.zeros(len(sizes), dtype=torch.int32, device=self.device)
            try:
                slot.coder.decode(slot.coded, (which * slot.coded_stride).tolist(), coded[which].tolist(), again,
                                  (which * slot.plane_stride).tolist(), sizes[which].tolist())
            except Exception as err:
                self._complain(err)
                return np.zeros(len(sizes), bool)
            compared, = _upload(self.device, np.where(better, sizes, 0).astype(np.int32))
            kernels.compare(slot.stream, slot.planes, slot.plane_stride, again, slot.plane_stride, compared, slot.plane_stride, differ)
            same = differ.cpu().numpy() == 0
        if not same.all():
            self._complain(f"{int((~same).sum())} chunks decode to other bytes")
        return same

    def _complain(self, reason):
        warnings.warn(f"ds_nvcomp: nvCOMP's {self.codec.name} failed on a tile ({reason}); the chunks concerned are stored uncoded.",
                      RuntimeWarning, stacklevel=2)

    @staticmethod
    def _collect(work):
        work["done"].synchronize()
        table = work["table"]
        table.crc[:] = work["slot"].host_crc[:len(table.crc)].numpy().view(np.uint32)
        return table, work["host"]

    def _assemble(self, tables, buffers, tile_chunks):
        """Cut the tiles' tables and buffers back into one payload a source."""
        tables = tables or [format.Table.empty(self.transform, 0)]
        columns = {name: np.concatenate([getattr(t, name) for t in tables], axis=-1) for name in format.COLUMNS}
        ends = np.cumsum(aligned(columns["size"].astype(np.int64)).sum(axis=0))
        starts = ends - np.diff(ends, prepend=0)
        payloads, first = [], 0
        for source in self.sources:
            last = first + -(-source.elements // self.per_chunk)
            table = format.Table(*(np.ascontiguousarray(columns[name][..., first:last]) for name in format.COLUMNS))
            parts, c = [], first
            while c < last:  # the chunks of this source in one tile are neighbours in its buffer
                tile = c // tile_chunks
                stop = min(last, (tile + 1) * tile_chunks)
                base = starts[tile * tile_chunks]
                parts.append(buffers[tile][starts[c] - base:ends[stop - 1] - base].numpy())
                c = stop
            payloads.append(Payload.assemble(source, self.codec, self.per_chunk, table, parts))
            first = last
        return payloads


DECODE_MEMORY = 512 << 20


def decode(data: torch.Tensor, header: format.Header, table: format.Table, codec) -> torch.Tensor:
    """Decode a payload (uint8 [bytes], on a GPU or on the host) to uint8 [header.raw_bytes] on the same device.

    Raises `ChecksumError`, `DecodeError`. All checksums are verified, where the bytes are, before nvCOMP sees one of them.
    """
    if not header.chunks:
        return torch.empty(0, dtype=torch.uint8, device=data.device)
    device = data.device if data.is_cuda else torch.device("cuda", torch.cuda.current_device())
    if data.is_cuda and data.data_ptr() % ALIGN:
        data = data.clone()
    offsets, spans = table.piece_offsets + header.data_start, table.chunk_bytes
    if data.is_cuda:
        _check(data, table, offsets[0], spans)
    else:
        cpu.check_all(data.numpy(), table, offsets)
    transform, step = header.transform, header.chunk_elements * header.transform.width
    out = torch.empty(header.raw_bytes, dtype=torch.uint8, device=data.device)
    ends = offsets[0] + spans
    plane_stride = int(aligned(transform.planes[0].raw_bytes(header.chunk_elements)))
    per_chunk = plane_stride + (0 if data.is_cuda else 2 * step)
    tile_chunks = max(1, min(DECODE_MEMORY // SLOTS // per_chunk, MAX_CHUNKS, header.chunks))
    streams, batches = _streams(device), []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        for i, first in enumerate(range(0, header.chunks, tile_chunks)):
            part = slice(first, min(first + tile_chunks, header.chunks))
            stream = streams[i % SLOTS]
            start, stop = int(offsets[0, first]), int(ends[part.stop - 1])
            with torch.cuda.stream(stream):
                stored = data[start:stop].to(device, non_blocking=True)
                result = out[first * step:min(part.stop * step, header.raw_bytes)]
                target = result if data.is_cuda else torch.empty(result.numel(), dtype=torch.uint8, device=device)
                batches.append(_decode_tile(stream, stored, header, codec, table, offsets[:, part] - start, part, plane_stride, target))
                if target is not result:
                    result.copy_(target)
    finally:  # also after a failure: no stream may still write when the caller frees `out`
        for stream in streams:
            torch.cuda.current_stream(device).wait_stream(stream)
            if data.is_cuda:
                out.record_stream(stream)
                data.record_stream(stream)
    for chunks, crc, _ in batches:
        wrong = np.flatnonzero(crc.cpu().numpy().view(np.uint32) != table.decoded[chunks])
        if len(wrong):
            raise cpu.wrongly_coded(int(chunks[wrong[0]]))
    return out


def _check(data, table, starts, spans):
    stream = torch.cuda.current_stream(data.device)
    there, lengths = _upload(data.device, starts, spans)
    crc = torch.empty(len(spans), dtype=torch.int32, device=data.device)
    kernels.checksum(stream, data, there, lengths, crc)
    found = crc.cpu().numpy().view(np.uint32)
    wrong = np.flatnonzero(found != table.crc)
    if len(wrong):
        c = int(wrong[0])
        raise ChecksumError(f"The stored bytes of a chunk have checksum {found[c]:#010x}, expected {int(table.crc[c]):#010x} "
                            f"({len(wrong)} of {len(found)} chunks of this tensor are damaged). The file is damaged; restore it from a "
                            "copy, or resume from an earlier checkpoint.", chunk=c)


def _decode_tile(stream, stored, header, codec, table, offsets, part, plane_stride, target):
    """Launch one tile; returns its coded chunks and, on the device, the checksums of what nvCOMP made of them."""
    transform = header.transform
    elements = header.elements_of(np.arange(part.start, part.stop, dtype=np.int64))
    coded = np.flatnonzero(table.mode[0, part] == CODED)
    planes = torch.zeros(len(elements) * plane_stride if len(coded) else 0, dtype=torch.uint8, device=stream.device)
    crc, batch = torch.empty(len(coded), dtype=torch.int32, device=stream.device), None
    if len(coded):
        raw_sizes = transform.planes[0].raw_bytes(elements[coded])
        chunk_bytes = transform.planes[0].raw_bytes(header.chunk_elements)
        coder = nvcomp.codec_for(codec, chunk_bytes, stream, exponents=transform is not WHOLE)
        try:
            batch = coder.decode(stored, offsets[0, coded].tolist(), table.size[0, part][coded].tolist(), planes,
                                 (coded * plane_stride).tolist(), raw_sizes.tolist())
        except Exception as err:
            raise DecodeError(f"nvCOMP's {codec.name} refused chunks whose checksums are right: {err}. They were written wrongly, by a "
                              "faulty encoder or on purpose.", chunk=part.start + int(coded[0])) from err
        places, lengths = _upload(stream.device, coded * plane_stride, aligned(raw_sizes))
        kernels.checksum(stream, planes, places, lengths, crc)
    elements, modes, there = _upload(stream.device, elements.astype(np.int32), table.mode[:, part], offsets)
    kernels.merge(transform, stream, header.chunk_elements, stored, elements, planes, plane_stride, modes, there, target)
    return part.start + coded, crc, batch
