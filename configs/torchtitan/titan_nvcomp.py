"""torchtitan (main, 2026), unmodified, with its checkpoints compressed: a checkpoint manager, and a configuration that uses it.

    PYTHONPATH=configs/torchtitan MODULE=titan_nvcomp CONFIG=llama3_8b ./run_train.sh      # in torchtitan's folder

For a configuration of your own, set `config.checkpoint` as `llama3_8b` does. `async_mode="async"` encodes on the GPU before anything is
copied to the host. "async_with_pinned_mem" copies first, and its process encodes on the CPU. Hugging Face exports stay safetensors.
"""
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.distributed.checkpoint as dcp
import tyro
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import Trainer

from ds_nvcomp.config import Config as NvcompConfig
from ds_nvcomp.dcp import NvcompReader, NvcompWriter


class NvcompCheckpointManager(CheckpointManager):
    """torchtitan's manager, with other writers and readers. A checkpoint of either one is loaded by the other."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        nvcomp_checkpoint: Annotated[dict, tyro.conf.Suppress] = field(default_factory=dict)
        """Keys of `ds-nvcomp config --explain`."""

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            NvcompConfig.of(self.nvcomp_checkpoint)  # what is wrong is said now, and not at the first save

    def __init__(self, config: Config, **kwargs) -> None:
        super().__init__(config, **kwargs)
        self._nvcomp_checkpoint = config.nvcomp_checkpoint

    @torch.no_grad()
    def dcp_save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False):
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        writer = NvcompWriter(checkpoint_id, self._nvcomp_checkpoint)
        if async_mode == AsyncMode.DISABLED:
            saved = dcp.save(state_dict, storage_writer=writer)
        elif async_mode == AsyncMode.ASYNC:
            saved = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg)
        else:
            saved = dcp.async_save(state_dict, storage_writer=writer, process_group=self.pg,
                                   async_checkpointer_type=AsyncCheckpointerType.PROCESS, async_stager=self.stager)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(self, state_dict, checkpoint_id, from_hf, from_quantized):
        """Without this method, torch's reader decodes on the CPU, and whole items."""
        if from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        dcp.load(state_dict, storage_reader=NvcompReader(checkpoint_id))
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)


def llama3_8b() -> Trainer.Config:
    from torchtitan.models.llama3 import config_registry
    config = config_registry.llama3_8b()
    config.checkpoint = NvcompCheckpointManager.Config(interval=500, async_mode="async", nvcomp_checkpoint={"codec": "deflate"})
    return config
