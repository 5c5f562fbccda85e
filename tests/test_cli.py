"""The command: exit statuses, one clean line for an error, and output that programs and people can read."""
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import ds_nvcomp
from ds_nvcomp.cli import app
from test_scan import Hostile, with_pickle

runner = CliRunner()


def run(*args):
    result = runner.invoke(app, [str(arg) for arg in args])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def assert_one_clean_error(result):
    assert result.exit_code == 1 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1 and "Traceback" not in result.stderr


@pytest.fixture
def path(tmp_path):
    torch.manual_seed(0)
    w = torch.randn(100, 500)
    ds_nvcomp.save({"w": w, "top": w[:10], "n": torch.arange(3)}, tmp_path / "x_states.pt")
    return tmp_path / "x_states.pt"


def test_help_teaches():
    text = run("--help").stdout
    for command in ("inspect", "verify", "pack", "unpack", "config", "bench", "demo"):
        assert command in text and "Examples" in text
        helped = run(command, "--help")
        assert helped.exit_code == 0 and "Example" in helped.stdout and f"ds-nvcomp {command}" in helped.stdout
    assert "executes the files' pickles" in run("pack", "--help").stdout
    assert run("-h").exit_code == 0


def test_version():
    assert run("--version").stdout == f"ds-nvcomp {ds_nvcomp.__version__}\n"


def test_it_is_light_to_start():
    code = "import sys, ds_nvcomp.cli; print([name for name in ('torch', 'cupy', 'numpy', 'deepspeed') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("args", [["inspect"], ["no-such-command"], ["pack", "x", "--codec", "lzw"],
                                  ["pack", "x", "--threads", "many"],
                                  ["verify", "a", "b"], ["verify", "a", "--fix"]])
def test_wrong_usage_is_2(args):
    assert run(*args).exit_code == 2


def test_inspect(path):
    text = run("inspect", path).stdout
    assert "100x500" in text and "split32" in text and "shares the storage of w" in text and "1 coded" in text
    assert f"written by ds_nvcomp {ds_nvcomp.__version__}" in text


def test_inspect_json(path):
    found = json.loads(run("inspect", path, "--json").stdout)
    w, top, n = found["tensors"]
    assert (w["name"], w["dtype"], w["shape"], w["codec"], w["chunks"], w["raw_bytes"]) == \
        ("w", "float32", [100, 500], "deflate", 1, 200_000)
    assert top["shares"] == "w" and top["raw_bytes"] == 0 and not n["compressed"]
    assert found["file_bytes"] == path.stat().st_size and found["raw_bytes"] == 200_024
    assert "ds_nvcomp.archive.unpack" in found["globals"]
    tree = json.loads(run("inspect", path.parent, "--json").stdout)
    assert [file["path"] for file in tree["files"]] == [str(path)] and 0 < tree["ratio"] < 1


def test_inspect_of_a_directory(path):
    torch.save({}, path.with_name("plain.pt"))
    text = run("inspect", path.parent).stdout
    assert "x_states.pt" in text and "deflate" in text and "not compressed" in text and "2 files" in text


def test_names_cannot_play_with_the_terminal(tmp_path):
    torch.save({"[red]w[/red]\x1b[2J\n": torch.ones(3)}, tmp_path / "x.pt")
    text = run("inspect", tmp_path / "x.pt").stdout
    assert "[red]w[/red]\\x1b[2J\\n" in text and "\x1b" not in text


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_a_hostile_pickle_does_not_run(tmp_path, command):
    import pickle
    path = with_pickle(tmp_path / "x.pt", pickle.dumps(Hostile(tmp_path / "executed"), 2))
    assert run(command, path).exit_code == 0 and not (tmp_path / "executed").exists()


def test_verify(path):
    result = run("verify", path)
    assert result.exit_code == 0 and result.stdout.startswith("OK: 1 file, ") and result.stdout.count("\n") == 1
    assert run("verify", path.parent, "--decode").exit_code == 0
    data = bytearray(path.read_bytes())
    data[5_000] ^= 1
    path.write_bytes(data)
    result = run("verify", path)
    assert result.exit_code == 1 and "tensor w, chunk 0: " in result.stdout and "2 problems in 1 file" in result.stdout
    found = json.loads(run("verify", path, "--json").stdout)
    assert not found["ok"] and found["problems"][0]["chunk"] == 0 and found["problems"][0]["kind"] == "ChecksumError"


