"""DeepSpeed as its users run it: real processes, its own engines, every resumed step compared by bits.

A launch costs seconds, so related cases share one (see deepspeed_workers/worker.py); each is a test of its own here.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")
from deepspeed_workers import bits  # noqa: E402
from deepspeed_workers.launch import Group, environment  # noqa: E402
from ds_nvcomp.archive.scan import scan  # noqa: E402

WORKER = Path(__file__).parent / "deepspeed_workers" / "worker.py"
ROOT = WORKER.parents[2]
TAG = "global_step2"


def installed() -> bool:
    """Whether torch finds our entry point: `pip install -e .` was done."""
    from importlib.metadata import entry_points
    return any(point.name == "ds_nvcomp" for point in entry_points(group="torch.backends"))


needs_installation = pytest.mark.skipif(not installed(), reason="the entry point needs an installed package: pip install -e .")
pytestmark = needs_installation


@pytest.fixture(scope="session")
def launched(tmp_path_factory):
    """group(name) -> the finished `Group`, started once."""
    groups = {}

    def group(name: str, ranks: int = 2, **env) -> Group:
        if name not in groups:
            groups[name] = Group(name, tmp_path_factory.mktemp(name), ranks, **env).wait()
        return groups[name]
    return group


def params(group, names, *marks):
    return [pytest.param(group, name, id=name, marks=marks) for name in names.split()]


@pytest.mark.parametrize("group, case", [
    *params("zero_bf16", "zero0_bf16 zero1_bf16 zero2_bf16 zero3_bf16 bf16_optimizer zero2_accumulation"),
    *params("zero_fp32", "zero0_fp32 zero1_fp32 zero2_fp32 zero3_fp32"),
    *params("zero_fp16", "zero0_fp16 zero1_fp16 zero2_fp16 zero3_fp16"),
    *params("moe", "moe_zero0_fp32 moe_zero1_bf16 moe_zero2_bf16 moe_zero2_bf16_one_group"),
    *params("pipeline", "pipeline_zero0_fp32 pipeline_zero1_bf16"),
    *params("offload", "zero2_offload zero3_offload", pytest.mark.slow)])
def test_resumes_bit_identical(launched, group, case):
    """Compressed, plain and uninterrupted training agree in losses and states, and both checkpoints in every tensor."""
    launched(group).check(case)


@pytest.mark.parametrize("group, case", [
    *params("zero_fp32", "config_zero1_fp32"), *params("zero_bf16", "config_zero2_bf16 config_zero3_bf16"),
    *params("zero_fp16", "config_zero2_fp16"), *params("moe", "config_moe_zero1_bf16"),
    *params("pipeline", "config_pipeline_bf16"),
    *params("offload", "config_zero3_cpu_offload", pytest.mark.slow)])
def test_configuration_runs(launched, group, case):
    """A file of configs/, as it stands, trains, saves and resumes."""
    launched(group).check(case)


@pytest.mark.parametrize("case", (
    "replicas_apart replicas_apart_async "
    "exclude_frozen_zero2 exclude_frozen_zero3 overwrite_a_tag leftovers_are_cleaned save_latest_false several_saves "
    "monitor_events weights_only_reads_the_module link_master_weights_off").split())
def test_feature(launched, case):
    launched("features").check(case)


@pytest.mark.parametrize("group, case", [
    *params("behind", "async_zero2_bf16 async_zero3_bf16 overlap_zero2_bf16 overlap_zero3_bf16 overlap_zero1_fp32 "
                      "async_saves_follow_one_another two_in_flight overlapping_saves two_overlapping_saves "
                      "another_engine_loads"),
    *params("pipeline", "async_pipeline overlap_pipeline")])
def test_behind_training(launched, group, case):
    """Asynchronous saves, and those whose snapshot overlaps with the next forward and backward."""
    launched(group).check(case)


def test_the_last_save_before_the_exit(launched):
    """The script ends, and its process group with it, while the save goes on: the processes end when it is complete."""
    group = launched("exit")
    group.check("left_at_exit")
    assert all(process.returncode == 0 for process in group.processes)
    directory = group.out / "left_at_exit"
    assert (directory / "latest").read_text() == "global_step1" and not list(directory.glob(".*"))
    assert len(list((directory / "global_step1").glob("*_states.pt"))) == 3


@pytest.mark.parametrize("case", "slow_rank failing_rank_1 failing_rank_0 reader_meanwhile".split())
def test_commit(launched, case):
    launched("commit").check(case)


@pytest.mark.parametrize("case", "bad_blocks own_engine_without_the_block two_engines nvme_offload old_signatures".split())
def test_choice_of_engine(launched, case):
    launched("choice", 1).check(case)


@pytest.mark.slow
def test_nvme_offload_is_refused_at_initialize(launched):
    """Through DeepSpeed itself, which compiles for a minute before it comes to us."""
    launched("nvme", 1).check("nvme_initialize")


def test_every_configuration_is_valid(launched):
    """Both DeepSpeed's validation and ours; and each one is in the table of configs/README.md."""
    [names] = launched("choice", 1).check("config_files")
    readme = (ROOT / "configs" / "README.md").read_text()
    assert len(names) == 8 and all(f"`{name}`" in readme for name in names)


