"""A checkpoint file: an ordinary torch.save zip in which each large tensor storage pickles itself compressed."""
from __future__ import annotations

import torch

from .writer import SaveReport, save
from .reader import load
from .storage import unpack

__all__ = ["save", "load", "unpack", "SaveReport"]

torch.serialization.add_safe_globals([unpack])  # weights_only=True: it runs nothing but decoders
