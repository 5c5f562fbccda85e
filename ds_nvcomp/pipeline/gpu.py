"""Encode on the GPU, tile by tile on streams of our own.

A tile is as many chunks as the work memory allows, of any number of storages with the same transform. Its way:

    split and code (stream of its slot) -> sizes to the host -> pack (same stream) -> copy to pinned memory (the copy stream)

Copies to the host pass one after the other, in the order in which they were asked for. nvCOMP copies the sizes, and waits; behind a
tile's copy that takes as long as the tile. Hence the order on the host, which leaves the copies hardly a gap: the sizes of tile i are
read while i - 2 is copied; the moment they are there the copy of i - 1, packed already, is started; and only then tile i is packed.
Our own kernels write their results to host memory themselves. Where tile i is verified, nvCOMP waits a second time, so the copy of
i - 1 comes in two parts. Per tile there is a fixed number of Python calls, whatever the number of chunks.

nvCOMP waits without letting other threads of Python run. During training (`overlap`) that would keep it from launching its kernels, so
there the encoder first waits for the copies by itself, and its own short kernels go before those of the training.
"""
from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterator

import numpy as np
import torch

from ..encoding import codecs, format, kernels
from ..encoding.codecs import nvcomp
from ..encoding.format import ALIGN, CODED, RAW, UNSIGNED, ZERO, aligned
from ..encoding.transforms import SPLIT8
from ..errors import EncodeError
from ..log import logger
from . import cpu
from .device import SLOTS, coders, streams as _streams, upload as _upload
from .gpu_decode import decode
from .payload import Payload, Source, chunk_elements
from .prospects import Prospects

__all__ = ["encode", "decode"]

LEAST_MEMORY = 32 << 20
LISTS = 4 << 20
MAX_TILE = 256 << 20   # raw bytes; larger ones gain nothing (measured), and the last one leaves the coder idle for longer
MAX_CHUNKS = 65535     # of a tile: CUDA's limit for the second grid dimension
FIRST_PART = 0.4       # of a copy; what is left keeps the copies busy while a tile is packed and the next one launched
SLAB = 64 << 20        # bytes of pinned memory at once: a power of two, so that torch's pool of it has one size to reuse


def encode(sources: list[Source], config, progress=lambda raw_bytes: None) -> Iterator[tuple[int, Payload]]:
    """Encode sources on their GPU (host sources on the current one) to pinned host memory: (index, payload) as they are done."""
    groups = defaultdict(list)
    for i, source in enumerate(sources):
        device = source.data.device if source.data.is_cuda else torch.device("cuda", torch.cuda.current_device())
        groups[device, source.transform, source.data.is_cuda].append(i)
    for (device, transform, _), members in groups.items():
        yield from _encode_within_memory(device, transform, config, {i: sources[i] for i in members}, progress)


def _encode_within_memory(device, transform, config, left: dict[int, Source], progress):
    """Encode, with smaller tiles while the GPU has no room for larger ones, and at last on the CPU."""
    codec = codecs.BY_NAME[config.codec]
    while left:
        members = list(left)
        try:
            for position, payload in enumerate(_Encoder(device, transform, codec, config, list(left.values())).run(progress)):
                del left[members[position]]
                yield members[position], payload
        except torch.OutOfMemoryError as err:
            # The failed attempt's work memory is gone with its frame; cached blocks of other sizes may be in the way.
            torch.cuda.empty_cache()
            smaller = config.gpu_memory // 4
            if smaller >= LEAST_MEMORY:
                logger.warning(f"no {config.gpu_memory >> 20} MiB of GPU memory for the encoder; trying with {smaller >> 20} MiB.")
                config = replace(config, gpu_memory=smaller)
            elif codec.cpu is not None or codec is codecs.NONE:
                logger.warning("no GPU memory for the encoder; encoding on the CPU.")
                rest = [source.on_host() for source in left.values()]
                for position, payload in cpu.encode(rest, config, progress):
                    yield members[position], payload
                return
            else:
                raise EncodeError(f"The GPU has no {config.gpu_memory >> 20} MiB left for the encoder, and {codec.name} has no CPU "
                                  "implementation. Leave the encoder more memory, or use codec deflate.",
                                  tensor=next(iter(left.values())).name) from err


