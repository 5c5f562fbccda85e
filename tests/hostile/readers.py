"""Runs batches of corruptions in a process of their own: what crashes or hangs it is known by its seed.

    python readers.py FOLDER FIRST STOP

reads the files that `write_files` put into FOLDER, and writes one JSON line for each seed to FOLDER/results-FIRST.
"""
from __future__ import annotations

import builtins
import faulthandler
import hashlib
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
import types
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path

import torch

import ds_nvcomp
from corrupt import File, corrupt
from ds_nvcomp.archive.link import Link
from ds_nvcomp.archive.scan import scan
from ds_nvcomp.archive.writer import write
from ds_nvcomp.checkpoint.verify import verify_file
from ds_nvcomp.config import Config
from ds_nvcomp.errors import DsNvcompError
from ds_nvcomp.pipeline import Weights

LINKED = "linked-"   # what begins the name of files that others are linked to: those are read, beside a damaged one
SECONDS = 10         # for one reader on one file
ROOM = 4 << 30       # bytes of address space beyond what the process has: what wants more gets an error instead of the machine
CODECS = ("deflate", "zstd", "lz4", "snappy", "none")
ROOT = Path(__file__).resolve().parents[2]
# What torch.load, its C++ reader, the unpicklers and the operating system raise for damaged files.
KNOWN = (DsNvcompError, pickle.UnpicklingError, zipfile.BadZipFile, OSError, EOFError, RuntimeError, ValueError, KeyError,
         IndexError,
         TypeError, AttributeError, ImportError, OverflowError, AssertionError, MemoryError, struct.error)


# --- files to corrupt -------------------------------------------------------------------------------------------------

