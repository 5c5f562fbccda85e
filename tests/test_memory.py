"""A few bytes that announce many: refused before memory is taken, while whatever we write loads, also what is all zero."""
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ds_nvcomp
import payloads
from ds_nvcomp.archive import writer
from ds_nvcomp.encoding import codecs, format, transforms
from ds_nvcomp.errors import NotEnoughMemoryError
from ds_nvcomp.pipeline import Payload, memory

MIB, GIB = 1 << 20, 1 << 30
FAST = {"fsync": False}
FORMAT = Path(__file__).parent.parent / "FORMAT.md"

LOAD = """
import json, resource, sys, time
import torch, ds_nvcomp
from ds_nvcomp.errors import NotEnoughMemoryError
ds_nvcomp.load(sys.argv[1])
held, began, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic(), []
for arguments in ({"weights_only": True}, {"weights_only": False}, {"mmap": True}):
    try:
        ds_nvcomp.load(sys.argv[2], **arguments)
    except NotEnoughMemoryError as err:
        refused.append([err.path, err.tensor])
print(json.dumps([refused, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10, time.monotonic() - began]))
"""


def forge(path, nbytes, monkeypatch):
    """A file, right in everything, whose tensor is all zero and decodes to `nbytes`."""
    header = format.Header(transforms.SPLIT64, codecs.NONE.number, 0, format.MAX_CHUNK_BYTES, nbytes // 8, 0)
    table = format.Table.empty(transforms.SPLIT64, header.chunks)
    payload = Payload(header, table, [format.preamble(header, table)])
    with monkeypatch.context() as patch:
        patch.setattr(writer, "encode", lambda sources, config, progress: iter([(0, payload)]))
        ds_nvcomp.save({"zeros": torch.zeros(1000, dtype=torch.float64)}, path, FAST)


def test_a_forged_announcement_is_refused_at_once(tmp_path, monkeypatch):
    ds_nvcomp.save({"w": torch.randn(20_000)}, tmp_path / "honest.pt", FAST)  # so that everything is imported
    installed = memory._table(Path("/proc/meminfo"))
    nbytes = max(64 * GIB, 2 * (installed["MemTotal"] + installed["SwapTotal"]) << 10)
    bomb = tmp_path / "bomb.pt"
    forge(bomb, nbytes, monkeypatch)
    assert bomb.stat().st_size < nbytes / 100_000
    done = subprocess.run([sys.executable, "-c", LOAD, tmp_path / "honest.pt", bomb], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    refused, taken, seconds = json.loads(done.stdout)
    assert refused == [[str(bomb), "zeros"]] * 3
    assert taken < 32 * MIB + 20 * bomb.stat().st_size and seconds < 10


def test_the_limit_is_what_is_available(tmp_path, monkeypatch):
    forge(tmp_path / "x.pt", 16 * MIB, monkeypatch)
    monkeypatch.setattr(memory, "available", lambda: 16 * MIB)
    assert ds_nvcomp.load(tmp_path / "x.pt")["zeros"].untyped_storage().nbytes() == 16 * MIB
    monkeypatch.setattr(memory, "available", lambda: 16 * MIB - 1)
    with pytest.raises(NotEnoughMemoryError, match=f"{16 * MIB} bytes.*{16 * MIB - 1} bytes of memory are available"):
        ds_nvcomp.load(tmp_path / "x.pt")
    assert ds_nvcomp.load(tmp_path / "x.pt", map_location="meta")["zeros"].is_meta
    monkeypatch.setattr(memory, "available", lambda: None)  # a system that does not tell
    ds_nvcomp.load(tmp_path / "x.pt")


def test_a_payload_that_is_all_zero_is_no_bomb(tmp_path):
    """What Adam's moments are before the first step, in the default chunks."""
    ds_nvcomp.save({"exp_avg": torch.zeros(256 * MIB // 4)}, tmp_path / "x.pt", FAST)
    assert (tmp_path / "x.pt").stat().st_size < MIB // 8
    found = torch.load(tmp_path / "x.pt", weights_only=True)["exp_avg"]
    assert found.numel() == 64 * MIB and not found.any()


@pytest.mark.parametrize("dtype,transform", [("uint8", "whole"), ("float8_e5m2", "split8"), ("bfloat16", "split16"), ("float32", "split32"),
                                             ("float64", "split64")])
def test_a_smaller_limit_would_refuse_what_we_write(dtype, transform):
    """The densest row that the format allows is one that we write."""
    found = re.search(rf"\| `{transform}` \| (\d+) MiB \| (\d+) \| ([\d ]+) \|", FORMAT.read_text())
    decoded, row, ratio = (int(number.replace(" ", "")) for number in found.groups())
    kind = transforms.for_dtype(dtype)
    chunks = 3
    data = payloads.payload(dtype, "zero", elements=chunks * kind.chunk_elements(MIB), chunk_bytes=MIB)
    raw = len(payloads.decode(data))
    assert kind.name == transform and row == format.row_bytes(kind) and len(data) == format.aligned(64 + chunks * row)
    assert raw == chunks * decoded * MIB and raw // (chunks * row) == ratio


# -- what is available --------------------------------------------------------------------------------------------------------

@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Writes files as the kernel has them: a machine of 1000 KiB, of which 600 are available, with 50 of swap."""
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    write("proc/meminfo", "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\nSwapFree:  50 kB\nHugePages_Total:  0\n")
    return write


def test_of_the_machine(machine):
    assert memory.available() == 650 << 10
    machine("proc/meminfo", "MemTotal:  1000 kB\n")  # before Linux 3.14
    assert memory.available() is None


def test_no_such_files(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory.available() is None


@pytest.mark.parametrize("folder", ["a/b", "a", "."])
def test_of_a_control_group(machine, folder):
    """Of the process's own or one above; also one that shows itself as the root, as in a container."""
    machine("proc/self/cgroup", "0::/a/b\n")
    for name in ("a/b", "a", "."):
        machine(f"groups/{name}/memory.max", f"{400 << 10}\n" if name == folder else "max\n")
        machine(f"groups/{name}/memory.current", f"{300 << 10}\n")
        machine(f"groups/{name}/memory.stat", f"anon 5\ninactive_file {20 << 10}\nactive_file {10 << 10}\n")
    assert memory.available() == (400 - 300 + 30 + 50) << 10
    machine(f"groups/{folder}/memory.current", f"{500 << 10}\n")
    assert memory.available() == 50 << 10


def test_of_a_control_group_of_version_1(machine):
    machine("proc/self/cgroup", "9:name=systemd:/x\n4:hugetlb,memory:/job\n0::/\n")
    machine("groups/memory/job/memory.limit_in_bytes", f"{400 << 10}\n")
    machine("groups/memory/job/memory.usage_in_bytes", f"{300 << 10}\n")
    machine("groups/memory/job/memory.stat", f"inactive_file 1\ntotal_inactive_file {20 << 10}\ntotal_active_file 0\n")
    machine("groups/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert memory.available() == (400 - 300 + 20 + 50) << 10


def test_of_this_machine():
    installed = memory._table(Path("/proc/meminfo"))
    assert 0 < memory.available() <= (installed["MemTotal"] + installed["SwapTotal"]) << 10
