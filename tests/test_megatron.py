"""Megatron: the launch argument, the patches, and checkpoints of megatron-core compared by bits.

What is above `Real` needs no Megatron: modules of its names stand in for it.
"""
from __future__ import annotations

import argparse
import inspect
import io
import json
import operator
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import types
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

import ds_nvcomp
import megatron_patch
from ds_nvcomp.archive.items import Item
from ds_nvcomp.config import Config, key
from ds_nvcomp.errors import ChecksumError, ConfigError, UnsupportedSetupError
from megatron_patch import arguments, compat, torch_dist, torch_save

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "tests" / "megatron_workers" / "worker.py"
OPTIONS = ["codec", *(key(spec) for spec in arguments.options())]


def preload_tensors(write_buckets, non_blocking=True):
    return write_buckets


def module_with(monkeypatch, name, staging=preload_tensors, **attributes):
    """A module of that name with a FileSystemWriterAsync, in place for one test."""
    class FileSystemWriterAsync:
        pass
    FileSystemWriterAsync.preload_tensors = staticmethod(staging)
    module = types.ModuleType(name)
    module.FileSystemWriterAsync = FileSystemWriterAsync
    monkeypatch.setitem(sys.modules, name, module)
    return FileSystemWriterAsync


@pytest.fixture
def writer(monkeypatch):
    """Megatron's writer, as far as we need it. Nothing is patched when the test is over."""
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    yield module_with(monkeypatch, compat.MCORE_WRITER)
    megatron_patch.revert()


def changed():
    """What the patches change, other than the writer."""
    return torch.save, dcp.FileSystemWriter


# ---------------------------------------------------------------------------------------------------------------------- the argument
@pytest.fixture
def parser(writer):
    found = argparse.ArgumentParser(prog="pretrain_gpt.py", exit_on_error=True)
    found.add_argument("--hidden-size", type=int)
    arguments.add(found)
    return found


def in_force():
    return torch.save.__module__ == torch_save.__name__ or hasattr(torch.save, "__wrapped__")


def test_argument_is_off_by_default(parser):
    found = parser.parse_args(["--hidden-size", "8"])
    assert found.nvcomp_checkpoint == "off" and not in_force()


@pytest.mark.parametrize("given, codec", [
    (["--nvcomp-checkpoint"], "deflate"), (["--nvcomp-checkpoint", "zstd"], "zstd"), (["--nvcomp-checkpoint=auto"], "auto"),
    (["--nvcomp-checkpoint", "--hidden-size", "8"], "deflate"), (["--nvcomp-checkpoint", "none"], "none")])
def test_argument_chooses_the_codec(parser, writer, given, codec):
    assert parser.parse_args(given).nvcomp_checkpoint == codec
    assert in_force() and writer.preload_tensors.args[0] == Config(codec=codec)


def test_options_count_before_and_after_the_codec(parser, writer):
    given = "--nvcomp-checkpoint-threads 2 --nvcomp-checkpoint lz4 --nvcomp-checkpoint-min-bytes 7 --nvcomp-checkpoint-fsync false"
    parser.parse_args(given.split())
    assert writer.preload_tensors.args[0] == Config(codec="lz4", threads=2, min_bytes=7, fsync=False)


def test_options_alone_change_nothing(parser):
    parser.parse_args(["--nvcomp-checkpoint-threads", "2"])
    assert not in_force()


def test_off_after_on_reverts(parser, writer):
    before = changed(), writer.__dict__["preload_tensors"]
    parser.parse_args(["--nvcomp-checkpoint"])
    assert in_force()
    parser.parse_args(["--nvcomp-checkpoint", "off"])
    assert (changed(), writer.__dict__["preload_tensors"]) == before


