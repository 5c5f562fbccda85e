"""1,000 corrupted payloads in GPU memory, two thirds of them through the GPU decoder: each is refused with our error or decodes
bit-identically, none faults the device or hangs.
"""
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from conformance import gpu_or_skip

gpu_or_skip()

TESTS = Path(__file__).resolve().parents[1]
CASES, BATCH = 1000, 250
ENOUGH = 3  # findings after which the rest is left: each may take its 10 seconds and a new process
MEMORY = 256 << 20  # bytes that a process may hold or have taken on the device; payloads decode to some 200 KiB


def batch(first, stop, results):
    return subprocess.run(
        [sys.executable, str(TESTS / "hostile" / "gpu_corruptions.py"), str(first), str(stop), str(results)],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [*map(str, [TESTS.parent, TESTS, TESTS / "hostile"]),
                                                                              os.environ.get("PYTHONPATH")]))}, timeout=300)


def test_corrupted_payloads(tmp_path, capsys):
    outcomes, wrong, first, peak, taken = Counter(), [], 0, 0, 0
    while first < CASES and len(wrong) < ENOUGH:
        stop, results = min(first + BATCH, CASES), tmp_path / str(first)
        done = batch(first, stop, results)
        began = None
        for line in map(json.loads, results.read_text().splitlines() if results.exists() else ()):
            if "outcome" in line:
                outcomes[line["codec"], line["kind"], line["outcome"].split(":")[-1].strip() if line["outcome"][:3] == "ref"
                         else line["outcome"]] += 1
                if line["outcome"].split()[0] in ("SILENT", "UNEXPECTED"):
                    wrong.append(line)
                began = line["seed"] if line["outcome"].startswith("UNEXPECTED") else None
            elif "began" in line:
                began = line["began"]
            peak, taken = max(peak, line.get("peak", 0)), max(taken, line.get("taken", 0))
        if done.returncode:
            assert began is not None, f"the batch from {first} did not begin: {done.stderr[-3000:]}"
            wrong.append((began, done.returncode, done.stderr[-1500:]))
            stop = began + 1
        first = stop
        with capsys.disabled():  # what is known if this is ended early
            print(f"\n{first} of {CASES} corrupted payloads done, {len(wrong)} wrong: {wrong[-1:]}", flush=True)
    with capsys.disabled():
        print(f"\n{sum(outcomes.values())} corrupted payloads on the GPU; torch's peak {peak >> 20} MiB, "
              f"taken {taken >> 20} MiB")
        for key, count in sorted(outcomes.items()):
            print(f"  {count:4} {', '.join(key)}")
    assert not wrong, wrong[:10]
    assert sum(outcomes.values()) == CASES and peak < MEMORY and taken < MEMORY
    on_gpu = sum(count for (codec, kind, _), count in outcomes.items() if kind.startswith("decode") or codec == "ans")
    seen_by_nvcomp = sum(count for (codec, kind, outcome), count in outcomes.items()
                         if codec == "ans" and "stream" in kind and outcome in ("DecodeError", "identical"))
    assert on_gpu >= 500 and seen_by_nvcomp > 100, (on_gpu, seen_by_nvcomp)
