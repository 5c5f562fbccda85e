"""What the patches need of Megatron. A version in which it is not as expected is refused, before anything is changed."""
from __future__ import annotations

import importlib
import inspect

from ds_nvcomp.errors import UnsupportedSetupError

TESTED = "0.16.1, 0.18.2, 0.19 and main of August 2026"
MCORE_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
NVRX_WRITER = "nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async"
_PRELOAD = ["write_buckets", "non_blocking"]


def writers() -> list[type]:
    """The classes that stage and write `torch_dist` checkpoints: Megatron's, and NVRx's where that is installed.

    Raises `UnsupportedSetupError` for one whose staging is not the function that the patch takes the place of.
    """
    found = [_writer(MCORE_WRITER, f"megatron-core {_version()}")]
    try:
        importlib.import_module("nvidia_resiliency_ext")
    except ImportError:
        return found
    return found + [_writer(NVRX_WRITER, "nvidia-resiliency-ext")]


def _writer(module: str, owner: str) -> type:
    try:
        writer = importlib.import_module(module).FileSystemWriterAsync
        parameters = list(inspect.signature(writer.preload_tensors).parameters)
    except (ImportError, AttributeError) as err:
        raise _unsupported(owner, f"{module} has no FileSystemWriterAsync.preload_tensors ({err})") from err
    if parameters != _PRELOAD:
        raise _unsupported(owner, f"FileSystemWriterAsync.preload_tensors takes {parameters}, expected {_PRELOAD}")
    return writer


def _unsupported(owner: str, what: str) -> UnsupportedSetupError:
    hint = " Use --async-strategy mcore, and uninstall nvidia-resiliency-ext," if "resiliency" in owner else ""
    return UnsupportedSetupError(f"--nvcomp-checkpoint does not know this {owner}: {what}. Tested with Megatron {TESTED}.{hint or ' Use one of these,'} "
                                 "or train with --nvcomp-checkpoint off.")


def _version() -> str:
    try:
        return importlib.import_module("megatron.core").__version__
    except (ImportError, AttributeError):
        return "of unknown version"