def test_namespace_has_plain_values(parser):
    """Megatron saves it in the checkpoint, and reads it back with weights_only=True."""
    found = vars(parser.parse_args("--nvcomp-checkpoint zstd --nvcomp-checkpoint-gpu-memory 67108864 --nvcomp-checkpoint-verify none".split()))
    ours = {name: value for name, value in found.items() if name.startswith("nvcomp")}
    assert len(ours) == len(OPTIONS) and {type(value) for value in ours.values()} <= {str, int, bool}
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == ours


@pytest.mark.parametrize("given, names", [
    ("--nvcomp-checkpoint zip", ["--nvcomp-checkpoint", "'zip'", "deflate"]),
    ("--nvcomp-checkpoint-device tpu", ["-device", "'tpu'", "gpu"]),
    ("--nvcomp-checkpoint-verify yes", ["-verify", "'yes'", "encode"]),
    ("--nvcomp-checkpoint-threads -1", ["-threads", "-1", "least allowed"]),
    ("--nvcomp-checkpoint-threads many", ["-threads", "'many'", "int"]),
    ("--nvcomp-checkpoint-chunk-bytes 5000", ["-chunk-bytes", "5000", "power of two"]),
    ("--nvcomp-checkpoint-gpu-memory 1", ["-gpu-memory", "least allowed"]),
    ("--nvcomp-checkpoint-write-threads 0", ["-write-threads", "least allowed"]),
    ("--nvcomp-checkpoint-min-bytes -4", ["-min-bytes", "-4", "least allowed"]),
    ("--nvcomp-checkpoint-fsync perhaps", ["-fsync", "true or false", "'perhaps'"]),
    ("--nvcomp-checkpoint --nvcomp-checkpoint-threads -1", ["-threads", "-1"])])
def test_wrong_values_are_the_parsers_errors(parser, capsys, given, names):
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(given.split())
    said = capsys.readouterr().err
    assert exit.value.code == 2 and "pretrain_gpt.py: error: argument" in said and all(name in said for name in names)
    assert not in_force() or "threads" in given  # the codec alone was right


def test_every_wrong_value_has_been_tried():
    """A key that is added to the configuration is an argument at once, and wants a line above."""
    tried = inspect.getsource(sys.modules[__name__]).split("def test_wrong_values")[0]
    assert all(f"--nvcomp-checkpoint-{name.replace('_', '-')} " in tried for name in OPTIONS[1:])


def test_a_megatron_that_does_not_fit_is_the_parsers_error(parser, monkeypatch, capsys):
    module_with(monkeypatch, compat.MCORE_WRITER, staging=lambda buckets: buckets)
    with pytest.raises(SystemExit):
        parser.parse_args(["--nvcomp-checkpoint"])
    assert "preload_tensors takes ['buckets']" in capsys.readouterr().err and not in_force()


def test_help_has_the_arguments(parser):
    said = parser.format_help()
    assert "ds_nvcomp:" in said and "--nvcomp-checkpoint " in said
    assert all(f"--nvcomp-checkpoint-{name.replace('_', '-')}" in said for name in OPTIONS[1:])


def test_module_is_wrapped_once(writer):
    module = types.ModuleType("megatron.training.arguments")
    module.add_megatron_arguments = lambda parser: parser
    arguments.wrap(module)
    once = module.add_megatron_arguments
    arguments.wrap(module)
    assert module.add_megatron_arguments is once
    parser = argparse.ArgumentParser()
    assert once(parser) is parser and parser.parse_args([]).nvcomp_checkpoint == "off"  # a second addition would be a conflict


# ---------------------------------------------------------------------------------------------------------------------- apply, revert
def test_revert_restores_the_very_same_objects(writer):
    before = changed(), writer.__dict__["preload_tensors"]
    megatron_patch.apply()
    first = changed(), writer.__dict__["preload_tensors"]
    megatron_patch.apply()
    assert (changed(), writer.__dict__["preload_tensors"]) == first and first[0] != before[0]
    megatron_patch.apply({"codec": "zstd"})
    assert writer.preload_tensors.args[0].codec == "zstd"
    megatron_patch.revert()
    assert all(a is b for a, b in zip(changed(), before[0])) and writer.__dict__["preload_tensors"] is before[1]
    megatron_patch.revert()