def test_autoload_can_be_switched_off(launched):
    """DS_NVCOMP_AUTOLOAD=0 leaves DeepSpeed alone; install() after its import then works."""
    launched("nothing", 1, DS_NVCOMP_AUTOLOAD="0").check("left_alone")


def _python(code: str, **env) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment(**env), capture_output=True, text=True, timeout=300,
                          cwd="/")  # -c puts the working directory before PYTHONPATH
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("off", ["0", "1"])
def test_install_before_deepspeed(off):
    """install() by hand before DeepSpeed is imported, with and without the entry point having done so."""
    out = _python("import ds_nvcomp; ds_nvcomp.install(); ds_nvcomp.install(); import deepspeed.runtime.engine as e; "
                  "print('patched', getattr(e, '_ds_nvcomp', False), e.__spec__.loader.__class__.__name__)",
                  DS_NVCOMP_AUTOLOAD=off)
    assert "patched True SourceFileLoader" in out


def test_import_torch_imports_nothing_heavy():
    """The entry point adds milliseconds, and no module of ours but the ones it is made of."""
    out = _python("import torch, sys; print('OURS', sorted(m for m in sys.modules if m.startswith(('ds_nvcomp', 'cupy', "
                  "'nvidia.nvcomp', 'deepspeed', 'isal', 'rich'))))")
    assert "OURS ['ds_nvcomp', 'ds_nvcomp.autoload', 'ds_nvcomp.errors']" in out


@pytest.mark.parametrize("broken", ["deepspeed_engine.py", "archive/__init__.py", "config.py", "pipeline/__init__.py"])
def test_broken_installation_leaves_torch_alone(tmp_path, broken):
    """With any module of ours beyond repair, `import torch` and its use are as before."""
    shutil.copytree(ROOT / "ds_nvcomp", tmp_path / "ds_nvcomp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ds_nvcomp" / broken).write_text("raise ImportError('broken on purpose')\n")
    out = _python("import torch, io; f = io.BytesIO(); torch.save(torch.ones(3), f); f.seek(0); print(torch.load(f).sum()); "
                  "import ds_nvcomp; print('AT', ds_nvcomp.__file__)", PYTHONPATH=tmp_path)
    assert "tensor(3.)" in out and f"AT {tmp_path}" in out


