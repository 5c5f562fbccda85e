"""The processes of the DeepSpeed tests: `worker.py GROUP OUT` runs the cases of a group one after another on every rank.

Nothing here imports ds_nvcomp to switch it on: the entry point has to do that. A case's assertions are its own; what it
returns, or its traceback, goes to OUT/CASE.rankR.json.
"""
from __future__ import annotations

import copy
import datetime
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import bits
import models

BLOCK = {"enabled": True}
CONFIGS = Path(__file__).resolve().parents[2] / "configs"
STEPS, SAVE_AT = 4, 2
CASES: dict[str, dict] = {}  # group -> name -> function(directory)


def case(group: str, name: str | None = None, *args):
    """Register a case; its function gets a directory that all ranks share and then `args`."""
    def register(function):
        CASES.setdefault(group, {})[name or function.__name__] = lambda directory: function(directory, *args)
        return function
    return register


# -- training -----------------------------------------------------------------------------------------------------------------

def config(stage: int, precision: str = "bf16", **more) -> dict:
    """A DeepSpeed configuration without the block."""
    base = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 1.0, "steps_per_print": 1000,
            "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000,
                                  "stage3_param_persistence_threshold": 100, "stage3_gather_16bit_weights_on_model_save": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
    if precision != "fp32":
        base[precision] = {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}
    for key, value in more.items():
        base[key] = {**base[key], **value} if isinstance(base.get(key), dict) else value
    return base


def compressed(plain: dict, **block) -> dict:
    return {**plain, "nvcomp_checkpoint": {**BLOCK, **block}}


def make(settings: dict, build=models.Model, seed: int = 7):
    """An engine over a fresh model; `seed` decides its weights."""
    if "fp16" in settings:
        # DeepSpeed refuses fp16 on CPUs without native arithmetic for it; torch computes it all the same, only slower.
        get_accelerator().is_fp16_supported = lambda: True
    torch.manual_seed(seed)
    model = build()
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(model, models.MoEModel):
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
        parameters = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=copy.deepcopy(settings))
    torch.manual_seed(1000 + dist.get_rank())
    return engine


def is_ours(engine) -> bool:
    return type(engine.checkpoint_engine).__name__ == "NvcompCheckpointEngine"


def train(engine, start: int, stop: int) -> list[str]:
    """Steps `start`..`stop`; the bits of their losses."""
    losses = []
    for step in range(start, stop):
        if isinstance(engine, deepspeed.PipelineEngine):
            batches = [models.batch(10 * step + i, engine.grid.get_data_parallel_rank()) for i in range(engine.micro_batches)]
            loss = engine.train_batch(iter(batches))
        else:
            loss = engine(*models.batch(step, dist.get_rank()))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item().hex())
    return losses


def state(engine) -> dict[str, str]:
    """Hashes of all that further steps depend on."""
    optimizer = engine.optimizer
    parts = {"weights": {name: getattr(p, "ds_tensor", p.data) for name, p in engine.module.named_parameters()},
             "buffers": dict(engine.module.named_buffers()),
             "steps": [engine.global_steps, engine.global_samples, engine.skipped_steps],
             "scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler else None, "lr": engine.get_lr(),
             "scale": [getattr(optimizer, "cur_scale", None), getattr(optimizer, "cur_iter", None)],
             "rng": torch.get_rng_state()}
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
                 "fp32_groups_flat"):
        if getattr(optimizer, name, None) is not None:
            parts[name] = list(getattr(optimizer, name))
    for index, value in enumerate(getattr(optimizer, "optimizer", optimizer).state.values()):
        parts[f"optimizer {index}"] = value
    assert any(name.startswith("optimizer") for name in parts)
    return {name: bits.sha(value) for name, value in parts.items()}


def save(engine, directory: Path, step: int, **options) -> None:
    """Save with all that the loop needs to go on, the generators of all ranks included."""
    rng = [None] * dist.get_world_size()
    dist.all_gather_object(rng, torch.get_rng_state())
    client = {"step": step, "rng": rng, "note": "\u00fc", "nested": {"t": torch.arange(5000)}}
    engine.save_checkpoint(str(directory), client_state=client, **options)


