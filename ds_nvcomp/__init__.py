"""ds_nvcomp: lossless compression of DeepSpeed, Megatron and PyTorch checkpoints, on the GPU.

`save` and `load` are torch.save and torch.load with compression in between; `install` puts the DeepSpeed engine in place where the
entry point has not done so. Importing the package takes milliseconds: torch, CuPy and nvCOMP are imported when first used.
"""
from __future__ import annotations

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "save": "archive", "load": "archive", "SaveReport": "archive", "wait": "checkpoint.background", "Config": "config",
    "install": "autoload",
    **dict.fromkeys(importlib.import_module(".errors", __name__).__all__, "errors"),
}
__all__ = ["__version__", *sorted(_EXPORTS)]


def __getattr__(name):
    if name in _EXPORTS:
        value = getattr(importlib.import_module(f".{_EXPORTS[name]}", __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