class HostStream:
    """Pinned memory that packed tiles are appended to, in slabs. Bytes live as long as views of them do."""

    def __init__(self, nbytes: int):
        """For at most `nbytes` bytes."""
        self._slab = min(SLAB, 1 << max(20, (max(1, nbytes) - 1).bit_length()))
        self._slabs: dict[int, torch.Tensor] = {}
        self._end = 0

    def append(self, tile: torch.Tensor) -> None:
        """Start copying a uint8 device tensor, on the current stream."""
        at = 0
        while at < tile.numel():
            number, inside = divmod(self._end, self._slab)
            if inside == 0:
                self._slabs[number] = torch.empty(self._slab, dtype=torch.uint8, device="cpu", pin_memory=True)
            count = min(tile.numel() - at, self._slab - inside)
            self._slabs[number][inside:inside + count].copy_(tile[at:at + count], non_blocking=True)
            at, self._end = at + count, self._end + count

    def take(self, start: int, stop: int) -> list[np.ndarray]:
        """Views of the bytes [`start`, `stop`), of which nothing before `stop` is asked for again."""
        parts = []
        while start < stop:
            number, inside = divmod(start, self._slab)
            count = min(stop - start, self._slab - inside)
            parts.append(self._slabs[number][inside:inside + count].numpy())
            start += count
            if inside + count == self._slab:
                del self._slabs[number]
        return parts


class _Slot:
    """Work memory of one tile in flight."""

    def __init__(self, stream, coder, plane_bytes, coded_bytes, out_bytes, staging_bytes):
        self.stream, self.coder = stream, coder
        self.copied = None  # the event after which `out` may be written again
        with torch.cuda.stream(stream):
            new = lambda n: torch.empty(n, dtype=torch.uint8, device=stream.device)  # noqa: E731
            self.planes, self.coded = new(plane_bytes), new(coded_bytes)
            self.out, self.staging = new(out_bytes), new(staging_bytes)  # `out` also takes what verification decodes: it is larger


@dataclass
class _Tile:
    """Chunks `part` of the encoder's list, on their way."""
    part: slice
    slot: _Slot
    batch: nvcomp.Batch | None = None
    coded_event: torch.cuda.Event | None = None
    packed_event: torch.cuda.Event | None = None
    packed_bytes: int = 0
    copied_bytes: int = 0
    copied_event: torch.cuda.Event | None = None
    sizes: list[int] | None = None


