"""A rank of a job that saves and loads with megatron-core, on a CPU: worker.py RANK WORLD PORT FILE, steps and results in JSON files.

Steps: ["save", directory, codec or null, tensor parallelism], ["load", directory, tensor parallelism], ["kill", directory, rank].
"""
import functools
import json
import os
import signal
import sys
import traceback
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def on_a_cpu():
    """What megatron-core calls of CUDA without asking whether there is any."""
    torch.cuda.synchronize = lambda *args: None
    torch.cuda.current_device = lambda: torch.device("cpu")


def numbers():
    """What is saved: key -> whole tensor. Kinds and sizes that models and optimizers have."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator) * 0.02
    special = normal(4, 1000)
    special[:, :5] = torch.tensor([float("nan"), -0.0, float("inf"), 1e-42, -float("inf")])
    return {"weight": normal(1024, 300).bfloat16(), "exp_avg": normal(1024, 300), "special": special, "bias": normal(64).half(),
            "steps": torch.arange(4), "mask": normal(4, 333) > 0, "zeros": torch.zeros(64, 1000)}


def sharded(rank, world, parallel, *, empty):
    """The state dict of a rank: each tensor cut `parallel` ways along its first axis, and the pieces on ranks in turn."""
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    piece, replica = rank % parallel, rank // parallel
    state = {}
    for name, whole in numbers().items():
        own = whole.chunk(parallel)[piece].clone()
        offsets = [(0, piece, parallel)] if parallel > 1 else []
        state[name] = ShardedTensor.from_rank_offsets(name, torch.full_like(own, 1) if empty else own, *offsets, replica_id=replica)
    large = {"state": torch.arange(60_000.), "text": "rng"}
    state["object"] = ShardedObject("object", None if empty else large, (1,), (0,), replica_id=rank)
    return state if empty else {**state, "iteration": 3}


def save(rank, world, directory, codec, parallel):
    from megatron.core import dist_checkpointing
    import megatron_patch
    if codec:
        megatron_patch.apply({"codec": codec, "min_bytes": 0})
    else:
        megatron_patch.revert()
    os.makedirs(directory, exist_ok=True)
    dist_checkpointing.save(sharded(rank, world, parallel, empty=False), directory)
    dist.barrier()
    return "saved"


def load(rank, world, directory, parallel):
    from megatron.core import dist_checkpointing
    import megatron_patch
    megatron_patch.revert()
    try:
        found = dist_checkpointing.load(sharded(rank, world, parallel, empty=True), directory)
    except BaseException as err:
        return f"{type(err).__name__}: " + "".join(traceback.format_exception(err))[-6000:]
    for name, whole in numbers().items():
        expected = whole.chunk(parallel)[rank % parallel]
        if found[name].shape != expected.shape or not torch.equal(bits(found[name]), bits(expected)):
            return f"{name} differs"
    if not torch.equal(found["object"]["state"], torch.arange(60_000.)) or found["iteration"] != 3:
        return "an object differs"
    return "equal"


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def kill(rank, world, directory, victim):
    """Save, and have a rank killed when it has written half of its items."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async as target
    write, rank_process, seen = target._write_item, os.getpid(), []

    @functools.wraps(write)  # Megatron looks at its signature
    def dying(*args, **kwargs):
        seen.append(1)
        if len(seen) > 2:
            os.kill(rank_process, signal.SIGKILL)
            os._exit(1)
        return write(*args, **kwargs)
    if rank == victim:
        target._write_item = dying
    return save(rank, world, directory, "deflate", world)


def main(rank, world, port, path):
    on_a_cpu()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    with open(path) as file:
        steps = json.load(file)
    results = [globals()[name](rank, world, *arguments) for name, *arguments in steps]
    with open(f"{path}.{rank}", "w") as file:
        json.dump(results, file)
    os._exit(0)  # the manager process of 0.16.1 has no end


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4])
