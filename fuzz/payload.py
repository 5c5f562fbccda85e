"""Coverage-guided fuzzing of everything that reads a stranger's bytes: payloads and whole files. See README.md.

An input that starts as a zip is scanned, verified and loaded; any other is a payload, that is parsed and decoded. What may come
out: one of our errors, or bytes. Where a payload decodes, the reference decoder of the tests, which shares no code with ours,
has to give the same bytes; and where it decodes, ours must not refuse.
"""
import io
import os
import pickle
import random
import struct
import sys
import threading
import warnings
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

try:
    import atheris
except ImportError:  # the tests feed the corpus to `one_input`, and need nothing for that
    atheris = None

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "hostile")]

with atheris.instrument_imports(include=["ds_nvcomp"]) if atheris else nullcontext():
    import ds_nvcomp
    from ds_nvcomp.archive.scan import scan
    from ds_nvcomp.config import Config
    from ds_nvcomp.checkpoint.verify import verify_file
    from ds_nvcomp.encoding import codecs
    from ds_nvcomp.errors import CodecUnavailableError, DsNvcompError
    from ds_nvcomp.pipeline import decode_payload, parse_payload

import corrupt  # noqa: E402
import reference_decoder  # noqa: E402

MOST_RAW = 4 << 20  # decoding more than this says nothing new and takes long
MOST_COMPARED = 1 << 16  # the reference decoder is slow
FILE = f"{'/dev/shm' if os.path.isdir('/dev/shm') else '/tmp'}/ds_nvcomp-fuzz-{os.getpid()}.pt"
LOAD_ERRORS = (DsNvcompError, RuntimeError, OSError, ValueError, EOFError, KeyError, IndexError, TypeError, AttributeError,
               pickle.UnpicklingError, struct.error, AssertionError, NotImplementedError, ImportError, OverflowError)


