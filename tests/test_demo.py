"""The demo: its judgement, tried on runs that are made to go wrong; and the whole of it with DeepSpeed."""
from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_nvcomp.demo import corpus, fingerprint, main, processes

DEMO = Path(main.__file__).parent

# Logs what train.py logs, in no time. FAULT is what goes wrong in a resumed run that the block is on for.
FAKE = '''
import argparse, json, os, sys, time, zipfile
from pathlib import Path
p = argparse.ArgumentParser()
for name in ("events", "config", "steps", "checkpoints", "save-every", "width", "layers", "length", "batch"):
    p.add_argument("--" + name)
a = p.parse_args()
rank, fault = int(os.environ["RANK"]), os.environ.get("FAULT", "")
ours = "nvcomp_checkpoint" in json.loads(Path(a.config).read_text())
log = open(Path(a.events) / f"rank{rank}.jsonl", "w", buffering=1)
def event(**more): log.write(json.dumps(more) + "\\n")
home = Path(a.checkpoints) if a.checkpoints else None
step, resumed = 0, bool(home and (home / "latest").exists())
if resumed:
    step = int((home / "latest").read_text()) - (fault == "early" and ours)
    event(event="load", seconds=0.1)
if fault == "crash" and ours and resumed and rank == 1:
    sys.exit("a reason to crash")
while step < int(a.steps):
    step += 1
    bits = f"{step:08x}" if not (fault == "loss" and ours and resumed and rank == 1 and step == 14) else "ffffffff"
    event(event="step", step=step, loss=1.0 / step, bits=bits)
    if home and step % int(a.save_every) == 0:
        if rank == 0:
            (home / str(step)).mkdir(parents=True, exist_ok=True)
            for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
                with zipfile.ZipFile(home / str(step) / name, "w") as z:
                    z.writestr("archive/data.pkl", "ds_nvcomp" if ours and fault != "not compressed" else "plain" * 5)
            (home / "latest").write_text(str(step))
        event(event="save", seconds=0.1)
    time.sleep(0.05 if home and not resumed else 0)
state = {"weights": "a", "RNG": "b" if not (fault == "state" and ours and rank == 1) else "c"}
event(event="end", state=state, parameters=5)
'''


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """run(fault) -> exit code, over a training script that takes no time."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(processes, "SCRIPT", script)
    monkeypatch.setattr(main, "_choose", lambda device, ranks, steps: ("cpu", ranks))

    def run(fault: str = "", keep: bool = False) -> int:
        monkeypatch.setenv("FAULT", fault)
        return main.run(tmp_path / "out", steps=16, keep=keep)
    return run


def test_identical_runs_pass(fake, tmp_path, capsys):
    assert fake() == 0
    out = capsys.readouterr().out
    assert "Identical in every bit" in out and "SIGKILL" in out and "ZeRO-2" in out and "ZeRO-3" in out
    assert "differ" not in out
    assert list((tmp_path / "out").iterdir()) == [], "the runs are removed"


@pytest.mark.parametrize("fault, words", [
    ("loss", ["ZeRO-2, compressed, rank 1: the loss of step 14 after the resumption is ffffffff, uninterrupted 0000000e"]),
    ("state", ["ZeRO-3, compressed, rank 1: the final RNG differ"]),
    ("early", ["compressed, rank 0", "it resumed for the steps [12, 13, 14, 15, 16]"]),
    ("crash", ["Rank 1 ended with code 1", "a reason to crash"]),
    ("not compressed", ["should be compressed, and is not"])])
def test_what_goes_wrong_is_shown(fake, tmp_path, capsys, fault, words):
    """Exit code 1 and the reason, for each way in which a run can differ or fail."""
    assert fake(fault) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert all(word in out for word in words), out
    assert "Identical in every bit" not in out
    assert list((tmp_path / "out").iterdir()) == []


def test_keep(fake, tmp_path, capsys):
    """The runs stay, and the two configurations differ by the block alone."""
    import json
    assert fake(keep=True) == 0
    [home] = (tmp_path / "out").iterdir()
    assert str(home) in "".join(capsys.readouterr().out.split())
    plain, ours = (json.loads((home / "zero2" / f"ds_config_{name}.json").read_text()) for name in ("plain", "compressed"))
    assert ours.pop("nvcomp_checkpoint") == {"enabled": True} and ours == plain


def test_kill_is_sigkill_to_all(tmp_path, monkeypatch):
    """Also to the children of the processes, and while they ignore what can be ignored."""
    script = tmp_path / "stubborn.py"
    script.write_text("import signal, subprocess, sys, json, os, time\nfrom pathlib import Path\n"
                      "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nchild = subprocess.Popen(['sleep', '600'])\n"
                      "out = Path(sys.argv[2])\n(out / ('pid' + os.environ['RANK'])).write_text(str(child.pid))\n"
                      "line = json.dumps(dict(event='step', step=3))\n"
                      "(out / f\"rank{os.environ['RANK']}.jsonl\").write_text(line + '\\n{\"cut')\n"
                      "time.sleep(600)\n")
    monkeypatch.setattr(processes, "SCRIPT", script)
    run = processes.Run(tmp_path / "run", 2, {}, [])
    while not all((tmp_path / "run" / f"rank{rank}.jsonl").exists() for rank in range(2)):
        time.sleep(0.01)
    run.wait(kill_after=3)
    assert [process.returncode for process in run.processes] == [-signal.SIGKILL] * 2
    for rank in range(2):
        child = int((tmp_path / "run" / f"pid{rank}").read_text())
        end = time.monotonic() + 10
        while _alive(child) and time.monotonic() < end:
            time.sleep(0.01)
        assert not _alive(child)
    assert run.step() == 3, "the line that the kill cut off is passed over"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("arguments, words", [(dict(device="tpu"), "'tpu' is not one of"), (dict(ranks=0), "ranks: 0"),
                                              (dict(steps=3), "steps: 3")])
def test_arguments_that_cannot_work(arguments, words, tmp_path, capsys):
    assert main.run(tmp_path, **arguments) == 1
    assert words in capsys.readouterr().out


def test_fingerprint_sees_one_bit():
    """Of values, signs of zero and NaNs, dtypes, shapes and keys."""
    base = {"a": torch.zeros(5), "b": [1, "x"]}
    others = [{"a": torch.tensor([0.0, 0, 0, 0, -0.0]), "b": [1, "x"]}, {"a": torch.zeros(5, dtype=torch.int32), "b": [1, "x"]},
              {"a": torch.zeros(5, 1), "b": [1, "x"]}, {"a": torch.zeros(5), "b": [2, "x"]},
              {"c": torch.zeros(5), "b": [1, "x"]}]
    digests = [fingerprint.digest(value) for value in [base, *others]]
    assert len(set(digests)) == len(digests) and fingerprint.digest({"b": [1, "x"], "a": torch.zeros(5)}) == digests[0]
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert fingerprint.digest(nans[:1]) != fingerprint.digest(nans[1:])


def test_corpus_is_the_same_everywhere():
    """Two processes read the same text and batches, different by step and rank."""
    text = corpus.load()
    assert len(text) == corpus.BYTES and b"import" in bytes(text[:100_000].tolist())
    inputs, targets = corpus.batch(text, 3, 1, 4, 64)
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and inputs.shape == (4, 64)
    for other in (corpus.batch(text, 3, 0, 4, 64), corpus.batch(text, 4, 1, 4, 64)):
        assert not torch.equal(inputs, other[0])
    out = subprocess.run([sys.executable, "-c", "import hashlib, corpus; t = corpus.load(); "
                          "print(hashlib.sha256(t.numpy()).hexdigest(), corpus.batch(t, 3, 1, 4, 64)[0].sum().item())"],
                         cwd=DEMO, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": "5"})
    assert out.stdout.split() == [hashlib.sha256(text.numpy()).hexdigest(), str(inputs.sum().item())]


def test_the_script_knows_nothing_of_us():
    """What makes its checkpoints compressed is the JSON alone."""
    for name in ("train.py", "model.py", "corpus.py", "fingerprint.py"):
        text = (DEMO / name).read_text()
        assert "nvcomp" not in text and "from ." not in text


@pytest.mark.slow
def test_demo(tmp_path, capsys):
    """With DeepSpeed: killed, resumed, identical; under ZeRO-2 and ZeRO-3."""
    pytest.importorskip("deepspeed")
    code = main.run(tmp_path, steps=16, device="cpu")
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("killed with SIGKILL") == 4 and "Identical in every bit" in out and "differ" not in out
    assert list(tmp_path.iterdir()) == []
