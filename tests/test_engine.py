"""The engine by itself, in one process, as DeepSpeed calls it."""
import contextlib
import copy
import os
import threading
import zipfile

import pytest
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

import ds_nvcomp
from ds_nvcomp.archive import files
from ds_nvcomp.archive.scan import scan
from ds_nvcomp.archive.writer import snapshot, snapshot_later
from ds_nvcomp.checkpoint.commit import Commit
from ds_nvcomp.checkpoint.verify import verify_tree
from ds_nvcomp.config import Config
from ds_nvcomp.deepspeed_engine import NvcompCheckpointEngine
from ds_nvcomp.errors import CommitError, EncodeError

NAME = "zero_pp_rank_0_mp_rank_00_optim_states.pt"


def save_checkpoint(engine, save_dir, state, tag="global_step1"):
    info = CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=True)
    engine.create(info)
    engine.makedirs(str(save_dir / tag), exist_ok=True)
    engine.save(state, str(save_dir / tag / NAME))
    engine.save_latest = tag
    engine.commit(info)


def save_16bit_model(engine, save_dir, state, tag="global_step1"):
    info = CheckpointCommitInfo(tag=tag, save_dir=str(save_dir), save_latest=False)
    engine.create(info)
    engine.makedirs(str(save_dir), exist_ok=True)
    engine.save(state, str(save_dir / "pytorch_model.bin"))
    engine.commit(info)


def test_a_model_saved_beside_a_checkpoint_leaves_it_alone(tmp_path):
    """save_16bit_model begins a checkpoint of the current step's name and writes none of its files: it once replaced the one there."""
    engine, state = NvcompCheckpointEngine(), {"w": torch.randn(5000)}
    save_checkpoint(engine, tmp_path, state)
    save_16bit_model(engine, tmp_path, {"w": torch.ones(10)})
    assert torch.equal(engine.load(str(tmp_path / "global_step1" / NAME))["w"], state["w"])
    assert (tmp_path / "latest").read_text() == "global_step1" and verify_tree(tmp_path) == []
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["w"], torch.ones(10))


def test_a_model_saved_alone_makes_no_checkpoint(tmp_path):
    save_16bit_model(NvcompCheckpointEngine(), tmp_path, {"w": torch.ones(10)})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pytorch_model.bin"]


def test_a_save_that_ended_early_does_not_name_latest_later(tmp_path):
    engine = NvcompCheckpointEngine()
    engine.save_latest = "never_saved"  # the hook around save_checkpoint ran, and the host raised before create
    save_16bit_model(engine, tmp_path, {"w": torch.ones(10)})
    assert not (tmp_path / "latest").exists()


# -- behind training ----------------------------------------------------------------------------------------------------------

KINDS = [{"async": True}, {"overlap": True}, {"async": True, "in_flight": 3}, {"overlap": True, "in_flight": 3}]


class Gate:
    """Holds saves up behind training until `open`."""

    def __init__(self, monkeypatch):
        self.opened, begin = threading.Event(), Commit.begin
        monkeypatch.setattr(Commit, "begin", lambda commit: (self.opened.wait(30), begin(commit)))

    def open(self):
        self.opened.set()


@pytest.mark.parametrize("block", KINDS, ids=str)
def test_what_is_saved_is_of_the_moment_of_the_save(tmp_path, monkeypatch, block):
    """Large tensors may change after `settle`, everything else at once."""
    gate, engine = Gate(monkeypatch), NvcompCheckpointEngine(config=Config.from_dict(block))
    large = torch.randn(600_000)
    state = {"large": large, "view": large[1000:2000], "small": torch.randn(3000), "tiny": torch.ones(3), "step": 5, "list": [1, 2]}
    expected = copy.deepcopy(state)
    save_checkpoint(engine, tmp_path, state)
    state["small"].zero_(), state["tiny"].zero_(), state["list"].append(3), state.update(step=6)
    engine.settle()
    large.zero_()
    assert not (tmp_path / "latest").exists()
    gate.open()
    engine.wait()
    found = engine.load(str(tmp_path / "global_step1" / NAME))
    assert found["step"] == 5 and found["list"] == [1, 2]
    for name in ("large", "view", "small", "tiny"):
        assert torch.equal(found[name], expected[name]), name
    assert found["view"].untyped_storage().data_ptr() == found["large"].untyped_storage().data_ptr()
    assert (tmp_path / "latest").read_text() == "global_step1" and verify_tree(tmp_path) == []


