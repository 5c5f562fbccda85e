"""Whether this process can run the GPU pipeline, asked once."""
from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def gpu_missing() -> str | None:
    """What is missing, in words that say how to get it, or None. Never initialises CUDA where there is no device."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device here"
    for package in ("cupy", "nvidia.nvcomp"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            cuda = (torch.version.cuda or "13").split(".")[0]
            return f"the package {package} is not installed (pip install 'ds_nvcomp[cu{cuda}]')"
    return None
