"""Corrupted payloads through the GPU decoder, in a process of their own: a fault on the device spoils all that follows in it.

    python gpu_corruptions.py FIRST STOP RESULTS

`decode` is the GPU decoder itself, as trusted files reach it. What it is given has checksums of stored bytes that contradict the
damage; for ans, whose streams are checked, also ones made right for a damaged stream, so that only the checksum of the decoded plane
contradicts it: nvCOMP sees such streams. `unpack` is what weights_only=True reaches, and gets every kind of change, under the `meta`
of the payload that was there before; the decoders that are not safe are not to be reached by it.
"""
from __future__ import annotations

import faulthandler
import json
import random
import sys
import zlib

import numpy as np
import torch

from conformance import in_order, joined, make
from corrupt import Payload, change_payload, damage
from ds_nvcomp.archive.storage import describe, unpack_untrusted
from ds_nvcomp.config import Config
from ds_nvcomp.encoding import codecs, transforms
from ds_nvcomp.errors import DsNvcompError
from ds_nvcomp.pipeline import Source, cpu, gpu, parse_payload

CODECS = ("ans", "deflate", "zstd", "lz4", "snappy", "gdeflate", "bitcomp", "cascaded")
DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "int8")
SECONDS = 10


def sources() -> list[tuple[str, str, Payload, dict, bytes]]:
    """(codec, dtype, payload, its meta, what it decodes to), with every mode in each."""
    made = []
    for codec in CODECS:
        for dtype in DTYPES:
            transform = transforms.for_dtype(dtype)
            raw = np.concatenate([make(dtype, content, n * transform.width, "hostile")
                                  for content, n in (("normal", 16384), ("squared", 16384), ("zero", 16384), ("normal", 5000))])
            source = Source(torch.from_numpy(raw), transform, "w")
            pipeline = cpu if codecs.BY_NAME[codec].cpu else gpu
            [payload] = in_order(pipeline.encode([source], Config(codec=codec, chunk_bytes=4096)))
            meta = describe(getattr(torch, dtype), payload, "w")
            made.append((codec, dtype, Payload(joined(payload).tobytes()), meta, raw.tobytes()))
    return made


def damage_streams(rng: random.Random, payload: Payload) -> Payload:
    """Damage in coded pieces or in their sizes, with all checksums of stored bytes right: only that of the decoded plane is
    not.
    """
    columns, n, spans = payload.columns(), payload.get("chunks"), payload.spans()
    coded = [c for c in range(n) if payload[columns["mode"][0] + c] == 2]
    for c in rng.sample(coded, rng.choice([1, 1, 2, len(coded)])):
        at = columns["size"][0] + 4 * c
        size = int.from_bytes(payload[at:at + 4], "little")
        start = spans[c][0]
        if rng.random() < 0.2:  # a shorter stream on as many bytes with padding; longer ones have no room
            least = size - (size - 1) % 16
            payload[at:at + 4] = rng.randrange(least, size + 1).to_bytes(4, "little")
        kind = rng.randrange(4)
        if kind == 0:
            payload[start:start + size] = rng.randbytes(size)
        elif kind == 1:  # the stream's own header: sizes and counts that it announces
            damage(rng, payload, start, start + min(size, 32))
        elif kind == 2:
            other, length = rng.choice(coded), 0
            length = min(size, spans[other][1] - spans[other][0])
            payload[start:start + length] = payload[spans[other][0]:spans[other][0] + length]
        else:
            damage(rng, payload, start, start + size)
    return payload.seal(chunks=True)


def corrupt(seed: int, made):
    """(codec, dtype, meta, raw bytes, corrupted payload, by which way it is read, kind)"""
    rng = random.Random(seed)
    wanted = "ans" if rng.random() < 0.4 else CODECS[seed % len(CODECS)]
    codec, dtype, payload, meta, raw = rng.choice([one for one in made if one[0] == wanted])
    while True:
        way = rng.choice(["decode", "decode", "unpack"])
        kind = rng.choice(["stream", "unsealed", "sealed"] if way == "unpack" else
                          ["stream", "stream", "unsealed"] if codec == "ans" else ["unsealed"])
        changed = Payload(payload)
        if kind == "stream":
            damage_streams(rng, changed)
        else:
            changed = change_payload(rng, changed)
            if kind == "sealed" and len(changed) > 64:
                try:
                    changed.seal(chunks=rng.random() < 0.8)
                except Exception:  # counts beyond what is there
                    changed.put("header_crc", zlib.crc32(changed[:60]))
        if changed != payload:
            return codec, dtype, meta, raw, changed, way, kind


def read(way: str, payload: Payload, meta: dict, aligned: bool) -> bytes:
    device = torch.device("cuda", torch.cuda.current_device())
    data = torch.frombuffer(bytearray(payload) or bytearray(1), dtype=torch.uint8)[:len(payload)].to(device)
    if way == "unpack":
        stored = torch.storage.TypedStorage(wrap_storage=data.clone().untyped_storage(), dtype=torch.uint8, _internal=True)
        storage = unpack_untrusted(stored, meta)._untyped_storage
        found = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (storage.nbytes(),), (1,))
    else:
        if not aligned:
            data = torch.cat([torch.zeros(4, dtype=torch.uint8, device=device), data])[4:]
        found = gpu.decode(data, *parse_payload(data))
    found = found.cpu().numpy().tobytes()
    torch.cuda.synchronize()
    return found


def main(first: int, stop: int, results) -> None:
    made = sources()
    for codec, dtype, payload, meta, raw in made:
        for way, aligned in (("decode", True), ("decode", False), ("unpack", True)):
            if way == "decode" or codecs.BY_NAME[codec].safe:
                assert read(way, payload, meta, aligned) == raw, (codec, dtype, way)
    torch.cuda.reset_peak_memory_stats()
    free, _ = torch.cuda.mem_get_info()
    for seed in range(first, stop):
        codec, dtype, meta, raw, payload, way, kind = corrupt(seed, made)
        print(json.dumps({"began": seed, "codec": codec, "kind": f"{way}, {kind}"}), file=results, flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        fault = False
        try:
            outcome = "identical" if read(way, payload, meta, seed % 5 > 0) == raw else "SILENT"
        except DsNvcompError as err:
            outcome = f"refused: {type(err).__name__}"
            torch.cuda.synchronize()  # a fault of the device shows here at the latest
        except Exception as err:
            outcome, fault = f"UNEXPECTED {type(err).__name__}: {str(err)[:300]}", True
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps({"seed": seed, "codec": codec, "dtype": dtype, "kind": f"{way}, {kind}", "outcome": outcome}),
              file=results,
              flush=True)
        if fault:
            sys.exit(3)  # the next ones get a process that is sound
    print(json.dumps({"peak": torch.cuda.max_memory_allocated(), "taken": free - torch.cuda.mem_get_info()[0]}), file=results,
          flush=True)


if __name__ == "__main__":
    with open(sys.argv[3], "w") as out:
        main(int(sys.argv[1]), int(sys.argv[2]), out)