class _Encoder:
    """Encodes the sources with one transform on one device. `into` makes what takes the packed tiles away; benchmarks pass one
    that leaves them on the device."""

    def __init__(self, device, transform, codec, config, sources, into=HostStream):
        self.device, self.transform, self.codec, self.config, self.sources = device, transform, codec, config, sources
        self.per_chunk = chunk_elements(transform, codec, config.chunk_bytes)
        self.chunk_bytes = transform.planes[0].raw_bytes(self.per_chunk)
        self._cut()
        self.beside_training = config.overlap
        self.prospects = Prospects()
        self._taken = 0  # bytes of `host` that payloads have
        self.host = into(int(self.elements.sum()) * transform.width + len(self.elements) * ALIGN * len(transform.planes))

    def _cut(self):
        """The chunks of all sources, one after the other: source number, first byte and elements of each, int64 [chunks]."""
        counts = np.array([-(-source.elements // self.per_chunk) for source in self.sources], np.int64)
        self.firsts = np.concatenate([[0], np.cumsum(counts)])  # chunk number at which each source begins
        self.source = np.repeat(np.arange(len(counts)), counts)
        inside = (np.arange(self.firsts[-1]) - self.firsts[self.source]) * self.per_chunk
        self.start = inside * self.transform.width
        totals = np.array([source.elements for source in self.sources], np.int64)
        self.elements = np.minimum(totals[self.source] - inside, self.per_chunk)
        self.sizes = self.transform.planes[0].raw_bytes(self.elements)
        self.table = format.Table.empty(self.transform, len(self.elements))

    def run(self, progress) -> Iterator[Payload]:
        """Payloads of the sources, in order, as they are done."""
        *slot_streams, self.copies = streams = _streams(self.device, priority=-1 if self.beside_training else 0)
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        slots = self._slots(slot_streams)
        emitted = 0
        tiles = [_Tile(part, slots[i % SLOTS]) for i, part in enumerate(self._parts())]
        try:
            self._prepare(tiles)
            for i in range(len(tiles) + 3):
                if i < len(tiles):
                    self._launch(tiles[i])
                packing = tiles[i - 1] if 1 <= i <= len(tiles) else None
                copying = tiles[i - 2] if 2 <= i <= len(tiles) + 1 else None
                if packing:
                    self._await_coder(packing)
                verify = packing is not None and self.config.verifies and any(packing.sizes)
                if copying and not self.beside_training:
                    self._copy(copying, FIRST_PART if verify else 1.0)
                if packing:
                    coded = self._coded_sizes(packing)
                    decoded = self._decode_again(packing, coded) if verify and (coded < self.sizes[packing.part]).any() else None
                if copying and copying.copied_event is None:
                    self._copy(copying, 1.0)
                if packing:
                    if verify:
                        self._compare(packing, coded, decoded)
                    self._pack(packing, coded)
                if i >= 3:
                    ready = self._collect(tiles[i - 3])
                    progress(int(self.elements[tiles[i - 3].part].sum()) * self.transform.width)
                    while emitted < len(self.sources) and self.firsts[emitted + 1] <= ready:
                        yield self._payload(emitted)
                        emitted += 1
        finally:  # also after a failure: the caller may change the sources, and the work memory must be free for another attempt
            for stream in streams:
                torch.cuda.current_stream(self.device).wait_stream(stream)
            for slot in slots:
                if slot.coder:
                    slot.coder.release()
        while emitted < len(self.sources):  # empty ones at the end
            yield self._payload(emitted)
            emitted += 1

    def _slots(self, streams):
        """The work memory, within the budget; decides the chunks per tile."""
        coder = coders(self.codec, self.transform, self.chunk_bytes, streams)
        self.plane_stride = int(aligned(self.chunk_bytes))
        self.coded_stride = 0
        if coder[0]:
            self.coded_stride = coder[0].slot_bytes(torch.empty(self.plane_stride, dtype=torch.uint8, device=self.device))
        raw = self.per_chunk * self.transform.width
        out = sum(int(aligned(plane.raw_bytes(self.per_chunk))) for plane in self.transform.planes)
        self.staged = bool(self.sources) and not self.sources[0].data.is_cuda
        staging = raw + ALIGN if self.staged else 0
        work = self.plane_stride, self.coded_stride, out, staging
        lists = 92 * len(self.elements) + LISTS  # of all chunks, and what goes up for a tile
        budget = (self.config.gpu_memory - lists) // SLOTS // sum(work)
        self.tile_chunks = max(1, min(budget, MAX_TILE // raw, MAX_CHUNKS, len(self.elements)))
        return [_Slot(stream, c, *(self.tile_chunks * nbytes for nbytes in work)) for stream, c in zip(streams, coder)]

    def _parts(self) -> list[slice]:
        """The chunks of each tile: as many as there is room for. Beginning with small ones, so that the first copy starts early, cost
        more than it gained (measured: 0.072 s for 4 GB, 0.067 without)."""
        return [slice(at, min(at + self.tile_chunks, len(self.elements))) for at in range(0, len(self.elements), self.tile_chunks)]

    def _prepare(self, tiles):
        """Everything that is known of all chunks goes to the device in one transfer; room for what comes back.

        Of each tile of n chunks: 3 n flags, n checksums of planes, n lengths of coded streams, n checksums of packed chunks, n times
        whether the plane decodes to something else. Kernels collect the flags on the device, and write the rest to the host.
        """
        addresses = self._staged_addresses(tiles) if self.staged else \
            np.array([source.data.data_ptr() for source in self.sources] or [0], np.int64)[self.source] + self.start
        places = np.arange(self.tile_chunks, dtype=np.int64)
        self.src, self.lengths, self.places, self.coded_places, elements, sizes, *self.weights = _upload(
            self.device, addresses, aligned(self.sizes), places * self.plane_stride, places * self.coded_stride,
            self.elements.astype(np.int32), self.sizes.astype(np.int32), *self._weights())
        self.flags = torch.zeros(3 * len(self.elements), dtype=torch.int32, device=self.device)
        self.limits = torch.full((self.tile_chunks,), self.coded_stride, dtype=torch.int32, device=self.device)
        self.device_elements, self.device_sizes = elements, sizes
        self.results = torch.zeros(7 * len(self.elements), dtype=torch.int32, device="cpu", pin_memory=True)
        for stream in (*(tile.slot.stream for tile in tiles[:SLOTS]), self.copies):  # the uploads are on the current one
            stream.wait_stream(torch.cuda.current_stream(self.device))

    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each chunk, where the weights are that it is encoded as the difference from, int64 [n]; and how many, int32 [n]."""
        weights = [source.weights and source.weights.to(self.device) for source in self.sources]
        self._keep = weights
        if not any(weights):
            none = np.zeros(len(self.source), np.int64)
            return none, none.astype(np.int32)
        first = np.array([max(1, w.data.data_ptr()) if w else 0 for w in weights], np.int64)[self.source]
        count = np.array([w.data.numel() // 2 if w else 0 for w in weights], np.int64)[self.source]
        half = np.array([bool(w) and w.kind == "float16" for w in weights])[self.source]
        before = self.start // self.transform.width
        count = np.clip(count - before, 0, self.elements) | np.where(half, np.int64(1) << 31, 0)
        return np.where(first != 0, first + 2 * before, 0), count.astype(np.uint32).view(np.int32)

    def _staged_addresses(self, tiles):
        """Where chunks of host sources will be: each source's part of a tile in one piece, on 16 bytes. `copies` is how they get there."""
        addresses = np.empty(len(self.source), np.int64)
        self.staging_copies = {}
        for tile in tiles:
            base, at, copies = tile.slot.staging.data_ptr(), 0, []
            source, start = self.source[tile.part], self.start[tile.part]
            stops = start + self.elements[tile.part] * self.transform.width
            for i in np.unique(source):
                first, last = np.searchsorted(source, [i, i + 1])
                begin, end = int(start[first]), int(stops[last - 1])
                copies.append((at, i, begin, end))
                addresses[tile.part.start + first:tile.part.start + last] = base + at + start[first:last] - begin
                at = int(aligned(at + end - begin))
            self.staging_copies[tile.part.start] = copies
        return addresses

    def _result(self, part, first, columns=1):
        """Columns [`first`, `first` + `columns`) of the seven results of a tile, int32 [columns * n] in pinned memory."""
        n = part.stop - part.start
        return self.results[7 * part.start + first * n:7 * part.start + (first + columns) * n]

    def _launch(self, tile):
        """Split a tile and start the coder on its exponents."""
        slot, part, n = tile.slot, tile.part, tile.part.stop - tile.part.start
        with torch.cuda.stream(slot.stream):
            for at, i, begin, end in self.staging_copies[part.start] if self.staged else ():
                slot.staging[at:at + end - begin].copy_(self.sources[i].data[begin:end], non_blocking=True)
            flags = self.flags[3 * part.start:3 * part.stop]
            kernels.split(self.transform, slot.stream, self.per_chunk, self.src[part], self.device_elements[part],
                          self._weights_of(part), slot.planes, self.plane_stride, flags)
            kernels.publish(slot.stream, flags, self._result(part, 0, 3))
            kernels.checksum(slot.stream, slot.planes, self.places[:n], self.lengths[part], self._result(part, 3))
            if slot.coder and self.prospects.worth(*self._sources_of(part)):
                try:
                    tile.batch = slot.coder.encode(slot.planes, self.plane_stride, self.sizes[part].tolist(), slot.coded,
                                                   self.coded_stride)
                except Exception as err:  # whatever nvCOMP raises: the tile is kept uncoded, never lost
                    self._complain(err)
                else:
                    if self.codec.checked:
                        kernels.ans_stream_bytes(slot.stream, slot.coded, self.coded_places[:n], self.device_sizes[part],
                                                 self.limits[:n], self._result(part, 4))
            tile.coded_event = slot.stream.record_event()

    def _weights_of(self, part) -> list[torch.Tensor]:
        return [column[part] for column in self.weights]

    def _sources_of(self, part) -> tuple[int, int]:
        return int(self.source[part.start]), int(self.source[part.stop - 1])

    def _await_coder(self, tile):
        """Until the coder is done and the sizes are on the host. After this, nothing that takes time before the next copy is started.

        Also where they are known otherwise: nvCOMP reads them at the next encode at the latest, which then waits for the copies.
        """
        tile.coded_event.synchronize()
        tile.sizes = []
        if self.beside_training:
            self.copies.synchronize()
        if tile.batch is not None:
            try:
                tile.sizes = tile.batch.sizes()
            except Exception as err:
                self._complain(err)

    def _coded_sizes(self, tile) -> np.ndarray:
        """Bytes of each chunk's coded plane, int64 [n]; 0 where it has none that may be used."""
        coded = np.array(tile.sizes or np.zeros(tile.part.stop - tile.part.start), np.int64)
        if self.codec.checked:
            strange = (coded > 0) & (self._result(tile.part, 4).numpy() != coded)
            if strange.any():
                self._complain(f"{int(strange.sum())} streams look otherwise than the decoder's check allows")
                coded[strange] = 0
        return coded

    def _pack(self, tile, coded):
        """Decide how each piece is stored and pack the pieces."""
        slot, part, transform = tile.slot, tile.part, self.transform
        elements, sizes = self.elements[part], self.sizes[part]
        flags = self._result(part, 0, 3).numpy().reshape(3, -1)
        mode, size = self.table.mode[:, part], self.table.size[:, part]
        for p, plane in enumerate(transform.planes):
            mode[p] = np.where(flags[p] == 0, ZERO, RAW)
            size[p] = np.where(flags[p] == 0, 0, plane.raw_bytes(elements))
            if plane.has_sign:
                unsigned = (flags[p] != 0) & (flags[p] & (0x08 if transform is SPLIT8 else 0x80) == 0)
                mode[p][unsigned] = UNSIGNED
                size[p][unsigned] = plane.unsigned_bytes(elements)[unsigned]
        better = (mode[0] == RAW) & (coded > 0) & (coded < sizes)
        if tile.batch is not None:
            lost = int(((mode[0] == RAW) & ~better).sum())
            self.prospects.learn(*self._sources_of(part), gained=int(better.sum()), lost=lost)
        mode[0][better] = CODED
        size[0][better] = coded[better]
        self.table.decoded[part][better] = self._result(part, 3).numpy().view(np.uint32)[better]
        pieces = aligned(size.astype(np.int64))
        spans = pieces.sum(axis=0)
        starts = np.cumsum(spans) - spans
        offsets = starts + np.cumsum(pieces, axis=0) - pieces
        tile.packed_bytes = int(spans.sum())
        with torch.cuda.stream(slot.stream):
            if slot.copied is not None:
                slot.stream.wait_event(slot.copied)
            there, lengths, piece_sizes, modes = _upload(self.device, offsets, spans, size, mode)
            kernels.pack(transform, slot.stream, self.per_chunk, self.src[part], self.device_elements[part], self._weights_of(part),
                         slot.planes, self.plane_stride, slot.coded, self.coded_stride, modes, there, piece_sizes, slot.out)
            kernels.checksum(slot.stream, slot.out, there[0], lengths, self._result(part, 5))
            tile.packed_event = slot.stream.record_event()

    def _copy(self, tile, until: float):
        """Start the copy of a packed tile to the host, up to a fraction of it."""
        with torch.cuda.stream(self.copies):
            if not tile.copied_bytes:
                self.copies.wait_event(tile.packed_event)
            stop = tile.packed_bytes if until == 1.0 else int(until * tile.packed_bytes)
            self.host.append(tile.slot.out[tile.copied_bytes:stop])
            tile.copied_bytes = stop
            if until == 1.0:
                tile.slot.copied = tile.copied_event = self.copies.record_event()

    def _collect(self, tile) -> int:
        """Wait until a tile is on the host; how many chunks are there now."""
        tile.copied_event.synchronize()
        self.table.crc[tile.part] = self._result(tile.part, 5).numpy().view(np.uint32)
        return tile.part.stop

    def _decode_again(self, tile, coded):
        """Decode the coded planes to `out`. Returns what must be kept until that is done, None where nvCOMP refuses."""
        slot, which = tile.slot, np.flatnonzero(coded > 0)
        with torch.cuda.stream(slot.stream):
            if slot.copied is not None:
                slot.stream.wait_event(slot.copied)
            try:
                return slot.coder.decode(slot.coded, (which * self.coded_stride).tolist(), coded[which].tolist(), slot.out,
                                         (which * self.plane_stride).tolist(), self.sizes[tile.part][which].tolist())
            except Exception as err:
                self._complain(err)
                return None

    def _compare(self, tile, coded, decoded):
        """Set to 0 in `coded` what does not decode to what it was made from."""
        slot = tile.slot
        if decoded is None:
            coded[:] = 0
            return
        with torch.cuda.stream(slot.stream):
            kernels.compare(slot.stream, slot.planes, self.plane_stride, slot.out, self.plane_stride, self.device_sizes[tile.part],
                            self.plane_stride, self._result(tile.part, 6))
            slot.stream.record_event().synchronize()
        other = (self._result(tile.part, 6).numpy() != 0) & (coded > 0)
        if other.any():
            self._complain(f"{int(other.sum())} chunks decode to other bytes")
            coded[other] = 0

    def _complain(self, reason):
        warnings.warn(f"ds_nvcomp: nvCOMP's {self.codec.name} failed on a tile ({reason}); the chunks concerned are stored uncoded.",
                      RuntimeWarning, stacklevel=2)

    def _payload(self, i) -> Payload:
        part = slice(self.firsts[i], self.firsts[i + 1])
        table = format.Table(*(np.ascontiguousarray(getattr(self.table, name)[..., part]) for name in format.COLUMNS))
        start = self._taken
        self._taken += int(table.chunk_bytes.sum())
        return Payload.assemble(self.sources[i], self.codec, self.per_chunk, table, self.host.take(start, self._taken))
