"""A GPT in a DeepSpeed engine that saves as told."""
from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from ds_nvcomp import Config, install
from ds_nvcomp.errors import ConfigError

from .bench import Skip
from .data import needs


def shape(params) -> tuple[int, int]:
    """Width and layers of a GPT of about `params` parameters."""
    width = max([64] + [w for w in (128, 256, 512, 1024, 2048, 4096) if params / (12 * w * w) >= 8])
    return width, max(1, round(params / (12 * width * width)))


def build(bench, stage=2, steps=3):
    """A DeepSpeed engine, the same whenever it is built, after some real optimizer steps."""
    import deepspeed
    from gpt import GPT
    install()
    torch.manual_seed(1)
    width, layers = shape(bench.args.params)
    with bench.device:
        model = GPT(width, layers, width // 64)
    config = {"train_micro_batch_size_per_gpu": bench.args.batch, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True,
              "zero_optimization": {"stage": stage}, "gradient_accumulation_steps": bench.args.accumulate, "steps_per_print": 1 << 30}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config)
    for number in range(steps):
        step(bench, engine, -1 - number)
    return engine


def step(bench, engine, number) -> None:
    """Training step `number`, on tokens that depend on nothing else. Waits for the stream of the training, not for others."""
    from gpt import CONTEXT, VOCABULARY
    generator = torch.Generator(bench.device).manual_seed((1 << 20) + 1000 * number + bench.rank)
    for _ in range(bench.args.accumulate):
        tokens = torch.randint(VOCABULARY, (bench.args.batch, CONTEXT + 1), device=bench.device, generator=generator)
        engine.backward(engine(tokens[:, :-1], tokens[:, 1:]))
        engine.step()
    training_stream(bench)


def training_stream(bench) -> None:
    if bench.gpu:
        torch.cuda.current_stream().synchronize()


def ours(bench, engine, **keys) -> None:
    """Let ds_nvcomp save with this configuration; keys that it does not have (yet) skip the case."""
    from ds_nvcomp.deepspeed_engine import NvcompCheckpointEngine
    needs(bench, keys.get("codec", "deflate"))
    try:
        config = Config.from_dict(keys)
    except ConfigError as err:
        raise Skip(str(err)) from None
    engine.checkpoint_engine = NvcompCheckpointEngine(engine._config, config)
    engine.checkpoint_engine.attach(engine)


def torchs(engine) -> None:
    """Let DeepSpeed's own engine save."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    engine.checkpoint_engine = TorchCheckpointEngine(engine._config)


def wait(engine) -> None:
    getattr(engine.checkpoint_engine, "wait", lambda: None)()


def save(bench, engine, directory) -> dict:
    """Seconds until save_checkpoint returns; until the training's stream is free; until the files are durable. Bytes of the files."""
    began = time.perf_counter()
    engine.save_checkpoint(str(directory), tag="step")
    seconds = time.perf_counter() - began
    training_stream(bench)
    stream = time.perf_counter() - began
    wait(engine)
    bench.barrier()
    sync_files(directory)
    return {"seconds": seconds, "stream": stream, "durable": time.perf_counter() - began, "stored_GB": size(directory) / 1e9}


def files(directory) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_file()]


def size(directory) -> int:
    return sum(path.stat().st_size for path in files(directory))


def sync_files(directory) -> None:
    """Make files durable; costs nothing for those that are."""
    for path in files(directory):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def recorded(engine, directory) -> dict:
    """What save_checkpoint hands to the checkpoint engine on this rank, file by file: the live tensors."""
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
    states = {}

    class Recorder(TorchCheckpointEngine):
        def save(self, state_dict, path):
            states[os.path.basename(path)] = state_dict

        def preserves_storage_sharing(self):
            return False  # else DeepSpeed copies everything to the host first

    before, engine.checkpoint_engine = engine.checkpoint_engine, Recorder(engine._config)
    try:
        engine.save_checkpoint(str(directory), tag="step")
    finally:
        engine.checkpoint_engine = before
    return states
