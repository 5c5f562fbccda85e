"""Comparison of everything a checkpoint can hold, by bits."""
from __future__ import annotations

import hashlib

import torch


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def sha(value) -> str:
    """Equal for values that are equal in every bit."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest, value):
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(raw(value))
    elif isinstance(value, dict):
        for key in value:
            digest.update(f"{key}:".encode())
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"[{len(value)}]".encode())
        for item in value:
            _feed(digest, item)
    else:
        digest.update(f"{value!r};".encode())


def differences(a, b, where: str = "", seen=None) -> list[str]:
    """Where two loaded checkpoints differ: type, structure, dtype, shape, stride, attributes, or bits."""
    seen = seen if seen is not None else set()
    if (id(a), id(b)) in seen:
        return []
    seen.add((id(a), id(b)))
    if isinstance(a, torch.Size):  # DeepSpeed's torch engine saves a clone, in which sizes have become tuples
        a = tuple(a)
    if isinstance(b, torch.Size):
        b = tuple(b)
    if type(a) is not type(b):
        return [f"{where}: {type(a)} against {type(b)}"]
    if isinstance(a, torch.Tensor):
        same = (a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.requires_grad == b.requires_grad
                and a.device == b.device and raw(a) == raw(b))
        found = [] if same else [f"{where}: {a.dtype} {tuple(a.shape)} {a.stride()} differs from "
                                 f"{b.dtype} {tuple(b.shape)} {b.stride()}"]
        return found + differences(vars(a), vars(b), f"{where}.__dict__", seen)
    if isinstance(a, dict):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} against {list(b)}"]
        # ZeRO-3 numbers parameters through the life of the process, so a second engine in it counts on.
        found = [item for key in a if key != "ds_id" for item in differences(a[key], b[key], f"{where}.{key}", seen)]
        # ... and a state_dict has lost its `_metadata`. Ours, which saves the original, may know more than the plain one.
        attributes = getattr(b, "__dict__", {})
        return found + [f"{where}.{key}" for key in attributes if differences(getattr(a, key, None), attributes[key])]
    if isinstance(a, (list, tuple, set)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} against {len(b)} items"]
        return [item for index, (x, y) in enumerate(zip(a, b)) for item in differences(x, y, f"{where}[{index}]", seen)]
    if hasattr(a, "__dict__") and not isinstance(a, type) and not callable(a):
        return differences(vars(a), vars(b), f"{where}.__dict__", seen)
    return [] if a == b or repr(a) == repr(b) else [f"{where}: {a!r} against {b!r}"]


def compare_directories(ours, plain, *, ignore=("ds_config",)) -> list[str]:
    """Differences between two checkpoint directories, file by file, as torch.load sees them."""
    # The manifest is ours alone: no host reads it, no glob of theirs matches it.
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*")
                    if path.is_file() and path.name != "nvcomp_manifest.json")
             for root in (ours, plain)]
    if names[0] != names[1]:
        return [f"files: {names[0]} against {names[1]}"]
    found = []
    for name in names[0]:
        if name.endswith(".pt"):
            loaded = [torch.load(root / name, weights_only=False, map_location="cpu") for root in (ours, plain)]
            for one in loaded:
                for key in ignore:
                    one.pop(key, None) if isinstance(one, dict) else None
            found += differences(*loaded, name)
        elif (ours / name).read_bytes() != (plain / name).read_bytes():
            found.append(f"{name} differs")
    return found