def content(seed: int):
    """A checkpoint with everything that files have: dtypes, shared storages, plain tensors, Python values, nesting."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda n: torch.randn(n, generator=generator) * 0.02  # noqa: E731
    weight = torch.nn.Parameter(normal(1200).reshape(30, 40))
    half = normal(1500).bfloat16()
    return {
        "weight": weight, "tied": weight, "row": weight.data[3], "transposed": weight.data.T, "half": half,
        "part": half[100:200],
        "double": normal(300).double(), "float16": normal(400).half(), "square": normal(700) ** 2,
        "fp8": normal(900).to(torch.float8_e4m3fn),
        "complex": torch.complex(normal(200), normal(200)), "ids": torch.randint(1 << 40, (150,), generator=generator),
        "mask": normal(800) > 0, "untouched": torch.zeros(3000), "same": normal(700), "shape": normal(700),
        "small": [normal(5), torch.tensor(seed + 0.5), torch.arange(seed, seed + 9, dtype=torch.int32), normal(6).bfloat16(),
                  torch.empty(0)],
        "step": 1000 + seed, "lr": 0.001 * (seed + 1), "name": f"run {seed}", "nothing": None, "flag": True,
        "big": 1 << 70 + seed,
        "nested": OrderedDict(a=[{"b": (1, 2.5, "x", [seed])}, float("nan"), -0.0], c={seed: {"deep": [[["end"]]]}}),
    }


def write_files(folder: Path) -> None:
    """Two saves of each codec, of the same shapes and other values, and the golden archives."""
    for codec in CODECS:
        config = Config(codec=codec, min_bytes=512, fsync=False, device="cpu")
        object.__setattr__(config, "chunk_bytes", 256)  # the format allows less than the configuration: several chunks each
        for seed in (0, 1):
            ds_nvcomp.save(content(seed), folder / f"{codec}-{seed}.pt", config)
            if codec == "deflate":
                write_linked(folder, seed, config)
    for path in sorted((ROOT / "tests" / "golden" / "archive").glob("*.pt")):
        (folder / f"golden-{path.name}").write_bytes(path.read_bytes())


def write_linked(folder: Path, seed: int, config: Config) -> None:
    """A pair of files of which one has fp32 weights as their difference from 16-bit weights in the other."""
    master = content(seed)["weight"].detach().flatten().repeat(3) + torch.arange(3600) * 1e-6
    flat = master.bfloat16()
    ds_nvcomp.save({**content(seed), "module": {"a": flat[:2000], "b": flat[2000:]}}, folder / f"{LINKED}{seed}.pt", config)
    link = Link(Weights(flat.view(torch.uint8), "bfloat16"), f"{LINKED}{seed}.pt", [("module.a", 0, 2000), ("module.b", 0, 1600)])
    path = folder / f"linking-{seed}.pt"
    write({**content(seed), "master": master}, path, config, root=path.stem, links={master.data_ptr(): link})
    assert any(row.storage.encoding and row.storage.encoding.linked for row in scan(path).rows)


# --- what came out ----------------------------------------------------------------------------------------------------

def fingerprint(obj) -> str:
    """Of every bit that was saved: types, order, tensors with their strides and bytes, and what shares memory with what."""
    digest, storages = hashlib.sha256(), {}

    def add(*parts):
        for part in parts:
            data = part if isinstance(part, bytes) else repr(part).encode("utf-8", "backslashreplace")
            digest.update(b"%d:" % len(data) + data)

    def visit(value):
        kind = type(value)
        add(kind.__name__)
        if isinstance(value, torch.Tensor):
            whole = value.untyped_storage()
            start = value.storage_offset() * value.element_size()
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride())) if value.numel() else -1
            stop = start + (last + 1) * value.element_size()
            data = torch.empty(0, dtype=torch.uint8)
            data = data.set_(whole, start, (stop - start,), (1,)) if stop > start else data
            number = storages.setdefault(whole.data_ptr(), len(storages)) if value.numel() else None
            add(value.dtype, tuple(value.shape), value.stride(), value.storage_offset(), value.requires_grad, number,
                data.numpy().tobytes())
            visit(dict(value.__dict__))
        elif isinstance(value, dict):
            add(len(value))
            for key, item in value.items():
                visit(key)
                visit(item)
        elif kind in (list, tuple):
            add(len(value))
            for item in value:
                visit(item)
        elif kind is float:
            add(struct.pack("<d", value))
        else:
            add(value)

    visit(obj)
    return digest.hexdigest()


READERS = {
    "load": lambda path: ds_nvcomp.load(path, weights_only=True),
    "load, pickle": lambda path: ds_nvcomp.load(path, weights_only=False),
    "torch.load": lambda path: torch.load(path),
    "torch.load, mmap": lambda path: torch.load(path, mmap=True),
    "torch.load, pickle, mmap": lambda path: torch.load(path, mmap=True, weights_only=False),
}
RUNS_CODE = ("load, pickle", "torch.load, pickle, mmap")  # weights_only=False: these do what a pickle says
events: list[str] = []


def _watch(event, args):
    """Notes what no reader has any business to do."""
    if event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.remove",
                 "os.rename", "os.rmdir",
                 "os.mkdir", "shutil.rmtree", "socket.connect", "socket.bind", "os.putenv", "os.kill") or \
            event == "open" and args[1] and set(str(args[1])) & set("wxa+"):
        events.append(event)


def read(path, expected, others, forged, runs) -> dict[str, str]:
    """Reader -> what came of it."""
    outcome = {}
    for name, reader in READERS.items():
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        events.clear()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = reader(path)
                if forged:
                    outcome[name] = "loaded"
                else:
                    mark = fingerprint(found)
                    outcome[name] = "identical" if mark == expected else "the other file" if mark in others else "SILENT"
        except KNOWN as err:
            outcome[name] = f"refused: {type(err).__name__}"
        except Exception as err:
            outcome[name] = f"UNEXPECTED {type(err).__name__}: {err}"
        found = None
        faulthandler.cancel_dump_traceback_later()
        if events and not (runs and name in RUNS_CODE):
            outcome[name] = f"RAN {sorted(set(events))}"
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    events.clear()
    try:
        outcome["verify"] = "reported" if verify_file(path, decode=True) else "clean"
    except Exception as err:
        outcome["verify"] = f"UNEXPECTED {type(err).__name__}: {err}"
    if events:
        outcome["verify"] = f"RAN {sorted(set(events))}"
    faulthandler.cancel_dump_traceback_later()
    return outcome


def main(folder: Path, first: int, stop: int) -> None:
    files = [File(path.read_bytes(), path.name) for path in sorted(folder.glob("*.pt"))]
    expected = {}
    for file in files:
        marks = {fingerprint(reader(folder / file.name)) for reader in READERS.values()}
        assert len(marks) == 1 and verify_file(folder / file.name, decode=True) == [], file.name
        expected[file.name] = marks.pop()
    probe = types.ModuleType("hostile_probe")
    probe.touch = lambda: events.append("hostile_probe")
    sys.modules["hostile_probe"] = probe
    sys.addaudithook(_watch)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    before = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    path = folder / f"damaged-{first}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    pair = folder / f"pair-{first}"
    pair.mkdir(exist_ok=True)
    for linking in folder.glob("linking-*.pt"):
        (pair / linking.name).write_bytes(linking.read_bytes())
    with builtins.open(folder / f"results-{first}", "w") as results:
        print(json.dumps({"before": before}), file=results, flush=True)
        for seed in range(first, stop):
            file, corruption = corrupt(seed, files)
            print(json.dumps({"began": seed, "kind": corruption.kind}), file=results, flush=True)
            if file.name.startswith(LINKED):  # nothing of its pickle may run, whoever reads the other one
                linking = pair / file.name.replace(LINKED, "linking-")
                (pair / file.name).write_bytes(corruption.data)
                outcome = read(linking, expected[linking.name], set(), corruption.forged, False)
            else:
                os.ftruncate(fd, 0)
                os.pwrite(fd, corruption.data, 0)
                outcome = read(path, expected[file.name], {expected.get(corruption.other)} - {None}, corruption.forged,
                               corruption.runs)
            now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            grew, peak = now - peak, max(now, peak)
            print(json.dumps({"seed": seed, "kind": corruption.kind, "forged": corruption.forged, "file": file.name,
                              "outcome": outcome,
                              "grew": grew}), file=results, flush=True)
        print(json.dumps({"peak": peak}), file=results, flush=True)


# --- from the outside -------------------------------------------------------------------------------------------------

class Tally:
    """Outcomes of all batches; `wrong` are sentences about what must not be."""

    def __init__(self):
        self.outcomes: dict[tuple[bool, str], Counter] = {}
        self.kinds: Counter = Counter()
        self.wrong: list[str] = []
        self.before = self.peak = self.cases = 0  # KiB
        self.grew: list[tuple[int, int, str]] = []
        self.clean_but_refused: list[str] = []

    def add(self, line) -> None:
        seed, forged, kind = line["seed"], line["forged"], line["kind"]
        self.cases += 1
        self.kinds[("forged " if forged else "") + kind] += 1
        if line["grew"] > 8 << 10:
            self.grew.append((line["grew"], seed, kind))
        for reader, outcome in line["outcome"].items():
            self.outcomes.setdefault((forged, reader), Counter())[outcome.split(":")[0] if outcome.isupper() else outcome] += 1
            if outcome.split()[0] in ("SILENT", "UNEXPECTED", "RAN"):
                self.wrong.append(f"seed {seed} ({kind} of {line['file']}): {reader}: {outcome}")
        readers = {name: outcome for name, outcome in line["outcome"].items() if name != "verify"}
        if line["outcome"]["verify"] == "clean" and not forged and set(readers.values()) - {"identical", "the other file"}:
            self.clean_but_refused.append(f"seed {seed} ({kind} of {line['file']}): {readers}")

    def __str__(self):
        rows = [f"{self.cases} corruptions; memory {self.before >> 10} MiB before, peak {self.peak >> 10} MiB"]
        for forged in (False, True):
            for reader in (*READERS, "verify"):
                counts = self.outcomes.get((forged, reader), {})
                told = ", ".join(f"{outcome} {count}" for outcome, count in sorted(counts.items(), key=lambda item: -item[1]))
                rows.append(f"{'forged' if forged else 'accidental':10} {reader:25} {told}")
        rows.append("kinds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.kinds.items())))
        return "\n".join(rows)


def run(first: int, stop: int, batch: int, tally: Tally) -> Tally:
    """Corruptions `first` to `stop` in batches, each in a process of its own; one that ends early goes on behind its seed."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        folder = Path(folder)
        write_files(folder)
        while first < stop:
            end = min(first + batch, stop)
            done = subprocess.run([sys.executable, __file__, str(folder), str(first), str(end)], capture_output=True, text=True,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [
                                      str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))})
            results = folder / f"results-{first}"
            lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
            began = None
            for line in lines:
                if "outcome" in line:
                    tally.add(line)
                    began = None
                elif "began" in line:
                    began = line
                tally.before, tally.peak = max(tally.before, line.get("before", 0)), max(tally.peak, line.get("peak", 0))
            if done.returncode:
                if began is None:
                    raise RuntimeError(f"The batch from {first} did not begin: {done.stderr[-3000:]}")
                tally.wrong.append(f"seed {began['began']} ({began['kind']}): the process ended with {done.returncode}: "
                                   f"{done.stderr[-1500:]}")
                end = began["began"] + 1
            first = end
    return tally


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
