"""Runs batches of corruptions of a torch.distributed.checkpoint directory, as readers.py does of files.

    python dcp_readers.py FOLDER FIRST STOP

Four kinds, by seed. *item*: the bytes of one item are replaced by a corruption of corrupt.py, the items behind it and `.metadata` moved to
where they are then; every fifth of these is forged. *file*: bytes of the .distcp file are damaged, cut or moved about, whatever they
belong to. *bytes of .metadata*: damaged, cut or grown. *metadata*: unpickled, changed and pickled again, with our checksum made right
or left out: that is forged.
"""
from __future__ import annotations

import builtins
import faulthandler
import json
import logging
import pickle
import random
import resource
import shutil
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from corrupt import HUGE, File, corrupt, damage
from ds_nvcomp.checkpoint import metadata_seal
from ds_nvcomp.config import Config
from ds_nvcomp.dcp import NvcompReader, NvcompWriter
from readers import KNOWN, ROOM

SECONDS = 10
READERS = {"ours": NvcompReader, "torch's": FileSystemReader}
KINDS = ("item", "item", "file", "bytes of .metadata", "metadata")
ITEMS = "__0_0.distcp"
OBJECTS = {"step", "text"}


def content() -> dict:
    """Tensors of which two are alike in all but the numbers, and what is no tensor."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda n: torch.randn(n, generator=generator) * 0.02  # noqa: E731
    return {
        "weight": normal(1200).reshape(30, 40), "alike": normal(1200).reshape(30, 40), "transposed": normal(1200).reshape(30, 40).t(),
        "half": normal(1500).bfloat16(), "double": normal(300).double(), "fp8": normal(900).to(torch.float8_e4m3fn),
        "ids": torch.randint(1 << 40, (150,), generator=generator), "mask": normal(800) > 0, "zeros": torch.zeros(3000),
        "scalar": torch.tensor(0.5), "empty": torch.empty(0, 3), "step": 1000, "text": "a run " * 50,
    }


def blank() -> dict:
    return {name: torch.full_like(value, 1) if isinstance(value, torch.Tensor) else None for name, value in content().items()}


def write_directory(directory: Path) -> None:
    config = Config(codec="deflate", min_bytes=0, fsync=False, device="cpu")
    object.__setattr__(config, "chunk_bytes", 256)  # the format allows less than the configuration: several chunks each
    dcp.save(content(), storage_writer=NvcompWriter(directory, config), no_dist=True)


def mark(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.dtype, tuple(value.shape), value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- what is done to a directory ------------------------------------------------------------------------------------------

class Saved:
    """The bytes of a save, and where its items are."""

    def __init__(self, directory: Path):
        self.metadata, self.data = (directory / ".metadata").read_bytes(), (directory / ITEMS).read_bytes()
        places = pickle.loads(self.metadata).storage_data
        self.places = sorted((info.offset, info.length, index.fqn) for index, info in places.items())
        self.files = [(at, File(self.data[at:at + size], fqn)) for at, size, fqn in self.places if fqn not in OBJECTS]


def pickled(metadata, sealed: bool) -> bytes:
    data = pickle.dumps(metadata)
    return data + metadata_seal.trailer(data) if sealed else data


def corruption(seed: int, whole: Saved) -> tuple[str, bytes, bytes, bool, str | None]:
    """(kind, the file of items, `.metadata`, whether it is forged, an item that may come out in place of the one that was damaged)."""
    rng, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    if kind == "item":
        file, made = corrupt(seed // len(KINDS) * 2 + seed % len(KINDS), [file for _, file in whole.files])
        at = next(at for at, found in whole.files if found is file)
        metadata, grew = pickle.loads(whole.metadata), len(made.data) - len(file.data)
        for index, info in metadata.storage_data.items():
            info.offset += grew * (info.offset > at)
            info.length += grew * (index.fqn == file.name)
        data = whole.data[:at] + made.data + whole.data[at + len(file.data):]
        return f"item: {made.kind}", data, pickled(metadata, sealed=True), made.forged, made.other
    if kind == "file":
        what, data = changed_bytes(rng, whole.data)
        return f"file: {what}", data, whole.metadata, False, None
    if kind == "bytes of .metadata":
        what, data = changed_bytes(rng, whole.metadata)
        return f"bytes of .metadata: {what}", whole.data, data, False, None
    metadata = pickle.loads(whole.metadata)
    what = change_metadata(rng, metadata)
    return f"metadata: {what}", whole.data, pickled(metadata, sealed=rng.random() < 0.5), True, None


def changed_bytes(rng: random.Random, data: bytes) -> tuple[str, bytes]:
    kind = rng.choice(["damage", "damage", "damage", "cut", "swap", "lost", "grown", "page"])
    found = bytearray(data)
    while found == data:
        a, b = sorted(rng.randrange(len(data)) for _ in range(2))
        length = min(rng.choice([1, 16, 64, 512, 4096]), b - a, len(data) - b)
        if kind == "damage":
            damage(rng, found, 0, len(found))
        elif kind == "cut":
            del found[b:]
        elif kind == "swap":
            found[a:a + length], found[b:b + length] = found[b:b + length], found[a:a + length]
        elif kind == "lost":
            del found[a:a + length]
        elif kind == "grown":
            found[a:a] = rng.randbytes(rng.choice([1, 8, 64]))
        else:
            page = a // 4096 * 4096
            found[page:page + 4096] = bytes(len(found[page:page + 4096]))
    return kind, bytes(found)


def change_metadata(rng: random.Random, metadata) -> str:
    places, tensors = metadata.storage_data, metadata.state_dict_metadata
    infos = list(places.values())
    info, other = rng.sample(infos, 2)
    kind = rng.choice(["offset", "length", "both", "place of another", "exchanged places", "file", "dtype", "size", "no place",
                       "chunk", "transform"])
    if kind in ("offset", "length", "both"):
        for name in ("offset", "length") if kind == "both" else (kind,):
            value = getattr(info, name)
            setattr(info, name, rng.choice([value + rng.choice([-64, -16, -1, 1, 16, 64]), rng.choice(HUGE), -1, getattr(other, name), 0]))
    elif kind == "place of another":
        info.offset, info.length = other.offset, other.length
    elif kind == "exchanged places":
        info.offset, info.length, other.offset, other.length = other.offset, other.length, info.offset, info.length
    elif kind == "file":
        info.relative_path = rng.choice(["__1_0.distcp", "", ".", "../x", ".metadata", "/dev/null", None])
    elif kind == "transform":
        info.transform_descriptors = rng.choice([["stream.zstd"], ["x"], [""]])
    elif kind == "no place":
        places.pop(rng.choice(list(places)))
    else:
        fqn = rng.choice([name for name, tensor in tensors.items() if hasattr(tensor, "chunks")])
        tensor = tensors[fqn]
        if kind == "dtype":
            tensor.properties.dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool])
        elif kind == "size" and len(tensor.size):
            tensor.size = torch.Size(n + rng.choice([-1, 1, 5]) if n else n for n in tensor.size)
        elif len(tensor.size):
            chunk = tensor.chunks[0]
            where = rng.choice(["sizes", "offsets"])
            setattr(chunk, where, torch.Size(max(0, n + rng.choice([-1, 0, 1, 7, 1 << 40])) for n in getattr(chunk, where)))
    return kind


# --- what comes of it -------------------------------------------------------------------------------------------------------

def read(directory: Path, kind: str, expected: dict, forged: bool, other: str | None) -> dict[str, str]:
    """Reader -> "identical", "refused: ...", what a forged one gave, or SILENT.

    Torch's own reader does not look whether `.metadata` is what was written, nor whether an item is the one that it says, nor at the
    checksums of small objects, which are as torch.save wrote them: what it makes of those is "unknown to torch", with its own files, too.
    """
    outcome = {}
    for name, reader in READERS.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = blank()
                dcp.load(found, storage_reader=reader(directory), no_dist=True)
            differ = [fqn for fqn in expected if mark(found.get(fqn)) != expected[fqn]]
            if not differ:
                outcome[name] = "identical"
            elif name == "torch's" and (other or kind.startswith("bytes of .metadata") or set(differ) <= OBJECTS):
                outcome[name] = "unknown to torch"
            elif other and {mark(found[fqn]) for fqn in differ} == {expected[other]}:
                outcome[name] = "the other item"
            elif forged:
                alien = all(mark(found.get(fqn)) in expected.values() for fqn in differ)
                outcome[name] = "forged: the numbers of another item" if alien else "forged: other numbers"
            else:
                outcome[name] = f"SILENT {differ}"
        except dcp.CheckpointException as err:
            causes = {type(failure[0] if isinstance(failure, tuple) else failure).__name__ for failure in err.failures.values()}
            unknown = [failure for failure in err.failures.values()
                       if not isinstance(failure[0] if isinstance(failure, tuple) else failure, KNOWN)]
            outcome[name] = f"UNEXPECTED {unknown}" if unknown else f"refused: {', '.join(sorted(causes))}"
        except KNOWN as err:
            outcome[name] = f"refused: {type(err).__name__}"
        except Exception as err:
            outcome[name] = f"UNEXPECTED {type(err).__name__}: {err}"
        found = None
        faulthandler.cancel_dump_traceback_later()
    return outcome


def main(folder: Path, first: int, stop: int) -> None:
    logging.disable(logging.CRITICAL)  # torch logs a traceback for each .metadata that it cannot read
    saved = Saved(folder / "saved")
    expected = {name: mark(value) for name, value in content().items()}
    directory = folder / f"damaged{first}"
    shutil.copytree(folder / "saved", directory)
    assert set(read(directory, "", expected, False, None).values()) == {"identical"}
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    before = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with builtins.open(folder / f"results-{first}", "w") as results:
        print(json.dumps({"before": before}), file=results, flush=True)
        for seed in range(first, stop):
            kind, data, metadata, forged, other = corruption(seed, saved)
            print(json.dumps({"began": seed, "kind": kind}), file=results, flush=True)
            (directory / ITEMS).write_bytes(data)
            (directory / ".metadata").write_bytes(metadata)
            outcome = read(directory, kind, expected, forged, other)
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grew, peak = now - peak, max(now, peak)
            print(json.dumps({"seed": seed, "kind": kind, "forged": forged, "outcome": outcome, "grew": grew}), file=results, flush=True)
        print(json.dumps({"peak": peak}), file=results, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
