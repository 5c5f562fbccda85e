"""Small models with what makes checkpoints difficult: tied and frozen weights, buffers, dropout, experts, stages."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, VOCABULARY = 64, 128


class Model(nn.Module):
    """A language model of a kind. Its output weight is its embedding's; its `frozen` layer does not learn."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(8000))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, inputs, targets):
        if self.training:
            self.seen += 1.5
        x = self.frozen(self.embed(inputs))
        x = x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class MoEModel(nn.Module):
    """Two experts, shared among `ep_size` ranks."""

    def __init__(self, ep_size: int):
        super().__init__()
        from deepspeed.moe.layer import MoE
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(hidden_size=WIDTH, expert=expert, num_experts=2, ep_size=ep_size, k=1, use_rts=False, min_capacity=0)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs, targets):
        x = self.embed(inputs)
        x = x + self.moe(x)[0]
        return F.cross_entropy(self.head(x).float().flatten(0, 1), targets.flatten())


class Embed(nn.Embedding):
    def forward(self, inputs):
        return super().forward(inputs)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


def pipeline(stages: int):
    """A PipelineModule whose layers are shared out among `stages`."""
    from deepspeed.pipe import LayerSpec, PipelineModule
    layers = [LayerSpec(Embed, VOCABULARY, WIDTH), *[LayerSpec(Residual)] * 2, LayerSpec(nn.Linear, WIDTH, VOCABULARY)]
    return PipelineModule(layers=layers, num_stages=stages, partition_method="uniform",
                          loss_fn=lambda x, y: F.cross_entropy(x.float().flatten(0, 1), y.flatten()))


def batch(step: int, rank: int):
    draw = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(VOCABULARY, (4, 17), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