def test_pack_and_unpack(tmp_path):
    src, packed, plain = (tmp_path / name for name in ("a.pt", "b.pt", "c.pt"))
    obj = {"w": torch.randn(50_000)}
    torch.save(obj, src)
    result = run("pack", src, packed, "--codec", "zstd", "--threads", 1, "--no-fsync", "--verify", "encode")
    assert result.exit_code == 0 and result.stdout.startswith("Packed 1 file, copied 0: ")
    assert json.loads(run("inspect", packed, "--json").stdout)["tensors"][0]["codec"] == "zstd"
    assert run("unpack", packed, plain, "--no-check").exit_code == 0
    assert torch.equal(torch.load(plain)["w"], obj["w"]) and plain.stat().st_size == src.stat().st_size
    assert run("pack", src).exit_code == 0 and src.stat().st_size < plain.stat().st_size


@pytest.mark.parametrize("args", [
    ["inspect", "missing.pt"], ["verify", "missing.pt"], ["pack", "missing.pt"], ["unpack", "missing.pt"],
    ["inspect", "text.pt"], ["inspect", "empty"], ["verify", "empty"], ["pack", "text.pt"], ["pack", "x_states.pt", "text.pt"],
    ["config", "missing.json"], ["pack", "x_states.pt", "--min-bytes", "-1"], ["pack", "x_states.pt", "--device", "gpu"],
    ["pack", "x_states.pt", "--codec", "ans"]])
def test_errors_are_one_clean_line(path, args, monkeypatch):
    if torch.cuda.is_available() and args[-1] in ("gpu", "ans"):
        pytest.skip("there is a GPU")
    monkeypatch.chdir(path.parent)
    (path.parent / "text.pt").write_text("text")
    (path.parent / "empty").mkdir()
    before = path.read_bytes()
    assert_one_clean_error(run(*args))
    assert path.read_bytes() == before


def test_config(tmp_path):
    assert json.loads(run("config").stdout)["nvcomp_checkpoint"]["codec"] == "deflate"
    text = run("config", "--explain").stdout
    assert "gpu_memory" in text and "536870912" in text and "deflate is readable anywhere" in text
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_batch_size": 1, "nvcomp_checkpoint": {"codec": "ans", "threads": 3}}))
    values = json.loads(run("config", file).stdout)["nvcomp_checkpoint"]
    assert (values["codec"], values["threads"], values["verify"]) == ("ans", 3, "auto")
    assert "value here" in run("config", file, "--explain").stdout


@pytest.mark.parametrize("text, says", [
    ('{"nvcomp_checkpoint": {"codex": "ans"}}', "Did you mean 'codec'?"),
    ('{"nvcomp_checkpoint": {"threads": "auto"}}', "auto"),
    ('{"nvcomp_checkpoint": 1}', "must be a JSON object"), ("{", "not JSON"), ("[]", "JSON object"),
    ('{"a": 1, "a": 2}', "twice")])
def test_a_wrong_configuration(tmp_path, text, says):
    (tmp_path / "ds.json").write_text(text)
    result = run("config", tmp_path / "ds.json")
    assert_one_clean_error(result)
    assert says in result.stderr and "ds.json" in result.stderr


def test_config_without_a_block(tmp_path):
    (tmp_path / "ds.json").write_text("{}")
    result = run("config", tmp_path / "ds.json")
    assert result.exit_code == 0 and "no \"nvcomp_checkpoint\" block" in result.stderr


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    import types
    calls = []
    module = types.ModuleType("ds_nvcomp.demo.main")
    module.run = lambda **kwargs: calls.append(kwargs) or 3
    monkeypatch.setitem(sys.modules, "ds_nvcomp.demo", types.ModuleType("ds_nvcomp.demo"))
    monkeypatch.setitem(sys.modules, "ds_nvcomp.demo.main", module)
    assert run("demo", "--out", tmp_path, "--steps", 15, "--device", "cpu", "--ranks", 1, "--keep").exit_code == 3
    assert calls == [dict(out=tmp_path, steps=15, device="cpu", ranks=1, keep=True)]


def test_as_a_process(path):
    def process(*args, **kwargs):
        return subprocess.run([sys.executable, "-c", "from ds_nvcomp.cli import main; main()", *map(str, args)],
                              capture_output=True, text=True, **kwargs)
    assert process("verify", path).returncode == 0
    wrong = process("verify", path.with_name("missing"))
    assert wrong.returncode == 1 and wrong.stderr.startswith("error: ") and wrong.stderr.count("\n") == 1
    assert process("pack").returncode == 2