def test_nvrx_is_patched_as_well(writer, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", types.ModuleType("nvidia_resiliency_ext"))
    other = module_with(monkeypatch, compat.NVRX_WRITER)
    megatron_patch.apply()
    assert writer.preload_tensors.func is other.preload_tensors.func is torch_dist.preload
    megatron_patch.revert()
    assert writer.preload_tensors is other.preload_tensors is preload_tensors


@pytest.mark.parametrize("where", [compat.MCORE_WRITER, compat.NVRX_WRITER])
@pytest.mark.parametrize("staging", [lambda write_buckets: 0, lambda write_buckets, non_blocking=True, cache=None: 0, None])
def test_an_unexpected_megatron_changes_nothing(writer, monkeypatch, where, staging):
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", types.ModuleType("nvidia_resiliency_ext"))
    module_with(monkeypatch, compat.NVRX_WRITER)
    unexpected = module_with(monkeypatch, where, staging)
    if staging is None:
        del unexpected.preload_tensors
    before = changed(), writer.__dict__["preload_tensors"], unexpected.__dict__.get("preload_tensors")
    with pytest.raises(UnsupportedSetupError, match="preload_tensors.*Tested with.*--nvcomp-checkpoint off"):
        megatron_patch.apply()
    assert (changed(), writer.__dict__["preload_tensors"], unexpected.__dict__.get("preload_tensors")) == before


def test_no_megatron_is_an_error(writer, monkeypatch):
    monkeypatch.setitem(sys.modules, compat.MCORE_WRITER, None)
    with pytest.raises(UnsupportedSetupError, match="has no FileSystemWriterAsync"):
        megatron_patch.apply()
    assert not in_force()


@pytest.mark.parametrize("block", [{"async": True}, {"overlap": True}, {"codec": "zip"}, {"codex": "deflate"}])
def test_configurations_that_are_not_megatrons(writer, block):
    with pytest.raises(ConfigError):
        megatron_patch.apply(block)
    assert not in_force()


def test_a_later_configuration_that_is_wrong_leaves_the_one_in_force(writer):
    megatron_patch.apply({"codec": "zstd"})
    with pytest.raises(ConfigError):
        megatron_patch.apply({"async": True})
    assert writer.preload_tensors.args[0].codec == "zstd"


def test_dcp_writer_is_ours_and_takes_torchs_arguments(writer, tmp_path):
    megatron_patch.apply({"codec": "zstd"})
    made = dcp.FileSystemWriter(tmp_path, thread_count=3)
    assert isinstance(made, ds_nvcomp.dcp.NvcompWriter) and made.config.codec == "zstd" and made.thread_count == 3
    assert "sync_files" in inspect.signature(dcp.FileSystemWriter).parameters


# ---------------------------------------------------------------------------------------------------------------------- torch.save
MEGATRONS = ["model_optim_rng.pt", "distrib_optim.pt", "layer_wise_optimizer_12.pt", "iter_0000005_3_local.pt", "iter_0000005_3_local.dirty.pt"]
OTHERS = ["model.pt", "mp_rank_00.pth", "train_dataloader_dprank000.pt", "common.pt", "model_optim_rng.pt.part", "xmodel_optim_rng.pt"]


def large():
    return {"weight": (torch.randn(40_000) * 0.02).bfloat16(), "iteration": 3}


@pytest.mark.parametrize("name", MEGATRONS)
@pytest.mark.parametrize("kind", ["text", "path", "open"])
def test_megatrons_files_are_compressed(writer, tmp_path, name, kind):
    path, obj = tmp_path / name, large()
    megatron_patch.apply()
    if kind == "open":
        with open(path, "wb") as file:
            torch.save(obj, file)
    else:
        torch.save(obj, str(path) if kind == "text" else path)
    assert path.stat().st_size < 75_000
    assert torch.equal(torch.load(path, weights_only=True)["weight"].view(torch.int16), obj["weight"].view(torch.int16))


@pytest.mark.parametrize("name", OTHERS)
def test_other_files_are_torchs_byte_for_byte(writer, tmp_path, name):
    obj, plain = large(), torch.save
    (tmp_path / "plain").mkdir()
    plain(obj, tmp_path / "plain" / name)
    megatron_patch.apply()
    torch.save(obj, tmp_path / name)
    assert (tmp_path / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_memory_is_torchs_byte_for_byte(writer):
    obj, ours, plain = large(), io.BytesIO(), io.BytesIO()
    torch.save(obj, plain)
    megatron_patch.apply()
    torch.save(obj, ours)
    assert ours.getvalue() == plain.getvalue()
    assert not torch_save.is_megatrons(ours) and not torch_save.is_megatrons(types.SimpleNamespace(name=3))  # a descriptor


def test_an_anonymous_file_is_torchs(writer, tmp_path):
    megatron_patch.apply()
    with os.fdopen(os.open(tmp_path / "x", os.O_CREAT | os.O_RDWR), "wb") as file:
        torch.save(large(), file)
    assert (tmp_path / "x").stat().st_size > 80_000


@pytest.mark.parametrize("given", [dict(_use_new_zipfile_serialization=False), dict(pickle_module="another"), dict(_disable_byteorder_record=True),
                                   dict(pickle_protocol=4)])
def test_arguments_are_passed_on(writer, tmp_path, monkeypatch, given):
    seen = []
    monkeypatch.setattr(torch, "save", lambda *args: seen.append(args))
    monkeypatch.setattr(ds_nvcomp, "save", lambda obj, f, config, **kwargs: seen.append(kwargs))
    megatron_patch.apply()
    torch.save(3, tmp_path / "other.pt", **given)
    assert len(seen[0]) == 6 and list(given.values())[0] in seen[0]
    torch.save(3, tmp_path / "distrib_optim.pt", **given)
    assert seen[1] == given if "pickle_protocol" in given else "_disable_byteorder_record" in given or seen[1][:2] == seen[0][:1] + seen[1][1:2]
    megatron_patch.revert()


def test_a_failed_save_leaves_the_previous_file(writer, tmp_path):
    path = tmp_path / "model_optim_rng.pt"
    megatron_patch.apply()
    torch.save(large(), path)
    before = path.read_bytes()
    with pytest.raises(Exception, match="local object|pickle|lambda"):
        torch.save({**large(), "no": lambda: 0}, path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


# ---------------------------------------------------------------------------------------------------------------------- preload
def written(name, kind=WriteItemType.TENSOR):
    return WriteItem(index=MetadataIndex(name), type=kind)


def saved(obj):
    file = io.BytesIO()
    torch.save(obj, file)
    return file


def buckets(tmp_path):
    tensors = [(written(f"tensor {i}"), (torch.randn(50_000) * 0.02).bfloat16()) for i in range(3)]
    small, optimizer = saved({"rng": 5}), saved({"exp_avg": torch.randn(100_000) * 0.02})
    text = io.BytesIO(b"no torch file")
    byte_items = [(written(name, WriteItemType.BYTE_IO), data) for name, data in (("small", small), ("optimizer", optimizer), ("text", text))]
    return [(tmp_path / "__0_0.distcp", "__0_0.distcp", (byte_items, tensors[:2])), (tmp_path / "__0_1.distcp", "__0_1.distcp", ([], tensors[2:])),
            (tmp_path / "__0_2.distcp", "__0_2.distcp", ([], []))]


@pytest.mark.parametrize("forks", [False, True])
@pytest.mark.parametrize("codec", ["deflate", "auto", "none"])
def test_preload_makes_bytes_of_everything(tmp_path, forks, codec):
    given = buckets(tmp_path)
    found = torch_dist.preload(Config(codec=codec), forks, given, non_blocking=True)
    assert [bucket[:2] for bucket in found] == [bucket[:2] for bucket in given] and all(tensors == [] for _, _, (_, tensors) in found)
    for (_, _, (ours, _)), (_, _, (byte_items, tensors)) in zip(found, given):
        assert [item.index for item, _ in ours] == [item.index for item, _ in byte_items + tensors]
        assert {item.type for item, _ in ours} <= {WriteItemType.BYTE_IO}
        for (_, data), (item, before) in zip(ours, byte_items + tensors):
            if item.index.fqn == "text":
                assert data is before
                continue
            assert isinstance(data, Item) and data._whole is not None  # in ordinary memory, for whoever writes it
            back = torch.load(io.BytesIO(data.getbuffer()), weights_only=True)
            before = torch.load(io.BytesIO(before.getbuffer())) if isinstance(before, io.BytesIO) else before
            if item.index.fqn == "small":
                assert back == before and data.getvalue().count(b"check_seal")
            elif isinstance(back, dict):
                assert torch.equal(back["exp_avg"], before["exp_avg"])
            else:
                assert torch.equal(back.view(torch.int16), before.view(torch.int16))
    assert torch_dist.preload(Config(), forks, []) == []


def test_a_damaged_item_says_which_it_is(tmp_path):
    (_, _, (byte_items, _)), *_ = torch_dist.preload(Config(min_bytes=0), False, buckets(tmp_path))
    found = {item.index.fqn: bytearray(data.getbuffer()) for item, data in byte_items}
    for name, tensor in (("tensor 1", "tensor 1"), ("optimizer", "optimizer.exp_avg")):
        found[name][len(found[name]) // 2] ^= 1
        with pytest.raises(ChecksumError, match=f"tensor '{tensor}'"):
            torch.load(io.BytesIO(found[name]), weights_only=True)


def test_preload_keeps_metadata_of_items(tmp_path):
    """`.metadata` is made from the plan, which is not touched: Megatron's own write items are as they were."""
    given = buckets(tmp_path)
    torch_dist.preload(Config(), False, given)
    assert given[0][2][1][0][0].type == WriteItemType.TENSOR


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_item_reaches_another_process(method):
    item = Item(lambda: [b"abc", memoryview(bytes(100_000)), b"xyz"])
    with mp.get_context(method).Pool(1) as pool:
        assert pool.apply(operator.methodcaller("getvalue"), (item,)) == b"abc" + bytes(100_000) + b"xyz"
    assert item.nbytes == 100_006


# ---------------------------------------------------------------------------------------------------------------------- the import hook
HEAVY = "[name for name in sys.modules if name.startswith(('ds_nvcomp.archive', 'ds_nvcomp.pipeline', 'megatron_patch.patches', 'deepspeed.'))]"
FAKE = """
    def add_megatron_arguments(parser):
        parser.add_argument("--hidden-size", type=int, default=8)
        return parser

    def parse_args():
        import argparse
        return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args()
"""
needs_installation = pytest.mark.skipif(not any(point.name == "ds_nvcomp" for point in entry_points(group="torch.backends")),
                                        reason="the entry point needs an installed package: pip install -e .")


@pytest.fixture
def python(tmp_path):
    """python(code, *arguments) -> what a script with a Megatron of its own says."""
    package = tmp_path / "lib" / "megatron" / "training"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "arguments.py").write_text(textwrap.dedent(FAKE))

    def run(code, *args, module=(), fails=False, **env):
        script = tmp_path / "pretrain.py"
        script.write_text(textwrap.dedent(code))
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path / 'lib'}{os.pathsep}{ROOT}", "PYTHONWARNINGS": "ignore", **env}
        done = subprocess.run([sys.executable, *module, str(script), *args], env=environment, text=True, capture_output=True, timeout=120)
        assert (done.returncode != 0) == fails, done.stderr[-3000:]
        return done.stderr if fails else done.stdout.strip()
    return run


@needs_installation
def test_hook_after_torch_and_after_a_look(python):
    """find_spec alone does not use the hook up; without the argument nothing heavy is imported; the module looks as if found by Python."""
    assert python(f"""
        import importlib.util, inspect, sys, torch
        importlib.util.find_spec("megatron.training.arguments")
        import megatron.training.arguments as arguments
        print(arguments.parse_args().nvcomp_checkpoint, {HEAVY})
        print(type(arguments.__loader__).__name__, "add_megatron_arguments" in inspect.getsource(arguments))
        """) == "off []\nSourceFileLoader True"


@needs_installation
def test_hook_before_torch(python):
    assert python("""
        from megatron.training.arguments import parse_args
        import torch
        print(parse_args().nvcomp_checkpoint_device)
        """) == "auto"


@needs_installation
def test_switched_off(python):
    said = python("""
        import torch
        from megatron.training.arguments import parse_args
        parse_args()
        """, "--nvcomp-checkpoint", fails=True, DS_NVCOMP_AUTOLOAD="0")
    assert "unrecognized arguments: --nvcomp-checkpoint" in said


def test_wrapper_runs_a_script_as_itself(python):
    """Its own __main__, file, arguments and annotations; children that are spawned find its functions, and run nothing twice."""
    assert python("""
        import inspect, multiprocessing, sys
        from megatron.training.arguments import parse_args

        def typed(number: int):
            return (number, __name__, __file__.endswith("pretrain.py"))

        if __name__ == "__main__":
            print(parse_args().nvcomp_checkpoint, sys.argv[1:], inspect.signature(typed).parameters["number"].annotation is int)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.apply(typed, (3,)), typed(3), inspect.getsource(typed).count("typed"))
        """, "--nvcomp-checkpoint", "off", module=("-m", "megatron_patch"), DS_NVCOMP_AUTOLOAD="0") == (
            "off ['--nvcomp-checkpoint', 'off'] True\n(3, '__mp_main__', True) (3, '__main__', True) 1")


# ---------------------------------------------------------------------------------------------------------------------- Real megatron-core
def core() -> str | None:
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


needs_core = pytest.mark.skipif(core() is None, reason="pip install --no-deps megatron-core==0.16.1 (for Python < 3.12; or a later one)")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def job(root: Path, name: str, ranks: int, *steps, dies=False) -> list[list[str]]:
    """Have `ranks` processes do the steps; what each says of each."""
    path, port = root / f"{name}.json", free_port()
    path.write_text(json.dumps(steps))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    workers = [subprocess.Popen([sys.executable, str(WORKER), str(rank), str(ranks), str(port), str(path)], env=environment,
                                start_new_session=True, stdout=open(f"{path}.{rank}.log", "w"), stderr=subprocess.STDOUT) for rank in range(ranks)]
    try:
        for worker in workers:
            worker.wait(120)
    finally:
        for worker in workers:
            try:
                os.killpg(worker.pid, signal.SIGKILL)  # with what it has forked and spawned
            except ProcessLookupError:
                pass
    logs = "".join(Path(f"{path}.{rank}.log").read_text()[-3000:] for rank in range(ranks))
    if dies:
        assert any(worker.returncode == -signal.SIGKILL for worker in workers) and all(worker.returncode for worker in workers), logs
        return []
    assert not any(worker.returncode for worker in workers), logs
    return [json.loads(Path(f"{path}.{rank}").read_text()) for rank in range(ranks)]


def flip(directory: Path, at: float | int) -> None:
    """One bit of the largest file of items, at a fraction of it."""
    path = max(directory.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 4
    path.write_bytes(data)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Directories by name, and what loading them said: {(directory, ranks, tensor parallelism): answers}."""
    root = tmp_path_factory.mktemp("megatron")
    said = {}

    def run(name, ranks, *steps):
        answers = job(root, name, ranks, *[(step[0], str(root / step[1]), *step[2:]) for step in steps])
        said.update({(step[1], ranks, step[-1]): [of_rank[i] for of_rank in answers] for i, step in enumerate(steps) if step[0] == "load"})

    run("one", 1, ("save", "plain1", None, 1), ("save", "deflate1", "deflate", 1), ("save", "zstd1", "zstd", 1))
    run("two", 2, ("save", "plain2", None, 2), ("save", "deflate2", "deflate", 2), ("save", "replicas2", "deflate", 1),
        *[("load", name, tp) for name in ("plain1", "deflate1", "zstd1", "plain2", "deflate2") for tp in (2, 1)], ("load", "replicas2", 1))
    mixed(root)
    places = [random.Random(5).random() for _ in range(8)]
    for i, place in enumerate(places):
        shutil.copytree(root / "deflate1", root / f"damaged{i}")
        flip(root / f"damaged{i}", place)
    job(root, "killed", 2, ("save", str(root / "before"), "deflate", 2), ("kill", str(root / "killed"), 1), dies=True)
    run("again", 1, *[("load", name, 1) for name in ("plain1", "deflate1", "zstd1", "plain2", "deflate2", "mixed2", "before", "killed",
                                                     *[f"damaged{i}" for i in range(len(places))])])
    return root, said


def mixed(root: Path) -> None:
    """Rank 0's files uncompressed, rank 1's compressed, as after a change of mind in the middle of nothing: metadata are joined by hand."""
    import pickle
    target = root / "mixed2"
    shutil.copytree(root / "plain2", target)
    for path in (root / "deflate2").glob("__1_*.distcp"):
        shutil.copy(path, target)
    plain, ours = (pickle.loads((root / name / ".metadata").read_bytes()) for name in ("plain2", "deflate2"))
    plain.storage_data.update({index: info for index, info in ours.storage_data.items() if info.relative_path.startswith("__1_")})
    (target / ".metadata").write_bytes(pickle.dumps(plain))


NAMES = ["weight", "exp_avg", "special"]  # of the larger file: more than 99 % of its bytes are theirs


def stored(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.distcp"))


@needs_core
@pytest.mark.parametrize("directory, ranks, tp", [
    *[(name, 1, 1) for name in ("plain1", "deflate1", "zstd1")], *[(name, 2, 2) for name in ("plain2", "deflate2")], ("replicas2", 2, 1),
    *[pytest.param(name, 2, tp, id=f"{name} 1 rank to 2, tp {tp}") for name in ("plain1", "deflate1", "zstd1") for tp in (1, 2)],
    *[pytest.param(name, ranks, 1, id=f"{name} tp 2 to 1, {ranks} ranks") for name in ("plain2", "deflate2") for ranks in (1, 2)],
    pytest.param("mixed2", 1, 1, id="mixed"), pytest.param("before", 1, 1, id="the one before a kill")])
def test_loads_bit_identical(checkpoints, directory, ranks, tp):
    assert checkpoints[1][directory, ranks, tp] == ["equal"] * ranks


@needs_core
@pytest.mark.parametrize("name", ["1", "2"])
def test_is_compressed_and_looks_the_same(checkpoints, name):
    root = checkpoints[0]
    plain, ours = root / f"plain{name}", root / f"deflate{name}"
    assert stored(ours) < 0.85 * stored(plain)
    assert sorted(path.name for path in plain.iterdir()) == sorted(path.name for path in ours.iterdir())


@needs_core
@pytest.mark.parametrize("number", range(8))
def test_damage_is_an_error_that_names_the_tensor(checkpoints, number):
    said, = checkpoints[1][f"damaged{number}", 1, 1]
    assert "CheckpointException" in said
    assert "ds_nvcomp.errors.ChecksumError" in said and any(f"tensor {name!r}" in said for name in NAMES), said


@needs_core
def test_a_kill_in_the_middle_leaves_no_checkpoint(checkpoints):
    root, said = checkpoints
    assert any((root / "killed").iterdir()) and not (root / "killed" / ".metadata").exists()
    assert "CheckpointingException" in said["killed", 1, 1][0]