def restore(engine, directory: Path, **options) -> int:
    path, client = engine.load_checkpoint(str(directory), **options)
    assert path is not None, f"nothing loaded from {directory}"
    assert client["note"] == "\u00fc" and torch.equal(client["nested"]["t"], torch.arange(5000)), client
    torch.set_rng_state(client["rng"][dist.get_rank() % len(client["rng"])])
    return client["step"]


def resumes(directory: Path, settings: dict, build=models.Model, across: bool = False, exact: bool = True, block: dict = {}) -> Path:
    """Compressed and plain training that save at step 2, and a fresh engine that goes on from there, agree in every bit.

    With `across`, DeepSpeed's own engine also resumes the compressed checkpoint, and ours the plain one. `exact=False` is for
    where DeepSpeed itself does not resume to the bit: then the one that resumed from the plain checkpoint is the measure.
    """
    plain, ours = settings, compressed(settings, **block)
    runs = {}
    for name, chosen in (("plain", plain), ("compressed", ours)):
        engine = make(chosen, build)
        assert is_ours(engine) == (name == "compressed"), type(engine.checkpoint_engine)
        losses = train(engine, 0, SAVE_AT)
        save(engine, directory / name, SAVE_AT)
        losses += train(engine, SAVE_AT, STEPS)
        runs[name] = losses, state(engine)
        engine.destroy()
    engine = make(plain, build)  # neither saved nor loaded
    uninterrupted = train(engine, 0, STEPS), state(engine)
    engine.destroy()
    assert runs["plain"] == uninterrupted, "the comparison is worth nothing: plain saving changes the training"
    assert runs["compressed"] == uninterrupted, "saving compressed changed the training"
    assert len(set(uninterrupted[0])) == STEPS
    expected = uninterrupted[0][SAVE_AT:], uninterrupted[1]
    resumptions = [("plain", plain), ("compressed", ours)] + ([("compressed", plain), ("plain", ours)] if across else [])
    for name, chosen in resumptions:
        engine = make(chosen, build, seed=99)
        step = restore(engine, directory / name)
        losses, end = train(engine, step, STEPS), state(engine)
        engine.destroy()
        if not exact and name == "plain":
            expected = losses, end
        assert losses == expected[0], (name, losses, expected[0])
        assert end == expected[1], (name, [part for part in end if end[part] != expected[1].get(part)])
    dist.barrier()
    tag = (directory / "compressed" / "latest").read_text()
    assert tag == (directory / "plain" / "latest").read_text()
    found = bits.compare_directories(directory / "compressed" / tag, directory / "plain" / tag)
    assert not found, found[:5]
    sizes = [sum(p.stat().st_size for p in (directory / name / tag).rglob("*.pt")) for name in ("compressed", "plain")]
    assert sizes[0] < 0.95 * sizes[1], sizes
    assert not list((directory / "compressed").glob(".*")), "something hidden was left behind"
    return directory


def linked(checkpoint: Path) -> dict[str, int]:
    """How many tensors of each optimizer file are stored as differences from weights in another."""
    from ds_nvcomp.archive.scan import scan  # not above: nothing here may switch it on
    return {path.name: sum(row.storage.encoding is not None and row.storage.encoding.link is not None for row in scan(path).rows)
            for path in sorted(checkpoint.glob("*optim_states.pt"))}


# -- ZeRO and precisions ------------------------------------------------------------------------------------------------------

def _zero(directory, stage, precision, more, exact=True):
    resumes(directory, config(stage, precision, **more), across=precision == "bf16" and stage in (2, 3), exact=exact)
    found = linked(directory / "compressed" / (directory / "compressed" / "latest").read_text())
    assert len(found) == 2 or stage == 0, found
    assert all(found.values()) if stage in (1, 2) and precision != "fp32" else not any(found.values()), found


for _precision in ("bf16", "fp32", "fp16"):
    for _stage in range(4):
        case(f"zero_{_precision}", f"zero{_stage}_{_precision}", _stage, _precision, {})(_zero)
