"""Which fp32 master weights of a DeepSpeed engine can be linked: those whose 16-bit weights are in the model file of the same checkpoint.

ZeRO-1 and -2 keep the 16-bit weights of a group in one flat buffer, and each rank an fp32 copy of its part of it. Parameters are views
of the buffer, so addresses tell which parameters, by the names under which they are saved, a part is made of.
"""
from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch

from .archive.link import Link
from .archive.scan import NAME_CHARS
from .log import logger
from .pipeline import Weights

_KINDS = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
PADDING = 64  # one in so many numbers of a partition, at its end, may be no parameter's


@dataclass
class Links:
    """Of this rank, {address of an fp32 partition: its link}. On the rank that `writes` the model file also those of the others, made from
    its own weights: what they link to is in that file only if it is the same."""
    own: dict[int, Link] = field(default_factory=dict)
    others: list[Link] = field(default_factory=list)
    writes: bool = False


def links_of(host) -> Links:
    """The links of a DeepSpeedEngine; none where nothing can be linked.

    Not of pipeline stages and experts, whose weights are in files of their own, nor where each node has storage of its own and not all
    have the model file.
    """
    try:
        if host is None or _has_other_files(host):
            return Links()
        file, names, found = os.path.basename(host._get_ckpt_name("", "")), _names(host), Links()
        for master, partitions, rank in _partitions(host.optimizer):
            link = _link(master, partitions[rank], names, file)
            if link is not None:
                found.own[master.data_ptr()] = link
            if rank == 0:
                links = (_link(master, weights, names, file) for weights in partitions[1:])
                found.others += [link.of(master.numel()) for link in links if link is not None]
                found.writes = True
        return found
    except Exception as err:  # another version's optimizer, or tensors of a kind of their own: nothing is linked, and nothing is lost
        logger.warning(f"master weights are stored in full: this DeepSpeed's optimizer looks otherwise ({type(err).__name__}: {err}).")
        return Links()


def _has_other_files(host) -> bool:
    pipeline = any(kind.__name__ == "PipelineModule" for kind in type(host.module).__mro__)
    return pipeline or host.zero_optimization_stage() > 2 or bool(getattr(host._config, "use_node_local_storage", False))


def _partitions(optimizer) -> list[tuple[torch.Tensor, list[torch.Tensor], int]]:
    """Of each group this rank's fp32 partition, the 16-bit partitions of all ranks, and which of them this one is."""
    for masters, partitions, groups in (("single_partition_of_fp32_groups", "parallel_partitioned_bit16_groups", "real_dp_process_group"),
                                        ("fp32_groups_flat_partition", "bf16_partitioned_groups", "real_dp_process_group")):
        if hasattr(optimizer, masters) and hasattr(optimizer, partitions):
            ranks = [torch.distributed.get_rank(group) for group in getattr(optimizer, groups)]
            return list(zip(getattr(optimizer, masters), getattr(optimizer, partitions), ranks))
    return []


def _names(host) -> list[tuple[int, int, str]]:
    """(first address, address behind the last, name) of the 16-bit tensors in the model file, by address."""
    state = host.module_state_dict()
    if getattr(host, "has_moe_layers", False):
        state = host._get_non_moe_state_dict(dict(state))
    return sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, f"module.{name}") for name, tensor in state.items()
                  if isinstance(tensor, torch.Tensor) and len(name) <= NAME_CHARS and tensor.dtype in _KINDS and tensor.numel()
                  and tensor.is_contiguous())


def _link(master: torch.Tensor, weights: torch.Tensor, names, file: str) -> Link | None:
    if weights.dtype not in _KINDS or not weights.numel() or master.numel() != weights.numel() or not weights.is_contiguous():
        return None
    at, stop, fragments = weights.data_ptr(), weights.data_ptr() + weights.nbytes, []
    for begin, end, name in names:
        if begin <= at < min(end, stop):
            fragments.append((name, (at - begin) // 2, (min(end, stop) - at) // 2))
            at = min(end, stop)
    if (stop - at) * PADDING > weights.nbytes or not fragments:
        return None
    covered = weights.detach().view(torch.uint8)[:at - weights.data_ptr()]
    return Link(Weights(covered, _KINDS[weights.dtype]), file, fragments)