def test_failing_install_is_a_warning(tmp_path):
    """Whatever install() runs into, `import torch` goes on and says how to silence it."""
    shutil.copytree(ROOT / "ds_nvcomp", tmp_path / "ds_nvcomp", ignore=shutil.ignore_patterns("__pycache__"))
    autoload = tmp_path / "ds_nvcomp" / "autoload.py"
    autoload.write_text(autoload.read_text() + "\ndef install():\n    raise OSError('on purpose')\n")
    out = _python("import torch; print(torch.ones(3).sum())", PYTHONPATH=tmp_path)
    assert "tensor(3.)" in out and "OSError: on purpose" in out and "DS_NVCOMP_AUTOLOAD=0" in out


@pytest.mark.parametrize("broken", ["deepspeed_engine.py", "archive/__init__.py"])
def test_broken_installation_leaves_deepspeed_alone(tmp_path, broken):
    """Those who have no block in their configuration do not pay for our missing dependency."""
    shutil.copytree(ROOT / "ds_nvcomp", tmp_path / "ds_nvcomp", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ds_nvcomp" / broken).write_text("raise ImportError('broken on purpose')\n")
    out = _python("""
import torch, deepspeed
from types import SimpleNamespace
configure = deepspeed.DeepSpeedEngine._configure_checkpointing
for block in ({}, {'nvcomp_checkpoint': {'enabled': False}}, {'nvcomp_checkpoint': {'enabled': True}}):
    try:
        configure(SimpleNamespace(_config=SimpleNamespace(_param_dict=block)))
    except AttributeError:
        print('DEEPSPEED')  # its own method ran, on too little
    except RuntimeError as err:
        print('REFUSED', err)
""", PYTHONPATH=tmp_path)
    words = [line for line in out.splitlines() if line.startswith(("DEEPSPEED", "REFUSED"))]
    assert words[:2] == ["DEEPSPEED"] * 2 and words[2].startswith("REFUSED") and "broken on purpose" in words[2]


def test_deepspeed_before_0_17_1():
    """Up to 0.17.0 there is no create_checkpoint_engine: `_configure_checkpointing` makes the engine by itself."""
    out = _python("""
from types import SimpleNamespace
class DeepSpeedEngine:
    def __init__(self, block): self._config = SimpleNamespace(_param_dict=block); self._configure_checkpointing(True)
    def _configure_checkpointing(self, dist_init_required): self.checkpoint_engine = 'own'
    def save_checkpoint(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False): pass
module = SimpleNamespace(DeepSpeedEngine=DeepSpeedEngine)
import deepspeed
from ds_nvcomp.deepspeed_engine import patch
patch(module)
for block in ({}, {'nvcomp_checkpoint': {'enabled': False}}, {'nvcomp_checkpoint': {}}):
    print('MADE', getattr(DeepSpeedEngine(block).checkpoint_engine, 'name', 'own'))
""")
    made = [line.split()[1] for line in out.splitlines() if line.startswith("MADE")]
    assert made == ["own", "own", "NvcompCheckpointEngine"]


def test_engine_module_first():
    """Whoever imports our engine by name need not know that DeepSpeed comes first."""
    assert "NvcompCheckpointEngine" in _python("from ds_nvcomp.deepspeed_engine import NvcompCheckpointEngine as e; print(e)")


@pytest.mark.parametrize("case", ["save_16bit_zero2", "save_16bit_zero3"])
def test_save_16bit_model_is_plain(launched, case):
    """It opens where ds_nvcomp cannot be imported, and holds what DeepSpeed's own engine wrote."""
    launched("features").check(case)
    home = launched("features").out / case
    for name in ("plain", "compressed"):
        path = str(home / name / "pytorch_model.bin")
        _python(f"import sys; sys.modules['ds_nvcomp'] = None; import torch; assert torch.load({path!r})",
                TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    loaded = [torch.load(home / name / "pytorch_model.bin") for name in ("compressed", "plain")]
    assert loaded[0] and not bits.differences(*loaded)


@pytest.mark.parametrize("case", ["zero2_bf16", "zero3_bf16", "zero1_fp32"])
def test_zero_to_fp32(launched, tmp_path, case):
    """DeepSpeed's converter, copied into every checkpoint folder, reads ours without knowing, autoloading or not."""
    group = launched("zero_" + case.split("_")[1])
    group.check(case)
    found = []
    for name in ("plain", "compressed"):
        home = group.out / case / name
        # Its command line shards through huggingface_hub; the function under it, in one file, needs DeepSpeed only.
        out = _python(f"import sys; sys.path.insert(0, {str(home)!r}); import zero_to_fp32; "
                      f"zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict({str(home)!r}, {str(tmp_path / name)!r}, "
                      "max_shard_size=None); "
                      "print('FROM', zero_to_fp32.__file__)", DS_NVCOMP_AUTOLOAD="0")
        assert f"FROM {home}" in out
        [path] = (tmp_path / name).rglob("*.bin")
        links = [row.storage.encoding.link for path in home.rglob("*optim_states.pt") for row in scan(path).rows if row.storage.encoding]
        assert any(links) == (name == "compressed" and case == "zero2_bf16")
        found.append(torch.load(path))
    assert "embed.weight" in found[0] and not bits.differences(*found)


def test_universal_checkpoint_with_other_ranks(launched, tmp_path):
    """ds_to_universal makes the same of both, and one rank and four go on with what two saved in the same way."""
    group = launched("universal")
    for stage in (1, 2, 3):
        group.check(f"universal_zero{stage}")
        homes = [group.out / f"universal_zero{stage}" / name for name in ("plain", "compressed")]
        converters = [subprocess.Popen(
            [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(home / TAG), "--output_folder",
             str(home / f"{TAG}_universal"), "--num_extract_workers", "1", "--num_merge_workers", "1",
             "--inject_missing_state"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=environment(DS_NVCOMP_AUTOLOAD="0")) for home in homes]
        for home, converter in zip(homes, converters):
            out, _ = converter.communicate(timeout=300)
            assert converter.returncode == 0, out
            (home / "latest_universal").write_text(f"{TAG}_universal")
        plain, ours = (home / f"{TAG}_universal" for home in homes)
        assert list(ours.rglob("exp_avg.pt")), "nothing was converted"
        found = bits.compare_directories(ours, plain)
        assert not found, found[:5]
    for ranks in (1, 4):
        loaded = Group("universal_load", tmp_path / str(ranks), ranks, CASE_DIRECTORY=group.out).wait()
        for stage in (1, 2, 3):
            loaded.check(f"universal_load_zero{stage}")


def test_killed_while_saving(tmp_path):
    """SIGKILL to all ranks in the middle of a save: the last checkpoint is current, resumes, and the next save cleans up."""
    group = Group("hang", tmp_path / "first")
    end = time.monotonic() + 120
    hanging = tmp_path / "first" / "hanging"
    while not hanging.exists() and time.monotonic() < end and not any(process.poll() for process in group.processes):
        time.sleep(0.02)
    time.sleep(0.3)  # rank 0 has written its files by now and waits
    group.kill()
    home = tmp_path / "first" / "killed_while_saving"
    assert hanging.exists(), group.log(1)
    assert (home / "latest").read_text() == "global_step1" and not (home / "global_step2").exists()
    assert list(home.glob(".global_step2*")), "the interrupted save left nothing, so this test shows nothing"
    Group("after_hang", tmp_path / "second", CASE_DIRECTORY=home).wait().check("resumed_after_kill")


def test_scripts_need_no_import():
    """The worker switches ds_nvcomp on by the configuration alone: it imports it only inside cases that test its own names."""
    lines = WORKER.read_text().splitlines()
    assert not [line for line in lines if line.startswith(("import ds_nvcomp", "from ds_nvcomp"))]
    assert "ds_nvcomp" not in (ROOT / "ds_nvcomp" / "demo" / "train.py").read_text()
    assert os.environ.get("DS_NVCOMP_AUTOLOAD", "1") == "1"