def test_errors_are_raised_by_the_next_save_wait_or_load(tmp_path, monkeypatch):
    engine, state = NvcompCheckpointEngine(config=Config(async_=True)), {"w": torch.randn(5000)}
    save_checkpoint(engine, tmp_path, state)
    engine.wait()
    for hear in (lambda: engine.wait(), lambda: engine.load(str(tmp_path / "global_step1" / NAME)),
                 lambda: save_checkpoint(engine, tmp_path, state, "global_step3")):
        with monkeypatch.context() as broken:
            broken.setattr(files.Writer, "write_at", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            save_checkpoint(engine, tmp_path, state, "global_step2")
            with contextlib.suppress(CommitError):
                engine._background._pending[-1][1].wait()
        with pytest.raises(CommitError, match="No space left") as caught:
            hear()
        assert caught.value.rank == 0 and NAME in str(caught.value)
        engine.wait()  # it was heard
        assert (tmp_path / "latest").read_text() == "global_step1" and sorted(os.listdir(tmp_path)) == ["global_step1", "latest"]
    save_checkpoint(engine, tmp_path, state, "global_step3")
    engine.wait()
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_a_snapshot_that_fails_fails_the_save(tmp_path, monkeypatch):
    for block in ({"async": True}, {"overlap": True}):
        engine = NvcompCheckpointEngine(config=Config.from_dict(block))
        with monkeypatch.context() as broken:
            broken.setattr("ds_nvcomp.archive.writer.encode", lambda *_: (_ for _ in ()).throw(EncodeError("made up", tensor="w")))
            save_checkpoint(engine, tmp_path, {"w": torch.randn(600_000)})
            engine.settle()
            with pytest.raises(CommitError, match="EncodeError: made up"):
                engine.wait()
        assert not (tmp_path / "latest").exists()


def test_more_saves_than_may_be_in_flight_wait_and_say_so(tmp_path, monkeypatch, caplog):
    gate, engine = Gate(monkeypatch), NvcompCheckpointEngine(config=Config(async_=True, in_flight=2))
    monkeypatch.setattr("ds_nvcomp.log.logger.propagate", True)
    for step in (1, 2):
        save_checkpoint(engine, tmp_path, {"step": step}, f"global_step{step}")
    threading.Timer(0.3, gate.open).start()
    with caplog.at_level("INFO", logger="ds_nvcomp"):
        save_checkpoint(engine, tmp_path, {"step": 3}, "global_step3")
    engine.wait()
    assert "waited 0." in caplog.text and "'global_step1'" in caplog.text and "'global_step2'" not in caplog.text.split("waited")[1][:60]
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_a_model_saved_beside_asynchronous_checkpoints(tmp_path):
    engine, state = NvcompCheckpointEngine(config=Config(async_=True)), {"w": torch.randn(5000)}
    save_checkpoint(engine, tmp_path, state)
    save_16bit_model(engine, tmp_path, {"w": torch.ones(10)})
    assert torch.equal(torch.load(tmp_path / "pytorch_model.bin")["w"], torch.ones(10))
    engine.wait()
    assert torch.equal(engine.load(str(tmp_path / "global_step1" / NAME))["w"], state["w"])
    assert sorted(os.listdir(tmp_path)) == ["global_step1", "latest", "pytorch_model.bin"]


def test_what_torch_writes_itself_is_saved_in_an_overlap_too(tmp_path):
    """Sparse tensors and storages met by themselves are taken at once, since torch comes to them when it pickles."""
    engine = NvcompCheckpointEngine(config=Config(overlap=True))
    sparse, storage = torch.eye(40).to_sparse(), torch.arange(2000.0).untyped_storage()
    save_checkpoint(engine, tmp_path, {"sparse": sparse, "storage": storage, "w": torch.ones(600_000)})
    storage.fill_(0)
    engine.wait()
    found = engine.load(str(tmp_path / "global_step1" / NAME))
    assert torch.equal(found["sparse"].to_dense(), torch.eye(40)) and bytes(found["storage"]) == bytes(torch.arange(2000.0).untyped_storage())


def test_codec_auto(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ds_nvcomp.log.logger.propagate", True)
    engine = NvcompCheckpointEngine(config=Config(codec="auto"))
    with caplog.at_level("INFO", logger="ds_nvcomp"):
        save_checkpoint(engine, tmp_path, {"w": torch.randn(5000)})
    assert "codec auto:" in caplog.text and verify_tree(tmp_path) == []


def test_a_snapshot_is_of_the_bytes_that_tensors_had(tmp_path):
    """ZeRO-3 gives parameters other bytes in each forward: what is saved are those of the moment of the save, names and attributes too."""
    large = torch.randn(400_000)
    parameter, attributed = torch.nn.Parameter(torch.randn(300_000)), torch.randn(300_000)[::2]
    attributed.ds_id = 7
    fp8 = torch.randn(300_000).to(torch.float8_e4m3fn)
    state = {"module": {"p": parameter, "a": attributed, "fp8": fp8}, "large": large, "view": large[1000:2000].view(10, 100).t()}
    expected = copy.deepcopy({"p": parameter.data, "a": attributed, "fp8": fp8, "large": large, "view": state["view"]})
    later = snapshot_later(state, Config(), root="x")
    parameter.data = torch.zeros(5)
    attributed.data, attributed.ds_id = torch.zeros(3), 8
    large.data = torch.zeros(2)
    state["module"]["fp8"].data = torch.zeros(1, dtype=torch.float8_e4m3fn)
    state["module"].clear()
    report = later().write(tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=False)
    assert isinstance(found["module"]["p"], torch.nn.Parameter) and found["module"]["a"].ds_id == 7
    for name, tensor in {**found["module"], "large": found["large"], "view": found["view"]}.items():
        assert torch.equal(tensor.detach().view(torch.uint8) if name == "fp8" else tensor.detach(),
                           expected[name].view(torch.uint8) if name == "fp8" else expected[name]), name
        assert tensor.stride() == (expected[name].stride() if name != "a" else (2,)) and tensor.dtype == expected[name].dtype, name
    assert found["view"].untyped_storage().data_ptr() == found["large"].untyped_storage().data_ptr()
    direct = ds_nvcomp.save({"module": {"p": found["module"]["p"]}}, tmp_path / "y.pt", {"fsync": False})
    assert report.raw_bytes > direct.raw_bytes == 1_200_000
    assert sorted(row.name for row in scan(tmp_path / "x.pt").rows) == ["large", "module.a", "module.fp8", "module.p", "view"]
    assert {stored.name for stored in scan(tmp_path / "x.pt").storages} >= {"large", "module.a", "module.fp8", "module.p"}


def test_later_and_now_are_the_same_file(tmp_path):
    """Also tied weights, buffers, containers, optimizer state, and objects of classes."""
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 300))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(9, 300)).sum().backward()
    optimizer.step()
    state = {"module": model.state_dict(), "optimizer": optimizer.state_dict(), "model": model, "list": [model[0].weight, (1, "a", None)]}
    snapshot(state, Config(), root="x").write(tmp_path / "now.pt")
    snapshot_later(state, Config(), root="x")().write(tmp_path / "later.pt")
    now, later = (torch.load(tmp_path / name, weights_only=False) for name in ("now.pt", "later.pt"))
    assert later["list"][0] is later["model"][2].weight is later["model"][0].weight and type(later["module"]) is type(now["module"])
    assert later["module"]._metadata == now["module"]._metadata
    assert [(row.name, row.shape, row.stride, row.offset, row.dtype) for row in scan(tmp_path / "now.pt").rows] == \
        [(row.name, row.shape, row.stride, row.offset, row.dtype) for row in scan(tmp_path / "later.pt").rows]
    for name, tensor in now["module"].items():
        assert torch.equal(later["module"][name], tensor)
    with zipfile.ZipFile(tmp_path / "now.pt") as a, zipfile.ZipFile(tmp_path / "later.pt") as b:
        assert a.namelist() == b.namelist()
        for name in a.namelist():
            if "/data/" in name:  # the seal has checksums in decimal, and that of the pickle need not be of as many digits
                assert a.read(name) == b.read(name), name
