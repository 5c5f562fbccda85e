"""What configs/ has for Megatron and DCP: arguments that parse, modules that compile, and an example that resumes bit for bit.

The DeepSpeed configurations are tests/test_deepspeed.py's.
"""
import argparse
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_patch import arguments

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"
SCRIPTS = sorted(CONFIGS.glob("megatron_*.sh"))
TREES = [tree for tree in os.environ.get("MEGATRON_LM", "").split(os.pathsep) if tree]  # checkouts of Megatron-LM to parse with

PARSE = """
import sys, typing
typing.override = getattr(typing, "override", lambda function: function)  # Megatron 0.19 is for Python 3.12
sys.path[:0] = [{tree!r}, {root!r}]
import megatron_patch
from megatron.training.arguments import parse_args
found = parse_args()
print([found.nvcomp_checkpoint, found.ckpt_format, found.async_save, found.use_persistent_ckpt_worker])
"""


def launched(script: Path, folder: Path) -> list[str]:
    """The arguments that a script gives torchrun."""
    torchrun = folder / "torchrun"
    torchrun.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
                   "MEGATRON": "here", "DATA": "some text", "TOKENIZER": "there", "CHECKPOINTS": "a folder"}
    done = subprocess.run([str(script), "--exit-interval", "3"], env=environment, text=True, capture_output=True, check=True)
    return done.stdout.splitlines()


@pytest.fixture
def seen(monkeypatch):
    """The configurations that the arguments would put in force."""
    found = []
    monkeypatch.setattr(arguments, "apply", found.append)
    return found


@pytest.mark.parametrize("script, codec", list(zip(SCRIPTS, ["deflate", "ans"])), ids=lambda value: getattr(value, "stem", value))
def test_megatron_script(script, codec, tmp_path, seen):
    given = launched(script, tmp_path)
    assert given[:3] == ["--nproc-per-node", "8", "here/pretrain_gpt.py"]
    assert "some text" in given and given.count("a folder") == 2 and given[-2:] == ["--exit-interval", "3"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add(parser)
    found, rest = parser.parse_known_args(given[3:])
    assert found.nvcomp_checkpoint == codec and seen[-1].codec == codec
    assert not any("nvcomp" in argument for argument in rest)
    assert {"torch_dist", "--async-save", "--use-persistent-ckpt-worker"} <= set(rest)


@pytest.mark.skipif(not TREES, reason="MEGATRON_LM=<folders of Megatron-LM checkouts> parses with their own parsers")
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_megatron_script_with_megatrons_parser(script, tree, tmp_path):
    code = PARSE.format(tree=str(Path(tree).resolve()), root=str(ROOT))
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "8", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, "-c", code, *launched(script, tmp_path)[3:]], env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].endswith("'torch_dist', True, True]")


def test_torchtitan_modules_compile():
    """They were run with torchtitan by hand; configs/README.md says with which."""
    modules = sorted((CONFIGS / "torchtitan").glob("*.py"))
    assert len(modules) == 2
    for path in modules:
        compile(path.read_text(), str(path), "exec")
    toml = (CONFIGS / "torchtitan" / "llama3_8b_v0_2.toml").read_text()
    assert 'custom_import = "titan_nvcomp_v0_2"' in toml


def test_all_are_listed():
    readme = (CONFIGS / "README.md").read_text()
    names = [path.name for path in CONFIGS.iterdir() if path.suffix in (".sh", ".py", ".json")]
    names += [f"torchtitan/{path.name}" for path in (CONFIGS / "torchtitan").iterdir() if path.suffix in (".py", ".toml")]
    assert len(names) >= 14 and all(f"`{name}`" in readme for name in names)


def losses(processes: int, folder: Path) -> dict[str, str]:
    """The losses of the steps that a run of the example makes."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--master-addr", "127.0.0.1",
                           "--master-port", str(port), str(CONFIGS / "fsdp2_dcp.py"), str(folder)],
                          env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    return dict(line.split(": loss ") for line in done.stdout.splitlines() if line.startswith("step"))


def test_fsdp2_example_resumes_with_another_number_of_processes(tmp_path):
    straight = losses(2, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-10", "step-5"] and len(straight) == 10
    shutil.rmtree(tmp_path / "step-10")
    resumed = losses(1, tmp_path)
    assert list(resumed)[0] == "step 6" and all(resumed[f"step {step}"] == straight[f"step {step}"] for step in range(6, 11))
