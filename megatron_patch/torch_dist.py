"""`torch_dist` checkpoints: what Megatron copies to the host before it writes is encoded there and then, on the GPU.

Megatron plans what is to be written, hands the tensors to `FileSystemWriterAsync.preload_tensors` for the copy to the host, and writes
what that returns: in the training process (a sync save), in a fork of it, or in a persistent worker, which calls `preload_tensors` itself
on tensors of the training process. Its own functions write bytes and tensors; ours makes bytes of all of them. Names in here are pickled,
so a worker finds them by importing this module, and needs no patch.
"""
from __future__ import annotations

import functools
import multiprocessing
import os
from dataclasses import replace

import torch
from torch.distributed.checkpoint.planner import WriteItemType

from ds_nvcomp.archive.items import Item, encode_items
from ds_nvcomp.checkpoint.auto import Chooser
from ds_nvcomp.config import Config


def preload(config: Config, forks: bool, write_buckets: list, non_blocking: bool = True) -> list:
    """Megatron's preload_tensors: buckets (path, file, (bytes, tensors)) of which all is on the host, and here also encoded, as bytes.

    `forks` says that files are written by forked processes. Raises `EncodeError`, `CodecUnavailableError`.
    """
    if not write_buckets:
        return []
    chosen = _chooser(config).config(os.path.dirname(write_buckets[0][0]))
    items = [(write_item, data) for _, _, (bytes_data, tensor_data) in write_buckets for write_item, data in (*bytes_data, *tensor_data)]
    encoded = encode_items([data for _, data in items], chosen, [write_item.index.fqn for write_item, _ in items])
    if forks or not multiprocessing.current_process().daemon:  # where it is written next, or by a fork; the worker does it behind training
        for item in encoded:
            if isinstance(item, Item):
                item.gather()
    written = iter(zip((write_item for write_item, _ in items), encoded))
    result = []
    for path, key, (bytes_data, tensor_data) in write_buckets:
        own = [next(written) for _ in (*bytes_data, *tensor_data)]
        result.append((path, key, ([(replace(write_item, type=WriteItemType.BYTE_IO), data) for write_item, data in own], [])))
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # as Megatron does: the tensors may change when this returns
    return result


@functools.lru_cache
def _chooser(config: Config) -> Chooser:
    """One a process, so that `auto` measures once."""
    return Chooser(config, rank=int(os.environ.get("RANK", 0)))


def patch(writer: type, config: Config):
    """Have a `FileSystemWriterAsync` encode; returns a function that undoes it."""
    original = writer.__dict__["preload_tensors"]
    writer.preload_tensors = staticmethod(functools.partial(preload, config, hasattr(writer, "write_preloaded_data_multiproc")))

    def undo():
        writer.preload_tensors = original
    return undo
