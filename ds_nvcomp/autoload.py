"""Switching ds_nvcomp on without an import in the training script.

torch calls `autoload` at the end of `import torch` (entry point group torch.backends). It costs microseconds, imports nothing heavy,
and never raises: a broken installation of ours must not break `import torch`. DS_NVCOMP_AUTOLOAD=0 switches it off.
"""
from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import sys
import warnings
from typing import Callable, NamedTuple



def autoload() -> None:
    """The entry point."""
    if os.environ.get("DS_NVCOMP_AUTOLOAD", "1").lower() in ("0", "false", "off", "no"):
        return
    try:
        install()
    except Exception as err:
        warnings.warn(f"ds_nvcomp could not switch itself on ({type(err).__name__}: {err}); import ds_nvcomp; ds_nvcomp.install() "
                      "shows why. Set DS_NVCOMP_AUTOLOAD=0 to silence this.", RuntimeWarning, stacklevel=2)


def install() -> None:
    """Make DeepSpeed's `nvcomp_checkpoint` block and Megatron's `--nvcomp-checkpoint` work, and torch.load(weights_only=True) read our files.
    Idempotent.

    DeepSpeed and Megatron may be imported before or after. Raises whatever keeps it from working.
    """
    import torch
    torch.serialization.add_safe_globals(_SAFE)
    for name, host in _HOSTS.items():
        if name in sys.modules:
            host.patch(sys.modules[name])
    if not any(isinstance(finder, _PostImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _PostImport())


class _Lazy:
    """A function of `archive`, which is imported when a file needs it."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *args):
        from . import archive
        return getattr(archive, self._name)(*args)


_SAFE = [(_Lazy(name), f"ds_nvcomp.archive.{known_as}") for known_as, name in (
    ("unpack", "unpack_untrusted"), ("check_seal", "check_seal"), ("sealed", "sealed"))]


def _patch_deepspeed(module) -> None:
    from .deepspeed_engine import patch
    patch(module)


def _refuse_when_asked(module, reason: Exception) -> None:
    """Our part does not load: DeepSpeed works without it, unless the configuration asks for it."""
    host = module.DeepSpeedEngine
    original = host._configure_checkpointing

    @functools.wraps(original)
    def _configure_checkpointing(self, *args, **kwargs):
        block = (getattr(self._config, "_param_dict", None) or {}).get("nvcomp_checkpoint")
        if block is not None and not (isinstance(block, dict) and block.get("enabled", True) is False):
            raise RuntimeError("The DeepSpeed configuration has an 'nvcomp_checkpoint' block, but ds_nvcomp could not be loaded "
                               f"({type(reason).__name__}: {reason}). Mend the installation, or remove the block.") from reason
        return original(self, *args, **kwargs)

    host._configure_checkpointing = _configure_checkpointing


def _patch_megatron(module) -> None:
    from megatron_patch.arguments import wrap
    wrap(module)


def _say_why(module, reason: Exception) -> None:
    """Our part does not load: Megatron works without it, and its parser refuses the argument."""
    warnings.warn(f"Megatron's argument --nvcomp-checkpoint is not there ({type(reason).__name__}: {reason}).", RuntimeWarning, stacklevel=2)


class _Host(NamedTuple):
    """What is done to a host's module when it has run, and what where that fails."""
    patch: Callable
    failed: Callable


_HOSTS = {"deepspeed.runtime.engine": _Host(_patch_deepspeed, _refuse_when_asked),
          "megatron.training.arguments": _Host(_patch_megatron, _say_why)}


class _PostImport(importlib.abc.MetaPathFinder):
    """Finds hosts' modules as everyone else does, and has them patched when they have run."""

    def __init__(self):
        self._looking = set()

    def find_spec(self, name, path=None, target=None):
        if name not in _HOSTS or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader, _HOSTS[name])
        return spec


class _Patching(importlib.abc.Loader):
    """A module's own loader, and the patch after it."""

    def __init__(self, loader, host: _Host):
        self._loader, self._host = loader, host

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        module.__spec__.loader = module.__loader__ = self._loader  # so that inspect and pickle see the file
        self._loader.exec_module(module)
        try:
            self._host.patch(module)
        except Exception as err:
            self._host.failed(module, err)
