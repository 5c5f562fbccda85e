"""A GPT trained with DeepSpeed on real text: the checkpoint that the benchmarks measure.

    python benchmarks/gpt.py --out DIR --steps 300 [--engine nvcomp|torch] [--codec deflate] [--zero 2] [--resume] [--save-at 250]

Text: the Python standard library's own sources, as bytes. Prints one JSON line: losses as hex, stall of the save, a hash of the state.
"""
from __future__ import annotations

import argparse
import hashlib
import json
import os
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import deepspeed  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

VOCABULARY, CONTEXT = 256, 512


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width, layers, heads):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().view(-1, VOCABULARY), targets.reshape(-1))


def corpus() -> torch.Tensor:
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if "site-packages" not in path.parts)
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def state_hash(engine) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(engine.module.state_dict().items()):
        digest.update(name.encode() + tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    for state in engine.optimizer.optimizer.state.values():
        for key in sorted(state):
            if isinstance(state[key], torch.Tensor) and state[key].dim():
                digest.update(key.encode() + state[key].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--engine", choices=("nvcomp", "torch"), default="nvcomp")
    parser.add_argument("--codec", default="deflate")
    parser.add_argument("--link", default="auto", help="link_master_weights (%(default)s)")
    parser.add_argument("--zero", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-at", type=int, default=250)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=17)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)  # its backward pass is not deterministic
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(1)
    model = GPT(args.width, args.layers, args.width // 64)
    config = {
        "train_micro_batch_size_per_gpu": args.batch, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "zero_optimization": {"stage": args.zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, args.beta2], "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50, "warmup_max_lr": 3e-4}},
    }
    if args.engine == "nvcomp":
        config["nvcomp_checkpoint"] = {"enabled": True, "codec": args.codec, "link_master_weights": args.link}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    text = corpus().to(engine.device)
    result = {"engine": type(engine.checkpoint_engine).__name__, "parameters": sum(p.numel() for p in model.parameters()), "losses": {}}
    step = 0
    if args.resume:
        began = time.perf_counter()
        _, client = engine.load_checkpoint(args.out)
        step, result["load_seconds"] = client["step"], time.perf_counter() - began
        result["state_at_checkpoint"] = state_hash(engine)
    while step < args.steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        at = torch.randint(len(text) - CONTEXT - 1, (args.batch,), generator=generator)
        batch = torch.stack([text[i:i + CONTEXT + 1] for i in at.tolist()]).long()
        loss = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(loss)
        engine.step()
        step += 1
        result["losses"][step] = loss.item().hex()
        if step == args.save_at and not args.resume:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            began = time.perf_counter()
            engine.save_checkpoint(args.out, client_state={"step": step})
            result["save_seconds"] = time.perf_counter() - began
            result["state_at_checkpoint"] = state_hash(engine)
    result["state"], result["loss"] = state_hash(engine), float.fromhex(result["losses"][step])
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
