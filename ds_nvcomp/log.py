"""The package's logger. DeepSpeed's own shows warnings only, and what a save cost should be seen."""
from __future__ import annotations

import logging

logger = logging.getLogger("ds_nvcomp")
if not logger.handlers:  # an application that wants the lines elsewhere replaces the handler or sets the level
    _handler = logging.StreamHandler()
    _handler.setFormatter(logging.Formatter("[%(asctime)s] [ds_nvcomp] %(message)s", "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(_handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