case("zero_bf16", "bf16_optimizer", 1, "bf16", {"data_types": {"grad_accum_dtype": "fp32"}})(_zero)
case("zero_bf16", "zero2_accumulation", 2, "bf16", {"gradient_accumulation_steps": 2})(_zero)
# CPUAdam multiplies its bias corrections up step by step, and takes powers after a load: not the same bits.
for _stage in (2, 3):
    case("offload", f"zero{_stage}_offload", _stage, "bf16", {
        "zero_optimization": {"offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}, False)(_zero)


@case("zero_fp32", "config_zero1_fp32", "zero1_fp32.json")
@case("zero_bf16", "config_zero2_bf16", "zero2_bf16.json")
@case("zero_bf16", "config_zero3_bf16", "zero3_bf16.json")
@case("zero_fp16", "config_zero2_fp16", "zero2_fp16.json")
@case("offload", "config_zero3_cpu_offload", "zero3_cpu_offload.json")
def config_file(directory, name, build=models.Model):
    """A configuration of ours as it stands, saved and loaded once."""
    settings = json.loads((CONFIGS / name).read_text())
    settings["zero_optimization"].update(reduce_bucket_size=100_000, allgather_bucket_size=100_000)  # memory, not meaning
    engine = make(settings, build)
    assert is_ours(engine)
    train(engine, 0, 2)
    save(engine, directory, 2)
    before = state(engine), train(engine, 2, 3)
    engine.destroy()
    engine = make(settings, build, seed=99)
    restore(engine, directory)
    assert (state(engine), train(engine, 2, 3)) == before
    engine.destroy()


@case("moe", "moe_zero0_fp32", 0, "fp32", 1)
@case("moe", "moe_zero1_bf16", 1, "bf16", 2)
@case("moe", "moe_zero2_bf16", 2, "bf16", 2)
@case("moe", "moe_zero2_bf16_one_group", 2, "bf16", 1)
def moe(directory, stage, precision, ep_size):
    resumes(directory, config(stage, precision), lambda: models.MoEModel(ep_size))
    assert list((directory / "compressed").glob("*/*expert_*_model_states.pt"))
    found = linked(directory / "compressed" / f"global_step{SAVE_AT}")
    assert any(found.values()) == (stage > 0), found


case("moe", "config_moe_zero1_bf16", "moe_zero1_bf16.json", lambda: models.MoEModel(2))(config_file)


@case("pipeline", "pipeline_zero1_bf16", 1, "bf16")
@case("pipeline", "pipeline_zero0_fp32", 0, "fp32")
def pipeline(directory, stage, precision):
    resumes(directory, config(stage, precision, gradient_accumulation_steps=2), lambda: models.pipeline(2))
    assert len(list((directory / "compressed").glob("*/layer_*-model_*states.pt"))) == 4


case("pipeline", "config_pipeline_bf16", "pipeline_bf16.json", lambda: models.pipeline(2))(config_file)


# -- what else DeepSpeed saves ------------------------------------------------------------------------------------------------

@case("features", "exclude_frozen_zero2", 2)
@case("features", "exclude_frozen_zero3", 3)
def exclude_frozen(directory, stage):
    found = {}
    for name, settings in (("plain", config(stage)), ("compressed", compressed(config(stage)))):
        engine = make(settings)
        train(engine, 0, SAVE_AT)
        save(engine, directory / name, SAVE_AT, exclude_frozen_parameters=True)
        engine.destroy()
        engine = make(settings)
        step = restore(engine, directory / name, load_module_strict=False)
        found[name] = train(engine, step, STEPS), state(engine)
        engine.destroy()
    dist.barrier()
    assert found["plain"] == found["compressed"]
    tag = f"global_step{SAVE_AT}"
    differ = bits.compare_directories(directory / "compressed" / tag, directory / "plain" / tag)
    assert not differ, differ[:5]
    loaded = torch.load(next((directory / "compressed" / tag).glob("*model_states.pt")), weights_only=False)
    assert "frozen.weight" not in loaded["module"]


@case("features", "save_16bit_zero2", 2)
@case("features", "save_16bit_zero3", 3)
def save_16bit(directory, stage):
    """The test opens these where ds_nvcomp cannot be imported."""
    for name, settings in (("plain", config(stage)), ("compressed", compressed(config(stage)))):
        engine = make(settings)
        train(engine, 0, 1)
        assert engine.save_16bit_model(str(directory / name), "pytorch_model.bin")
        save(engine, directory / name, 1)  # and a checkpoint beside it, afterwards
        engine.destroy()
    dist.barrier()


@case("features")
def overwrite_a_tag(directory):
    """A second save under a tag replaces the first one as a whole; files of others in the directory stay."""
    engine = make(compressed(config(2)))
    train(engine, 0, 1)
    save(engine, directory, 1, tag="best")
    if dist.get_rank() == 0:
        (directory / "best" / "notes.txt").write_text("mine")
        (directory / "best" / "zero_pp_rank_7_mp_rank_00_optim_states.pt").write_bytes(b"of an earlier run with more ranks")
    dist.barrier()
    train(engine, 1, 2)
    save(engine, directory, 2, tag="best")
    here = state(engine), train(engine, 2, 4)
    dist.barrier()
    assert (directory / "best" / "notes.txt").read_text() == "mine"
    assert len(list((directory / "best").glob("*optim_states.pt"))) == 2
    assert not list(directory.glob(".*"))
    other = make(compressed(config(2)), seed=99)
    assert restore(other, directory, tag="best") == 2
    assert (state(other), train(other, 2, 4)) == here
    engine.destroy(), other.destroy()


@case("features", "replicas_apart_async", True)
@case("features", "replicas_apart", False)
def replicas_apart(directory, behind):
    """Weights that are not the same on all ranks: rank 1 would link to what rank 0 does not write. The save fails, and says so."""
    engine = make(compressed(config(2), **({"async": True} if behind else {})))
    train(engine, 0, 1)
    save(engine, directory, 1)
    if behind:
        engine.checkpoint_engine.wait()
    if dist.get_rank() == 0:
        with torch.no_grad():  # of the last parameters rank 1 has the master weights
            engine.optimizer.parallel_partitioned_bit16_groups[0][1][5] += 1
    error = None
    try:
        save(engine, directory, 1, tag="apart")
        if behind:
            engine.checkpoint_engine.wait()
    except Exception as err:
        error = f"{type(err).__name__}: {err}"
    assert error and "CommitError" in error and "of rank 1 are not those" in error and "link_master_weights" in error, error
    dist.barrier()
    assert not (directory / "apart").exists() and (directory / "latest").read_text() == "global_step1"
    engine.destroy()
    engine = make(compressed(config(2), link_master_weights="off"))
    train(engine, 0, 1)
    if dist.get_rank() == 0:
        with torch.no_grad():
            engine.optimizer.parallel_partitioned_bit16_groups[0][1][5] += 1
    save(engine, directory, 1, tag="apart")
    dist.barrier()
    assert (directory / "apart").is_dir()
    engine.destroy()


@case("features")
def leftovers_are_cleaned(directory):
    """What a crashed save left is not loaded, and goes with the next save."""
    left = directory / ".global_step9.staged"
    if dist.get_rank() == 0:
        left.mkdir(parents=True)
        (left / "mp_rank_00_model_states.pt").write_bytes(b"half")
        (directory / "global_step1").mkdir()  # an empty directory of the tag's own name is no obstacle
    dist.barrier()
    engine = make(compressed(config(2)))
    path, _ = engine.load_checkpoint(str(directory))
    assert path is None
    train(engine, 0, 1)
    save(engine, directory, 1)
    dist.barrier()
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["global_step1"]
    assert (directory / "latest").read_text() == "global_step1"
    engine.destroy()


@case("features")
def save_latest_false(directory):
    engine = make(compressed(config(2)))
    save(engine, directory, 0, tag="first")
    save(engine, directory, 0, tag="aside", save_latest=False)
    dist.barrier()
    assert (directory / "latest").read_text() == "first" and (directory / "aside").is_dir()
    engine.destroy()


@case("features")
def several_saves(directory):
    """Each of five checkpoints in a row resumes as it should, out of order."""
    engine, expected = make(compressed(config(3))), []
    for step in range(5):
        train(engine, step, step + 1)
        save(engine, directory, step + 1)
        expected.append(state(engine))
    for step in (3, 1, 5):
        assert restore(engine, directory, tag=f"global_step{step}") == step
        assert state(engine) == expected[step - 1]
    engine.destroy()


@case("behind", "async_zero2_bf16", 2, "bf16", "async")
@case("behind", "async_zero3_bf16", 3, "bf16", "async")
@case("behind", "overlap_zero2_bf16", 2, "bf16", "overlap")
@case("behind", "overlap_zero3_bf16", 3, "bf16", "overlap")
@case("behind", "overlap_zero1_fp32", 1, "fp32", "overlap")
def behind_training(directory, stage, precision, key):
    resumes(directory, config(stage, precision), block={key: True})
    found = linked(directory / "compressed" / f"global_step{SAVE_AT}")
    assert any(found.values()) == (stage == 2 and key == "async"), found  # an overlap copies what is as small as here, and links none of it


@case("features")
def link_master_weights_off(directory):
    """The key stores the same state in full; either engine loads what the other saved."""
    sizes = {}
    for name, block in (("auto", {}), ("off", {"link_master_weights": "off"})):
        engine = make(compressed(config(2), **block))
        train(engine, 0, SAVE_AT)
        save(engine, directory / name, SAVE_AT)
        expected = state(engine), train(engine, SAVE_AT, STEPS)
        engine.destroy()
        dist.barrier()
        found = linked(directory / name / f"global_step{SAVE_AT}")
        assert len(found) == 2 and all(bool(count) == (name == "auto") for count in found.values()), found
        sizes[name] = sum(path.stat().st_size for path in (directory / name).rglob("*optim_states.pt"))
    assert sizes["auto"] < 0.9 * sizes["off"], sizes
    for name, block in (("auto", {"link_master_weights": "off"}), ("off", {})):
        engine = make(compressed(config(2), **block), seed=99)
        restore(engine, directory / name)
        assert (state(engine), train(engine, SAVE_AT, STEPS)) == expected
        engine.destroy()


@case("pipeline", "async_pipeline", "async")
@case("pipeline", "overlap_pipeline", "overlap")
def pipeline_behind_training(directory, key):
    resumes(directory, config(1, "bf16", gradient_accumulation_steps=2), lambda: models.pipeline(2), block={key: True})


@case("behind", "async_saves_follow_one_another", {"async": True})
@case("behind", "two_in_flight", {"async": True, "in_flight": 2})
@case("behind", "overlapping_saves", {"overlap": True})
@case("behind", "two_overlapping_saves", {"overlap": True, "in_flight": 2})
def saves_behind_training(directory, block):
    """A save after each step, the last one on the way when the engine is destroyed: all are complete, and of their own step."""
    engine, expected = make(compressed(config(2), **block)), []
    for step in range(5):
        train(engine, step, step + 1)
        save(engine, directory, step + 1)
        expected.append(state(engine))
    assert engine.save_16bit_model(str(directory / "beside"), "pytorch_model.bin")
    engine.destroy()
    dist.barrier()
    assert (directory / "latest").read_text() == "global_step5" and not list(directory.glob(".*"))
    engine = make(compressed(config(2), **block), seed=99)
    for step in (3, 1, 5):
        assert restore(engine, directory, tag=f"global_step{step}") == step
        assert state(engine) == expected[step - 1]
    save(engine, directory, 5, tag="again")
    assert restore(engine, directory) == 5 and (directory / "latest").read_text() == "again"  # a load waits for the save
    engine.destroy()


@case("behind")
def another_engine_loads(directory):
    """What one engine is still saving, another one of the process loads."""
    engine, other = make(compressed(config(2), **{"async": True})), make(config(2), seed=99)
    train(engine, 0, 2)
    save(engine, directory, 2)
    assert restore(other, directory) == 2 and state(other) == state(engine)
    engine.destroy(), other.destroy()


@case("exit")
def left_at_exit(directory):
    """The script ends right after the last save: a process of its own, whose exit the test waits for."""
    engine = make(compressed(config(2), **{"async": True}))
    from ds_nvcomp.checkpoint.commit import Commit
    slow = Commit.begin
    Commit.begin = lambda self: (time.sleep(1.0), slow(self))
    train(engine, 0, 1)
    save(engine, directory, 1)
    assert not (directory / "latest").exists()


@case("features")
def monitor_events(directory):
    settings = compressed(config(2, csv_monitor={"enabled": True, "output_path": str(directory), "job_name": "job"}))
    engine = make(settings)
    train(engine, 0, 2)
    save(engine, directory / "checkpoints", 2)
    engine.destroy()
    dist.barrier()
    written = {path.name: path.read_text().split() for path in (directory / "job").glob("*nvcomp*")}
    assert len(written) == 6, written
    ratio = next(text for name, text in written.items() if "ratio" in name)
    assert 0.3 < float(ratio[-1].split(",")[-1]) < 0.97, ratio


@case("features")
def weights_only_reads_the_module(directory):
    """The safe loader has our decoder among its globals without anybody's asking."""
    engine = make(compressed(config(2)))
    engine.save_checkpoint(str(directory))
    dist.barrier()
    path = directory / "global_step0" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    import ds_nvcomp
    ds_nvcomp.save({"weight": torch.randn(9000)}, directory / f"own{dist.get_rank()}.pt")
    assert torch.load(directory / f"own{dist.get_rank()}.pt", weights_only=True)["weight"].shape == (9000,)
    assert path.exists()
    engine.destroy()


# -- commit -------------------------------------------------------------------------------------------------------------------

class _Write:
    """While open, `ds_nvcomp`'s writer of one file on `rank` is wrapped: `before(target)` runs first."""

    def __init__(self, rank, before):
        self.rank, self.before = rank, before

    def __enter__(self):
        from ds_nvcomp import deepspeed_engine
        self.module, self.original = deepspeed_engine, deepspeed_engine.write
        if dist.get_rank() == self.rank:
            def write(obj, target, *args, **kwargs):
                self.before(Path(target))
                return self.original(obj, target, *args, **kwargs)
            self.module.write = write

    def __exit__(self, *exc):
        self.module.write = self.original


def _listing(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


@case("commit")
def slow_rank(directory):
    """While one rank still writes, neither `latest` nor the tag's directory says that the checkpoint exists."""
    engine = make(compressed(config(2)))
    save(engine, directory, 0, tag="old")
    dist.barrier()
    seen = []

    def before(target):
        time.sleep(1.5)
        seen.append(((directory / "latest").read_text(), (directory / "new").exists()))

    with _Write(1, before):
        save(engine, directory, 0, tag="new")
    assert seen == ([("old", False)] if dist.get_rank() == 1 else []), seen
    dist.barrier()
    assert (directory / "latest").read_text() == "new"
    assert len(list((directory / "new").glob("*_states.pt"))) == 3
    engine.destroy()


@case("commit", "failing_rank_1", 1)
@case("commit", "failing_rank_0", 0)
def failing_rank(directory, failing):
    """Every rank raises `CommitError`, which names the one that failed; the last checkpoint stays; training goes on."""
    from ds_nvcomp import CommitError
    engine, reference = make(compressed(config(2))), make(config(2))
    expected = train(reference, 0, STEPS), state(reference)
    reference.destroy()
    torch.manual_seed(1000 + dist.get_rank())
    losses = train(engine, 0, 1)
    save(engine, directory, 1)
    dist.barrier()
    before = _listing(directory)

    def fail(target):
        raise OSError(28, "No space left on device", str(target))

    losses += train(engine, 1, 2)
    for tag in ("global_step2", "global_step1"):  # a new one, and one that replaces the good one
        try:
            with _Write(failing, fail):
                save(engine, directory, 2, tag=tag)
        except CommitError as err:
            assert f"rank {failing}" in str(err) and "No space left" in str(err), str(err)
        else:
            raise AssertionError("no CommitError")
        dist.barrier()
        assert _listing(directory) == before
    assert not list(directory.glob(".*staged*"))
    losses += train(engine, 2, 3)
    save(engine, directory, 3)
    losses += train(engine, 3, STEPS)
    assert (losses, state(engine)) == expected, "a failed save changed the training"
    other = make(compressed(config(2)), seed=99)
    step = restore(other, directory)
    assert step == 3 and train(other, 3, STEPS) == losses[3:] and state(other) == expected[1]
    engine.destroy(), other.destroy()


@case("commit")
def reader_meanwhile(directory):
    """Whoever follows `latest` while checkpoints replace one another under the same tag always finds a whole one."""
    engine = make(compressed(config(2)))
    save(engine, directory, 0, tag="same")
    dist.barrier()
    done, problems, looked = threading.Event(), [], [0]

    def look():
        while not done.is_set():
            try:
                tag = (directory / "latest").read_text()
                names = sorted(path.name for path in (directory / tag).iterdir())
                if tag != "same" or len([name for name in names if name.endswith("_states.pt")]) != 3:
                    problems.append((tag, names))
                looked[0] += 1
            except OSError as err:
                problems.append(repr(err))

    watcher = threading.Thread(target=look)
    if dist.get_rank() == 0:
        watcher.start()
    for _ in range(6):
        save(engine, directory, 0, tag="same")
    done.set()
    if dist.get_rank() == 0:
        watcher.join()
        assert looked[0] > 20
    # Listing a directory that is exchanged and then removed half way is the reader's race; a missing name is not.
    assert not [problem for problem in problems if isinstance(problem, str)], problems[:3]
    engine.destroy()


@case("hang")
def killed_while_saving(directory):
    """Rank 1 never comes back from its write; the test kills everything when it has begun."""
    engine = make(compressed(config(2)))
    train(engine, 0, 1)
    save(engine, directory, 1)
    train(engine, 1, 2)
    dist.barrier()

    def hang(target):
        target.write_bytes(b"half a file")
        (directory.parent / "hanging").touch()
        time.sleep(600)

    with _Write(1, hang):
        save(engine, directory, 2)


@case("after_hang")
def resumed_after_kill(_):
    directory = Path(os.environ["CASE_DIRECTORY"])
    expected = make(config(2))
    losses, end = train(expected, 0, STEPS), state(expected)
    expected.destroy()
    engine = make(compressed(config(2)), seed=99)
    assert restore(engine, directory) == 1
    assert train(engine, 1, 2) == losses[1:2]
    save(engine, directory, 2)
    dist.barrier()
    assert sorted(path.name for path in directory.iterdir() if path.is_dir()) == ["global_step1", "global_step2"]
    assert train(engine, 2, STEPS) == losses[2:] and state(engine) == end
    engine.destroy()


# -- universal checkpoints ----------------------------------------------------------------------------------------------------



class _Plain(models.Model):
    """Without tied and frozen weights, for which ds_to_universal has no place."""

    def __init__(self):
        super().__init__()
        self.frozen.requires_grad_(True)
        self.head = torch.nn.Linear(models.WIDTH, models.VOCABULARY, bias=False)


@case("universal", "universal_zero1", 1)
@case("universal", "universal_zero2", 2)
@case("universal", "universal_zero3", 3)
def universal(directory, stage):
    """Saved by two ranks, both ways; the test converts them and loads them with one."""
    for name, settings in (("plain", config(stage)), ("compressed", compressed(config(stage)))):
        engine = make(settings, _Plain)
        train(engine, 0, SAVE_AT)
        save(engine, directory / name, SAVE_AT)
        engine.destroy()
    dist.barrier()
    found = linked(directory / "compressed" / f"global_step{SAVE_AT}")
    assert len(found) == 2 and all(bool(count) == (stage < 3) for count in found.values()), found


@case("universal_load", "universal_load_zero1", 1)
@case("universal_load", "universal_load_zero2", 2)
@case("universal_load", "universal_load_zero3", 3)
def universal_load(_, stage):
    """One rank or four go on with what two saved; the conversion of the plain checkpoint says how."""
    home, found = Path(os.environ["CASE_DIRECTORY"]) / f"universal_zero{stage}", {}
    for name in ("plain", "compressed"):
        settings = config(stage, checkpoint={"load_universal": True})
        settings["zero_optimization"].pop("stage3_gather_16bit_weights_on_model_save")
        engine = make(compressed(settings) if name == "compressed" else settings, _Plain, seed=99)
        restore(engine, home / name)
        found[name] = train(engine, SAVE_AT, STEPS), state(engine)
        engine.destroy()
    assert found["plain"] == found["compressed"]


# -- choice of the engine, one process ----------------------------------------------------------------------------------------

@case("choice")
def bad_blocks(directory):
    """A mistake in the block stops `deepspeed.initialize` with an error that names the key."""
    from ds_nvcomp import ConfigError
    for block, words in (({"enabled": True, "codek": "ans"}, ("codek", "codec")),
                         ({"codec": "zip"}, ("codec", "zip", "deflate")),
                         ({"threads": "auto"}, ("threads", "auto")), ({"enabled": "auto"}, ("enabled", "auto")),
                         ({"chunk_bytes": 5000}, ("chunk_bytes", "5000")), ({"verify": True}, ("verify",)), ("auto", ("auto",)),
                         (True, ("nvcomp_checkpoint",)), ([], ("nvcomp_checkpoint",))):
        try:
            make({**config(1), "nvcomp_checkpoint": block})
        except ConfigError as err:
            assert all(word in str(err) for word in ("nvcomp_checkpoint", *words)), str(err)
        else:
            raise AssertionError(f"{block} was accepted")


@case("choice")
def own_engine_without_the_block(directory):
    for settings in (config(1), {**config(1), "nvcomp_checkpoint": {"enabled": False}}):
        engine = make(settings)
        assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
        engine.destroy()
    engine = make({**config(1), "nvcomp_checkpoint": {}})
    assert is_ours(engine), "enabled is true by default"
    engine.destroy()


@case("choice")
def two_engines(directory):
    from ds_nvcomp import ConfigError
    try:
        make(compressed(config(1, checkpoint={"writer": {"type": "python"}})))
    except ConfigError as err:
        assert "checkpoint.writer" in str(err) and "nvcomp_checkpoint" in str(err)
    else:
        raise AssertionError("two checkpoint engines were accepted")


def _nvme(directory):
    return compressed(config(3, zero_optimization={"offload_optimizer": {"device": "nvme", "nvme_path": str(directory)}}))


@case("choice")
def nvme_offload(directory):
    """Refused where a DeepSpeedEngine gets its checkpoint engine."""
    from types import SimpleNamespace
    from ds_nvcomp import UnsupportedSetupError
    try:
        settings = SimpleNamespace(_param_dict=_nvme(directory))
        deepspeed.DeepSpeedEngine._configure_checkpointing(SimpleNamespace(_config=settings))
    except UnsupportedSetupError as err:
        assert "nvme" in str(err) and "nvcomp_checkpoint" in str(err)
    else:
        raise AssertionError("nvme was accepted")


@case("nvme")
def nvme_initialize(directory):
    """DeepSpeed may fail over its own NVMe library before it asks for a checkpoint engine; it must not go through."""
    try:
        make(_nvme(directory))
    except Exception as err:
        return f"{type(err).__name__}: {err}"
    raise AssertionError("nvme was accepted")


@case("choice")
def old_signatures(directory):
    """DeepSpeed 0.16 passes tags as str and makes the directories itself."""
    engine = make(compressed(config(1))).checkpoint_engine
    state_dict = {"weight": torch.randn(20_000)}
    for _ in range(2):
        engine.create("tag")
        engine.makedirs(str(directory / "tag"), exist_ok=True)
        engine.save(state_dict, str(directory / "tag" / "mp_rank_00_model_states.pt"))
        assert engine.commit("tag") is True
    loaded = engine.load(str(directory / "tag" / "mp_rank_00_model_states.pt"), map_location="cpu")
    assert bits.raw(loaded["weight"]) == bits.raw(state_dict["weight"])
    assert not list(directory.glob(".*"))


@case("choice")
def config_files(directory):
    """All of configs/ is what DeepSpeed and we accept, with the block in each."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from ds_nvcomp import Config
    names = sorted(path.name for path in CONFIGS.glob("*.json"))
    for name in names:
        settings = DeepSpeedConfig(str(CONFIGS / name))
        assert Config.from_dict(settings._param_dict["nvcomp_checkpoint"]).enabled
    return names


@case("nothing")
def left_alone(directory):
    """With DS_NVCOMP_AUTOLOAD=0 DeepSpeed is as its authors left it, block or no block; until somebody installs us by hand."""
    assert not {name for name in sys.modules if name.startswith("ds_nvcomp.")} - {"ds_nvcomp.autoload", "ds_nvcomp.errors"}
    engine = make(compressed(config(1)))
    assert type(engine.checkpoint_engine).__name__ == "TorchCheckpointEngine"
    engine.destroy()
    import ds_nvcomp
    ds_nvcomp.install()
    ds_nvcomp.install()
    engine = make(compressed(config(1)))
    assert is_ours(engine)
    engine.save_checkpoint(str(directory))
    assert (directory / "latest").read_text() == "global_step0"
    engine.destroy()


def main():
    group, out = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # An all-reduce for inference, which DeepSpeed would compile for half a minute into a cache shared by all environments.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", timeout=datetime.timedelta(seconds=120))
    rank = dist.get_rank()
    for name, function in CASES[group].items():
        directory = out / name
        if rank == 0:
            directory.mkdir(exist_ok=True)
        dist.barrier()
        returned = error = None
        began = time.perf_counter()
        try:
            returned = function(directory)
        except Exception:
            error = traceback.format_exc()
        report = {"error": error, "returned": returned, "seconds": time.perf_counter() - began}
        (out / f"{name}.rank{rank}.json").write_text(json.dumps(report, default=str))
        failed = [None] * dist.get_world_size()
        dist.all_gather_object(failed, error)
        print(f"== {name}: {'failed' if error else 'ok'} in {time.perf_counter() - began:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
