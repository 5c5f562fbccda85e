"""`load`: torch.load, with errors that say which file."""
from __future__ import annotations

import os

import torch

from ..errors import DsNvcompError


def load(f, map_location=None, *, weights_only: bool | None = None, mmap: bool | None = None, **pickle_load_args):
    """Load what `save` or `torch.save` wrote; the arguments are torch.load's. Tensors are decoded on the device `map_location` names.

    Raises a `FormatError` naming file, tensor and chunk for damaged bytes, `CodecUnavailableError` where the codec cannot run
    on this machine, and whatever torch.load raises.
    """
    try:
        return torch.load(f, map_location=map_location, weights_only=weights_only, mmap=mmap, **pickle_load_args)
    except DsNvcompError as err:
        raise err.at(path=os.fspath(f)) if isinstance(f, (str, os.PathLike)) else err
