"""`ds-nvcomp bench`: what it measures, that nothing of it stays, and what it prints."""
import errno
import json
import os

import pytest
import torch
from typer.testing import CliRunner

from ds_nvcomp import bench, costs
from ds_nvcomp.archive import files
from ds_nvcomp.checkpoint import probe as probing
from ds_nvcomp.checkpoint.probe import probe
from ds_nvcomp.cli import app
from ds_nvcomp.config import CODECS, Config
from ds_nvcomp.encoding import codecs
from ds_nvcomp.errors import CodecUnavailableError, DecodeError, DirectoryError
from ds_nvcomp.pipeline import available, speeds

MIB = 1 << 20
CPU = torch.device("cpu")
runner = CliRunner()


def run(*args):
    result = runner.invoke(app, ["bench", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(speeds, "LEAST", 2 * MIB)
    monkeypatch.setattr(speeds, "MOST", 2 * MIB)
    monkeypatch.setattr(speeds, "RUNS", 1)
    monkeypatch.setattr(speeds, "A_RUN", 0)
    monkeypatch.setattr(probing, "FIRST", MIB)
    monkeypatch.setattr(probing, "SECONDS", 0)


# -- codecs -------------------------------------------------------------------------------------------------------------------

def test_every_codec_that_can_run_is_measured(quick):
    config = Config(device="cpu")
    rows = list(speeds.measure(speeds.settings(config, CPU), CPU, sample_bytes=2 * MIB))
    assert [row.codec for row in rows] == [name for name in CODECS if codecs.BY_NAME[name].cpu or name == "none"]
    for row in rows:
        assert row.encode > 0 and row.decode > 0 and row.chunk_bytes == 65536 and row.threads == 0
    ratios = {row.codec: row.ratio for row in rows}
    assert 0.78 < ratios["deflate"] < 0.83 and 0.99 < ratios["none"] < 1.001 and ratios["deflate"] < ratios["lz4"]


def test_a_codec_that_gives_back_other_bytes_is_found(monkeypatch, quick):
    monkeypatch.setattr(speeds, "_decoded", lambda payload: speeds.decode_payload(payload, speeds.parse_payload(payload)).add_(1))
    with pytest.raises(DecodeError, match="'zstd' did not give back"):
        list(speeds.measure([Config(codec="zstd")], CPU))


def test_settings(monkeypatch):
    monkeypatch.setattr(speeds, "count", lambda threads: 8)
    names = ("deflate", "ans", "none")
    here = Config(device="cpu")
    assert [(c.codec, c.threads) for c in speeds.settings(here, CPU, names, tuned=names)] == [("deflate", 0), ("deflate", 4), ("none", 0)]
    assert [c.threads for c in speeds.settings(Config(device="cpu", threads=3), CPU, names, tuned=names)] == [3, 3]
    monkeypatch.setattr(speeds, "gpu_missing", lambda: None)
    found = speeds.settings(Config(), torch.device("cuda"), names, tuned=["ans"])
    assert [(c.codec, c.chunk_bytes) for c in found] == [("deflate", 0), ("ans", 0), ("ans", 65536), ("none", 0)]
    found = speeds.settings(Config(chunk_bytes=4096), torch.device("cuda"), names, tuned=names)
    assert [(c.codec, c.chunk_bytes) for c in found] == [("deflate", 4096), ("ans", 4096), ("none", 4096)]


def test_a_codec_whose_library_is_missing_is_left_out(monkeypatch):
    real = codecs.cpu

    def cpu(codec):
        if codec.name == "zstd":
            raise CodecUnavailableError("pip install zstandard")
        return real(codec)
    monkeypatch.setattr(codecs, "cpu", cpu)
    assert [c.codec for c in speeds.settings(Config(device="cpu"), CPU, ("deflate", "zstd"))] == ["deflate"]


# -- the directory ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fsync", [True, False])
def test_probe_leaves_nothing(tmp_path, fsync):
    speed = probe(tmp_path, Config(fsync=fsync), most=20 * MIB)
    assert speed.write > 0 and speed.read > 0 and speed.fsync is fsync and speed.bytes in (16 * MIB, 20 * MIB)
    assert not list(tmp_path.iterdir())


def test_the_probe_s_file_is_hidden_and_random(tmp_path, monkeypatch):
    seen = []
    real = probing._read

    def read(path):
        seen.append((path.name, path.stat().st_size, path.read_bytes()))
        return real(path)
    monkeypatch.setattr(probing, "_read", read)
    probe(tmp_path, most=MIB + 3)
    (name, size, data), = seen
    assert name.startswith(".ds_nvcomp-") and size == MIB + 3
    assert len(speeds.codecs.cpu(codecs.BY_NAME["zstd"]).encode(data[:65536], exponents=False)) > 65000


def test_a_slow_target_is_not_written_for_long(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(probing, "_write", lambda path, nbytes, config: written.append(nbytes) or path.touch() or 0.2)
    assert probe(tmp_path, seconds=0.5).bytes == 16 * MIB
    written.clear()
    monkeypatch.setattr(probing, "_write", lambda path, nbytes, config: written.append(nbytes) or path.touch() or 0.001)
    assert probe(tmp_path, seconds=10).bytes == 256 * MIB
    assert written == [16 * MIB, 64 * MIB, 256 * MIB]


@pytest.mark.parametrize("where", ["write", "read", "interrupt"])
def test_probe_cleans_up_on_failure(tmp_path, monkeypatch, where):
    failure = KeyboardInterrupt() if where == "interrupt" else OSError(errno.EIO, "gone")

    def fails(*args, **kwargs):
        assert list(tmp_path.iterdir())  # there is something to clean up
        raise failure
    if where == "read":
        monkeypatch.setattr(probing, "_read", fails)
    else:
        monkeypatch.setattr(files.Writer, "write_at", fails)
    with pytest.raises(type(failure)):
        probe(tmp_path, most=MIB)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_found_before_it_is_written(tmp_path, monkeypatch):
    real = os.statvfs(tmp_path)
    monkeypatch.setattr(probing.os, "statvfs", lambda path: type("S", (), dict(f_bavail=5, f_frsize=real.f_frsize)))
    monkeypatch.setattr(files.Writer, "__enter__", lambda self: pytest.fail("it was opened"))
    with pytest.raises(DirectoryError, match=f"{5 * real.f_frsize} bytes free.* takes {MIB} .*Make room") as caught:
        probe(tmp_path, most=MIB)
    assert caught.value.path == str(tmp_path) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_directory(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="no such directory") as caught:
        probe(tmp_path / name)
    assert caught.value.path == str(tmp_path / name)


# -- "auto" where there is nothing to choose for -------------------------------------------------------------------------------

def test_auto_is_a_codec_of_the_configuration():
    assert "auto" not in CODECS and Config(codec="auto").codec == "auto"
    assert Config(codec="auto", threads=2).concrete == Config(codec="deflate", threads=2)
    assert Config(codec="zstd").concrete == Config(codec="zstd")


# -- the command --------------------------------------------------------------------------------------------------------------

def test_the_table_and_the_recommendation(quick, tmp_path):
    text = run(tmp_path, "--device", "cpu").stdout
    assert text.startswith("CPU, ") and all(f"\n{name} " in text for name in ("deflate", "zstd", "lz4", "snappy", "none"))
    assert "ratio  encode GB/s  decode GB/s" in text and f"{tmp_path}: writes " in text and "\nrecommended: " in text
    assert not list(tmp_path.iterdir())
    text = run("--device", "cpu").stdout
    assert "deflate" in text and "recommended" not in text


def test_json(quick, tmp_path):
    found = json.loads(run(tmp_path, "--device", "cpu", "--json", "--async", "--no-fsync").stdout)["measured"]
    assert {row["codec"] for row in found["codecs"]} == {"deflate", "zstd", "lz4", "snappy", "none"}
    assert found["path"]["path"] == str(tmp_path) and found["path"]["fsync"] is False and found["path"]["write"] > 0
    assert found["copy_to_host"] is None and "(async saves)" in found["recommendation"]["reason"]
    assert set(found["recommendation"]) == {"codec", "chunk_bytes", "threads", "reason"}
    assert json.loads(run("--device", "cpu", "--json").stdout)["measured"]["recommendation"] is None


JOB = ["--params", "70e9", "--gpus", 128, "--gpu-hour", "4.40", "--interval", "30m", "--bandwidth", 5]


def test_the_cost_model_measures_nothing(monkeypatch):
    monkeypatch.setattr(bench, "run", lambda *args: pytest.fail("it measured"))
    text = run(*JOB).stdout
    assert "A checkpoint of 980 GB by 128 GPUs every 1800 s" in text and "ratio 0.81, as measured on a whole ZeRO-2" in text
    assert "196.0" in text and "44,155" in text and "compressed, async" in text
    found = json.loads(run(*JOB, "--json", "--bytes-per-param", 12).stdout)
    assert set(found) == {"job", "figures", "costs"} and found["job"]["checkpoint"] == pytest.approx(840)
    assert [way["way"] for way in found["costs"]] == ["uncompressed, sync", "compressed, sync", "compressed, async"]


def test_the_specification_s_figures_by_the_command():
    found = json.loads(run("--params", 782e9 / 14, "--gpus", 8, "--bandwidth", 5, "--json").stdout)["costs"]
    assert found[0]["save_seconds"] == pytest.approx(156.4) and found[0]["money"] == pytest.approx(2202, abs=1)


def test_what_was_measured_is_reckoned_with(quick, tmp_path):
    found = json.loads(run(tmp_path, "--device", "cpu", *JOB, "--json").stdout)
    # A GPU's share of 5 GB/s is 0.04: what the directory itself takes does not matter, and every byte does.
    assert found["measured"]["recommendation"]["codec"] == "deflate"
    ratio = next(row["ratio"] for row in found["measured"]["codecs"] if row["codec"] == "deflate")
    assert found["figures"] == {"ratio": ratio, "snapshot": costs.SNAPSHOT}
    assert found["costs"][1]["save_seconds"] == pytest.approx(980 * ratio / 5)
    assert "measured here" in run(tmp_path, "--device", "cpu", *JOB).stdout


def test_on_a_gpu_its_speed_is_reckoned_with(monkeypatch, tmp_path):
    speed = speeds.Speed("deflate", 65536, 0, 0.8, 50.0, 35.0)
    found = bench.Bench("a GPU", True, [speed], 55.0, probing.DiskSpeed(1, 1, 1, True), bench.Choice(speed, 1, 1, "why"))
    monkeypatch.setattr(bench, "run", lambda *args, **kwargs: found)
    assert json.loads(run(tmp_path, *JOB, "--json").stdout)["figures"] == {"ratio": 0.8, "snapshot": 50.0}
    text = run(tmp_path, *JOB).stdout
    assert "copies to the host 55 GB/s" in text and "threads" not in text and "recommended: why" in text


@pytest.mark.parametrize("args, says", [
    (["--params", "70e9"], "--gpus and --bandwidth"), (["--gpus", 8], "--params"), (["--bandwidth", 8], "--params"),
    ([*JOB, "--interval", "30"], "30m"), ([*JOB, "--interval", "0s"], "longer than 0 s"), (["--params", "many"], "as a number")])
def test_wrong_usage(args, says):
    result = run(*args)
    assert result.exit_code == 2 and says in " ".join(result.stderr.replace("│", "").split())


@pytest.mark.parametrize("args", [[*JOB, "--gpus", 0], [*JOB, "--bandwidth", "nan"], ["/no/such/directory"]])
def test_errors_are_one_clean_line(args):
    result = run(*args)
    assert result.exit_code == 1 and result.stdout == "" and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_a_gpu_that_is_not_there():
    if available.gpu_missing() is None:
        pytest.skip("there is a GPU")
    assert "device is 'gpu', but" in run("--device", "gpu").stderr


def test_help_teaches():
    text = run("--help").stdout
    assert "Examples" in text and "ds-nvcomp bench --params 70e9" in text and "Cost model" in text
