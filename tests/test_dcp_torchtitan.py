"""As torchtitan's checkpoint manager saves: an FSDP2 model and flattened optimizer state by dcp.async_save, in a process or a thread of its
own; two ranks save while training goes on, one loads.
"""
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                           set_optimizer_state_dict)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor

import ds_nvcomp.dcp
from ds_nvcomp.checkpoint.distributed import scan_directory
from ds_nvcomp.checkpoint.verify import verify
from ds_nvcomp.dcp import NvcompReader, NvcompWriter
from test_dcp import bits, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers(Stateful):
    """torchtitan's OptimizersContainer, of one model."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        return get_optimizer_state_dict(self.model, self.optimizer, options=FLAT)

    def load_state_dict(self, state_dict):
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state_dict, options=FLAT)


class TrainState(Stateful):
    def __init__(self, step=0):
        self.step = torch.tensor(step)

    def state_dict(self):
        return {"step": self.step, "losses": [0.5, float("inf"), self.step.item()]}

    def load_state_dict(self, state_dict):
        self.step, self.losses = state_dict["step"], state_dict["losses"]


def training(world, seed):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 201), torch.nn.GELU(), torch.nn.Linear(201, 64), torch.nn.LayerNorm(64))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(4, 64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(state_dict):
    """{name: bits}, shards put together."""
    found = {}
    for name, value in state_dict.items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        found[name] = bits(value.detach().cpu()) if isinstance(value, torch.Tensor) else value
    return found


def states(model, optimizer, count):
    return {**model.state_dict(), "optimizer": Optimizers(model, optimizer), "train_state": TrainState(count)}


def write(rank, world, tmp_path, how, staged):
    if staged:  # as if tensors were on a GPU
        ds_nvcomp.dcp._is_encoded_here = lambda value: isinstance(value, torch.Tensor)
    model, optimizer = training(world, seed=1)
    group = torch.distributed.new_group(backend="gloo")  # torchtitan's too: training goes on in the other one
    for count in (1, 2):  # the second goes over the first
        step(model, optimizer)
        expected = {"model": whole(get_model_state_dict(model)), "optimizer": whole(Optimizers(model, optimizer).state_dict())}
        future = dcp.async_save(states(model, optimizer, count), storage_writer=NvcompWriter(tmp_path / "saved", {"min_bytes": 0}),
                                async_checkpointer_type=AsyncCheckpointerType(how), process_group=group)
        step(model, optimizer)  # training goes on
        future.result()
    if rank == 0:
        torch.save(expected, tmp_path / "expected.pt")


def read(rank, world, tmp_path):
    expected = torch.load(tmp_path / "expected.pt", weights_only=False)
    for reader in (FileSystemReader, NvcompReader):
        model, optimizer = training(world, seed=2)
        step(model, optimizer)
        target = states(model, optimizer, 0)
        dcp.load(target, storage_reader=reader(tmp_path / "saved"))
        assert whole(get_model_state_dict(model)) == expected["model"]
        assert whole(Optimizers(model, optimizer).state_dict()) == expected["optimizer"]
        assert target["train_state"].step == 2 and target["train_state"].losses == [0.5, float("inf"), 2]


@pytest.mark.parametrize("how, staged", [("thread", False), ("process", False), ("thread", True), ("process", True)])
def test_async_save_of_two_ranks_and_a_load_by_one(tmp_path, how, staged):
    run_ranks(2, write, tmp_path, how, staged)
    assert verify(tmp_path / "saved", decode=True) == []
    found = scan_directory(tmp_path / "saved")
    encoded = {row.name for row in found.rows if row.storage.encoding is not None}
    assert any(name.startswith("0.weight") for name in encoded) and any("exp_avg_sq" in name for name in encoded)
    run_ranks(1, read, tmp_path)
