"""10,000 seeded corruptions of files, each through every reader: refused with a known error, or bit-identical; none silent,
none over 10 seconds, none ending the process, memory bounded.

An *accidental* corruption (see corrupt.py) must never load as anything but what was saved. A *forged* one, in which an attacker
made all checksums right, may load other values; for those only crashes, hangs, memory and code that runs count. What is said of
weights_only=False is that nothing runs but what the pickle asks for.
"""
import pickle
import random
import signal
import subprocess
import sys
import types

import pytest
import torch

import readers
from corrupt import ACCIDENTAL, FORGED, File, build, code_in_the_pickle, payloads, reseal

MEMORY = 160 << 10  # KiB that a process may grow by in 1000 corruptions; forged zeros decode to 64 MiB


def check(tally, capsys):
    with capsys.disabled():
        print(f"\n{tally}")
    assert not tally.wrong, "\n".join(tally.wrong[:20])
    assert not tally.clean_but_refused, "verify finds nothing, torch does:\n" + "\n".join(tally.clean_but_refused[:20])
    assert tally.peak - tally.before < MEMORY, f"{tally.peak >> 10} MiB, {tally.before >> 10} before: {sorted(tally.grew)[-5:]}"


def test_a_few_hundred(capsys):
    tally = readers.run(0, 300, 300, readers.Tally())
    assert tally.cases == 300
    check(tally, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand(capsys):
    tally = readers.run(300, 10_300, 1000, readers.Tally())
    assert tally.cases == 10_000
    check(tally, capsys)
    named = {prefix + function.__name__.replace("_", " ") for prefix, kinds in (("", ACCIDENTAL), ("forged ", FORGED))
             for function in kinds}
    assert set(tally.kinds) == named and min(tally.kinds.values()) > 20


# --- do the instruments measure anything? -----------------------------------------------------------------------------

@pytest.fixture
def folder(tmp_path):
    readers.write_files(tmp_path)
    return tmp_path


def test_a_file_taken_to_pieces_and_built_again_is_the_same(folder):
    """So that what `build` changes is what a corruption says."""
    for path in folder.glob("*.pt"):
        file = File(path.read_bytes())
        assert build(file.entries) == file.data, path.name
        entries = file.entries
        reseal(entries)
        assert build(entries) == file.data, path.name
        assert len(payloads(entries)) >= 4 and all(file.regions.values())


def test_fingerprints_see_every_kind_of_change():
    same = lambda: readers.content(0)  # noqa: E731
    mark = readers.fingerprint(same())
    assert readers.fingerprint(same()) == mark
    changes = {
        "bit": lambda c: c["half"].view(torch.uint8)[7].bitwise_xor_(1), "scalar": lambda c: c["small"][1].add_(1),
        "int": lambda c: c.update(step=0),
        "sign of zero": lambda c: c["nested"]["a"].__setitem__(2, 0.0), "type": lambda c: c.update(flag=1),
        "order": lambda c: c.update(step=c.pop("step")),
        "shared": lambda c: c.update(row=c["row"].clone()), "view": lambda c: c.update(transposed=c["weight"].data),
        "grad": lambda c: c["weight"].requires_grad_(False), "key": lambda c: c.update(more=None),
        "dtype": lambda c: c.update(ids=c["ids"].double()),
        "nested": lambda c: c["nested"]["c"][0]["deep"][0][0].append(0),
        "nan": lambda c: c["nested"]["a"].__setitem__(1, -float("nan")),
    }
    for name, change in changes.items():
        changed = same()
        change(changed)
        assert readers.fingerprint(changed) != mark, name


def test_silence_would_be_seen(folder, monkeypatch):
    """A reader that ignores damage is told from one that does not."""
    path = folder / "none-0.pt"
    mark = readers.fingerprint(torch.load(path, weights_only=False))
    monkeypatch.setattr(readers, "READERS", {"careless": lambda path: torch.load(folder / "none-1.pt", weights_only=False),
                                             "failing": lambda path: {}[0], "strange": lambda path: next(iter(())),
                                             "whole": lambda path: torch.load(path, weights_only=False)})
    outcome = readers.read(path, mark, set(), False, False)
    assert outcome == {"careless": "SILENT", "failing": "refused: KeyError", "strange": "UNEXPECTED StopIteration: ",
                       "whole": "identical",
                       "verify": "clean"}


def test_a_crash_is_known_by_its_seed(monkeypatch):
    """The process aborts in its third case; what is behind that goes on in another."""
    real = subprocess.run

    def run(command, **options):
        code = "import os, pathlib, readers\nold, count = readers.read, iter(range(9))\n" \
               "readers.read = lambda *args: os.abort() if next(count) == 2 else old(*args)\n" \
               f"readers.main(pathlib.Path({command[2]!r}), {command[3]}, {command[4]})"
        return real([command[0], "-c", code], **options)

    monkeypatch.setattr(readers.subprocess, "run", run)
    tally = readers.run(16, 21, 10, readers.Tally())
    assert tally.cases == 4 and len(tally.wrong) == 1
    assert "seed 18 " in tally.wrong[0] and f"ended with {-signal.SIGABRT}" in tally.wrong[0]


def test_pickles_of_the_probe_are_refused_by_weights_only(folder, monkeypatch):
    """The one kind that asks for code: it does run where the pickle is trusted, or the audit would have watched nothing."""
    calls = []
    module = types.ModuleType("hostile_probe")
    module.touch = lambda: calls.append(1)
    monkeypatch.setitem(sys.modules, "hostile_probe", module)
    file = File((folder / "deflate-0.pt").read_bytes())
    for seed in range(40):
        data, _ = code_in_the_pickle(random.Random(seed), file, [file])
        if b"hostile_probe" in data:
            break
    (folder / "x").write_bytes(data)
    with pytest.raises(pickle.UnpicklingError, match="hostile_probe"):
        torch.load(folder / "x", weights_only=True)
    assert not calls
    torch.load(folder / "x", weights_only=False)
    assert calls
