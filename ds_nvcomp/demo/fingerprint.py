"""What of a training run must be the same, bit for bit, however it got there."""
from __future__ import annotations

import hashlib

import torch


def of(engine) -> dict[str, str]:
    """sha256 of each part of this rank's state of a DeepSpeed engine and of its random number generators."""
    parts = {"weights": {name: getattr(p, "ds_tensor", p) for name, p in engine.module.named_parameters()},
             "buffers": dict(engine.module.named_buffers()),
             "LR": [engine.get_lr(), engine.lr_scheduler.state_dict() if engine.lr_scheduler else None],
             "steps": [engine.global_steps, engine.global_samples],
             "RNG": rng_state(engine.device)}
    optimizer = engine.optimizer
    for attribute in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition"):
        if getattr(optimizer, attribute, None):
            parts["master weights"] = list(getattr(optimizer, attribute))
    for state in getattr(optimizer, "optimizer", optimizer).state.values():
        for name, value in state.items():
            parts.setdefault(name, []).append(value)
    return {name: digest(value) for name, value in parts.items()}


def rng_state(device) -> dict:
    """The state of torch's generators that a process on `device` draws from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.device(device).type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict, device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def digest(value) -> str:
    """sha256 over the bits of the tensors in `value`, their dtypes and shapes, and everything else as repr writes it."""
    sha = hashlib.sha256()
    _update(sha, value)
    return sha.hexdigest()


def _update(sha, value):
    if isinstance(value, torch.Tensor):
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            sha.update(f"{key}:".encode())
            _update(sha, value[key])
    elif isinstance(value, (list, tuple)):
        sha.update(f"[{len(value)}]".encode())
        for item in value:
            _update(sha, item)
    else:
        sha.update(f"{value!r};".encode())
