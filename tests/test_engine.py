"""The engine by itself, in one process, as DeepSpeed calls it."""
import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo

from ds_nvcomp.checkpoint.verify import verify_tree
from ds_nvcomp.deepspeed_engine import NvcompCheckpointEngine

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
