"""torchtitan 0.2, unmodified, with its checkpoints compressed. In its TOML, of which llama3_8b_v0_2.toml has our part:

    [experimental]
    custom_import = "titan_nvcomp_v0_2"         # with PYTHONPATH=configs/torchtitan

That version has no place for a checkpoint manager of one's own, so importing this replaces the method that saves. Loading is torch's own.
"""
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from ds_nvcomp.dcp import NvcompWriter

NVCOMP_CHECKPOINT = {"codec": "deflate"}  # keys of `ds-nvcomp config --explain`

_plain = CheckpointManager.dcp_save


@torch.no_grad()
def dcp_save(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection=False, to_hf=False):
    if to_hf:
        return _plain(self, state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
    writer = NvcompWriter(checkpoint_id, NVCOMP_CHECKPOINT)
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


CheckpointManager.dcp_save = dcp_save
