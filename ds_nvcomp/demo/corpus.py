"""Text that every machine has: the sources of Python's standard library, as one run of bytes."""
from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

BYTES = 4 << 20


def load(limit: int = BYTES) -> torch.Tensor:
    """uint8 [at most `limit`]. The order is by name, so every process and every run on this machine reads the same."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: torch.Tensor, step: int, rank: int, size: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [size, length] of one rank's step: where to read follows from both, so a resumed run reads on."""
    draw = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - length - 1, (size, 1), generator=draw)
    windows = text[starts + torch.arange(length + 1)].long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
