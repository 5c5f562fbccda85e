"""FSDP2 with compressed checkpoints, on GPUs or without any: train, save behind training, and resume where the last checkpoint was.

    torchrun --nproc-per-node 2 configs/fsdp2_dcp.py checkpoints        # and once more, also with another number of processes

Only the two lines with Nvcomp in them are ours. Plain `dcp.load(state, checkpoint_id=...)` reads these checkpoints as well.
"""
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ds_nvcomp.dcp import NvcompReader, NvcompWriter

STEPS, EVERY = 10, 5


def main(root: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    of_saves = dist.new_group(backend="gloo")  # ranks agree on a save while training uses the other group
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first, saving = 0, None
    complete = [path for path in root.glob("step-*") if (path / ".metadata").exists()]  # written last, so only a whole checkpoint has it
    if complete:
        newest = max(complete, key=lambda path: int(path.name.split("-")[1]))
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, storage_reader=NvcompReader(newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        first = state["step"]

    for step in range(first + 1, first + STEPS + 1):
        data = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.9f}", flush=True)
        if step % EVERY == 0:
            if saving is not None:
                saving.result()  # one at a time; here a save that failed raises
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            writer = NvcompWriter(root / f"step-{step}", {"codec": "deflate"})
            saving = dcp.async_save(state, storage_writer=writer, process_group=of_saves)
    if saving is not None:
        saving.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
