"""Puts the patches in place, all or none, and takes them out again."""
from __future__ import annotations

import functools
from typing import Callable

import torch.distributed.checkpoint as dcp

from ds_nvcomp.config import Config
from ds_nvcomp.dcp import NvcompWriter
from ds_nvcomp.errors import ConfigError
from ds_nvcomp.log import logger

from . import compat, torch_dist, torch_save

_undo: list[Callable] = []
_applied: Config | None = None


def apply(config: Config | dict | None = None) -> None:
    """Compress every checkpoint that Megatron saves from now on in this process. Applied again, the later configuration counts.

    Raises `ConfigError`, and `UnsupportedSetupError` for a Megatron that the patches do not fit; then nothing is changed.
    """
    global _applied
    config = Config.of(config)
    if config.behind:
        raise ConfigError("async and overlap are DeepSpeed's; Megatron's --async-save does that.")
    if config == _applied:
        return
    writers = compat.writers()
    revert()
    _undo.extend(torch_dist.patch(writer, config) for writer in writers)
    _undo.append(torch_save.patch(config))
    _undo.append(_patch_dcp(config))
    _applied = config
    logger.info(f"Megatron's checkpoints are compressed with {config.codec}.")


def revert() -> None:
    """Save as Megatron does by itself. Files that are compressed stay readable."""
    global _applied
    while _undo:
        _undo.pop()()
    _applied = None


def _patch_dcp(config: Config):
    """Formats torch_dcp and fsdp_dtensor: Megatron makes a `torch.distributed.checkpoint.FileSystemWriter`, by that name."""
    original = dcp.FileSystemWriter

    class FileSystemWriter(NvcompWriter):
        @functools.wraps(original.__init__)
        def __init__(self, path, *args, **kwargs):
            super().__init__(path, config, *args, **kwargs)

    def undo():
        dcp.FileSystemWriter = original
    dcp.FileSystemWriter = FileSystemWriter
    return undo