def one_input(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if data[:4] == b"PK\3\4":
            _archive(data)
        else:
            _payload(data)


def _payload(data):
    tensor = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
    try:
        header, table, codec = parsed = parse_payload(tensor)
        if header.raw_bytes > MOST_RAW:
            return
        found = decode_payload(tensor, parsed)
    except CodecUnavailableError:
        return
    except DsNvcompError as err:
        found = err
        if len(str(err)) < 40:
            raise AssertionError("an error that says too little") from err
    if isinstance(found, torch.Tensor):
        assert found.numel() == header.raw_bytes
        found = found.numpy().tobytes()
        if len(found) > MOST_COMPARED:
            return
    elif _raw_bytes(data) > MOST_COMPARED:
        return
    try:
        expected = reference_decoder.decode(data)
    except reference_decoder.NotSupportedHere:
        return
    except reference_decoder.Refused as err:
        # liblz4 reads a distance of 0, which its format forbids, as zeros; the plane has the checksum that its writer gave it.
        if isinstance(found, bytes) and "lz4: a match outside" not in str(err):
            raise AssertionError(f"decoded what the reference refuses: {err}") from err
        return
    if isinstance(found, DsNvcompError):
        raise AssertionError("refused what the reference decodes") from found
    assert found == expected, "other bytes than the reference"


def _raw_bytes(data):
    return int.from_bytes(data[24:32], "little") * 8 if len(data) >= 64 else 0


def _archive(data):
    with open(FILE, "wb") as file:
        file.write(data)
    try:
        scan(FILE)
    except DsNvcompError:
        pass
    problems = verify_file(FILE)
    try:
        most = int(max((row.storage.raw_bytes for row in scan(FILE).rows), default=0))
    except DsNvcompError:
        most = MOST_RAW + 1
    if most <= MOST_RAW:
        verify_file(FILE, decode=True)
    if b"ds_nvcomp.archive\ncheck_seal" not in data:
        return
    try:
        torch.load(FILE, weights_only=True)
    except LOAD_ERRORS:
        return
    except Exception as err:
        if type(err).__name__ not in ("UnicodeDecodeError", "BadZipFile"):
            raise AssertionError(f"torch.load, verify says {problems}") from err


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Change one part, and half of the time make all checksums right for it, or nothing behind them would ever be reached."""
    rng = random.Random(seed)
    try:
        if data[:4] == b"PK\3\4":
            return _mutate_archive(rng, data, max_size)
        if data[:8] == corrupt.MAGIC and len(data) > 64:
            return bytes(_mutate_payload(rng, data, max_size))[:max_size]
    except Exception:  # not well-formed enough to be taken to pieces
        pass
    return atheris.Mutate(data, max_size)


def _mutate_payload(rng, data, max_size):
    payload = corrupt.Payload(data)
    part = rng.randrange(6)
    if part == 0:
        payload[8:60] = atheris.Mutate(bytes(payload[8:60]), 52).ljust(52, b"\0")
    elif part == 1:
        start, stop = 64, min(payload.table_end, len(payload))
        payload[start:stop] = atheris.Mutate(bytes(payload[start:stop]), stop - start).ljust(stop - start, b"\0")
    elif part == 2:
        payload = _mutate_stream(rng, payload)
    elif part == 3:
        start = payload.data_start
        payload[start:] = atheris.Mutate(bytes(payload[start:]), max(16, len(payload) - start))
    elif part == 4:
        payload = corrupt.change_payload(rng, payload)
    else:
        payload = corrupt.Payload(atheris.Mutate(bytes(payload), max_size))
    if rng.random() < 0.6 and len(payload) >= 64:
        _repair(rng, payload)
    return payload


def _mutate_stream(rng, payload):
    """Change one coded piece, and its size in the table with it."""
    at, _, planes = payload.columns()["size"]
    n = payload.get("chunks")
    c = rng.randrange(n)
    start = payload.spans()[c][0]
    size = int.from_bytes(payload[at + 4 * c:at + 4 * c + 4], "little")
    if not size:
        return payload
    piece = bytes(payload[start:start + size])
    piece = atheris.Mutate(piece, len(piece) + 16)
    old, new = -(-size // 16) * 16, piece + bytes(-len(piece) % 16)
    payload[start:start + old] = new
    payload[at + 4 * c:at + 4 * c + 4] = len(piece).to_bytes(4, "little")
    payload.put("data_bytes", payload.get("data_bytes") + len(new) - old)
    return payload


def _repair(rng, payload):
    if payload.table_end > len(payload) + 64:
        payload.put("header_crc", zlib.crc32(payload[:60]))
        return
    if rng.random() < 0.5 and payload.data_start <= len(payload):
        payload.put("data_bytes", len(payload) - payload.data_start)
    payload.seal(chunks=True)
    if rng.random() < 0.7:
        _repair_decoded(payload)
        payload.seal()


def _repair_decoded(payload):
    """Checksums of the decoded planes, for the streams that decode."""
    try:
        codec = codecs.BY_NUMBER[payload.get("codec")]
        coder = None if codec is codecs.NONE else codecs.cpu(codec)
    except (KeyError, DsNvcompError):
        return
    columns, n, per = payload.columns(), payload.get("chunks"), payload.get("chunk_elements")
    bits = 4 if payload.get("transform") == 1 else 8
    for c, (start, _) in enumerate(payload.spans()):
        mode, at = payload[columns["mode"][0] + c], columns["decoded"][0] + 4 * c
        value = 0
        if mode == 2 and coder is not None:
            size = int.from_bytes(payload[columns["size"][0] + 4 * c:][:4], "little")
            raw = (min(per, payload.get("elements") - c * per) * bits + 7) // 8
            try:
                plane = bytes(coder.decode(bytes(payload[start:start + size]), raw))
                value = zlib.crc32(plane + bytes(-len(plane) % 16))
            except BaseException as err:  # cramjam panics are no Exception
                if isinstance(err, KeyboardInterrupt):
                    raise
                continue
        payload[at:at + 4] = value.to_bytes(4, "little")


def _mutate_archive(rng, data, max_size):
    file = corrupt.File(data)
    entries = file.entries
    kind = rng.randrange(7)
    guarded = {entry.name for entry in corrupt.payloads(entries)}
    if kind == 0:
        entry = corrupt.record(entries, b"data.pkl")
        entry.data = atheris.Mutate(entry.data, len(entry.data) + 64)
    elif kind == 1:
        entry = corrupt.record(entries, b"data.pkl")
        entry.data = corrupt.change_pickle(rng, entry.data)
    elif kind == 2:
        entry = rng.choice(entries)
        entry.data = atheris.Mutate(entry.data, len(entry.data) + 64)
    elif kind == 3 and guarded:
        entry = rng.choice(corrupt.payloads(entries))
        before = corrupt.Payload(entry.data)
        payload = _mutate_payload(rng, entry.data, max_size)
        entry.data = bytes(payload)
        if rng.random() < 0.5:
            width = {2: 2, 3: 4, 4: 8}
            corrupt.swap_numbers(entries, {before.get("header_crc"): payload.get("header_crc"), len(before): len(payload),
                                           before.get("elements") * width.get(before.get("transform"), 1):
                                           payload.get("elements") * width.get(payload.get("transform"), 1)})
    elif kind == 4:
        made = corrupt.zip_attack(rng, file, [file])
        return bytes(made or data)[:max_size]
    elif kind == 5:
        made = rng.choice([corrupt.splice, corrupt.bytes_moved, corrupt.truncation, corrupt.extension])(rng, file, [file])
        return bytes(made[0] if isinstance(made, tuple) else made)[:max_size]
    else:
        start, stop = rng.choice(file.regions["directory"] + file.regions["end"] + file.regions["local header"])
        return (data[:start] + atheris.Mutate(data[start:stop], stop - start) + data[stop:])[:max_size]
    if rng.random() < 0.5:
        corrupt.reseal(entries, guarded)
    return corrupt.build(entries)[:max_size]


def seeds(folder: Path) -> None:
    """Write the seeds of the corpus: payloads of each codec and transform, the golden ones, and small whole files."""
    from conformance import CPU_CODECS, joined, make
    from ds_nvcomp.encoding import transforms
    from ds_nvcomp.pipeline import Source, cpu
    for codec in CPU_CODECS:
        for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8", "float64"):
            transform = transforms.for_dtype(dtype)
            raw = np.concatenate([make(dtype, content, 48 * transform.width, "fuzz")
                                  for content in ("normal", "squared", "zero", "constant")])
            config = Config(codec=codec)
            object.__setattr__(config, "chunk_bytes", 32)  # below what the configuration allows, not below what the format does
            [payload] = cpu.encode([Source(torch.from_numpy(raw), transform)], config)
            (folder / f"seed-{codec}-{dtype}").write_bytes(joined(payload).tobytes())
        file = io.BytesIO()
        ds_nvcomp.save({"w": torch.arange(600.0), "s": torch.arange(5), "n": [1, None, "x"]}, file,
                       {"codec": codec, "min_bytes": 512, "fsync": False})
        (folder / f"seed-{codec}-file").write_bytes(file.getvalue())


def keep(found: Path, folder: Path) -> None:
    """Copy to the corpus those of `found`, small ones first, that take a step from line to line which no kept one takes."""
    taken, steps = set(), set()

    def trace(frame, event, argument):
        name, last = frame.f_code.co_filename, 0
        if "/ds_nvcomp/" not in name:
            return None

        def local(frame, event, argument):
            nonlocal last
            steps.add((name, last, frame.f_lineno))
            last = frame.f_lineno
            return local
        return local

    threading.settrace(trace)
    for path in sorted(folder.iterdir()) + sorted(found.iterdir(), key=lambda path: path.stat().st_size):
        steps.clear()
        sys.settrace(trace)
        try:
            one_input(path.read_bytes())
        finally:
            sys.settrace(None)
        if steps - taken and path.parent != folder:
            (folder / path.name[:12]).write_bytes(path.read_bytes())
        taken |= steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--seeds"]:
        seeds(Path(__file__).resolve().parent / "corpus")
        sys.exit()
    if sys.argv[1:2] == ["--keep"]:
        keep(Path(sys.argv[2]), Path(__file__).resolve().parent / "corpus")
        sys.exit()
    atheris.Setup(sys.argv, one_input, custom_mutator=mutate)
    try:
        atheris.Fuzz()
    finally:
        Path(FILE).unlink(missing_ok=True)
