"""A checkpoint file: an ordinary torch.save zip in which each large tensor storage pickles itself compressed."""
from __future__ import annotations

import torch

from .writer import SaveReport, save
from .reader import load
from .seal import check_seal, sealed
from .storage import unpack, unpack_untrusted

__all__ = ["save", "load", "unpack", "check_seal", "sealed", "SaveReport"]

# weights_only=True: these run nothing but checks, and decoders that are safe on any bytes. Where autoload has registered its
# stand-ins, they stay: torch looks a function up again when it calls it, and this import may be in the middle of a load.
_registered = {entry[1] for entry in torch.serialization.get_safe_globals() if isinstance(entry, tuple)}
torch.serialization.add_safe_globals(
    [function for function in (unpack_untrusted, check_seal, sealed) if f"ds_nvcomp.archive.{function.__name__}" not in _registered])
