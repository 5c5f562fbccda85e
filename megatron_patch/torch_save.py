"""`--ckpt-format torch` and local checkpoints: Megatron gives them to torch.save. Its own files are recognised by their names.

Transformer Engine's extra state and sharded objects go through torch.save as well, into memory; what is no file of these names is
torch's, byte for byte.
"""
from __future__ import annotations

import functools
import os
import re

import torch

import ds_nvcomp
from ds_nvcomp.config import Config

# Megatron's model and optimizer (training/checkpointing.py, core/optimizer), and the local checkpoints of NVIDIA Resiliency Extension.
_FILES = re.compile(r"model_optim_rng\.pt|distrib_optim\.pt|layer_wise_optimizer_\d+\.pt|iter_\d+_\d+_local(\.dirty)?\.pt")


def is_megatrons(f) -> bool:
    """Whether `f` (a path, or an open file) is one of the large files of a checkpoint."""
    name = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
    return isinstance(name, (str, os.PathLike)) and _FILES.fullmatch(os.path.basename(os.fspath(name))) is not None


def patch(config: Config):
    """Have torch.save compress Megatron's files; returns a function that undoes it."""
    original = torch.save

    @functools.wraps(original)
    def save(obj, f, pickle_module=torch.serialization.pickle, pickle_protocol=torch.serialization.DEFAULT_PROTOCOL,
             _use_new_zipfile_serialization=True, _disable_byteorder_record=False):
        plain = pickle_module is not torch.serialization.pickle or not _use_new_zipfile_serialization
        if plain or not is_megatrons(f):
            return original(obj, f, pickle_module, pickle_protocol, _use_new_zipfile_serialization, _disable_byteorder_record)
        ds_nvcomp.save(obj, f, config, pickle_protocol=pickle_protocol)

    def undo():
        if torch.save is save:
            torch.save = original
    torch.save = save
    return undo
