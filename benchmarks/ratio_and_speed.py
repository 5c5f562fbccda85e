"""Ratios and device speeds on a trained GPT's ZeRO-2 checkpoint, beside torch.save and nvCOMP Zstd on raw bytes, in one run.

    python benchmarks/ratio_and_speed.py [--out RESULTS_DIR] [--steps 350]      (one NVIDIA GPU; about 4 minutes)

Trains benchmarks/gpt.py, saving with our engine and with DeepSpeed's own, resumes and compares bits, then encodes every kind of
tensor with several codecs, and times the encoder and decoder on 8 GiB of master weights with device events, without a host copy.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

from ds_nvcomp import Config, __version__
from ds_nvcomp.encoding import codecs, transforms
from ds_nvcomp.pipeline import Source, encode, gpu, parse_payload

HERE = Path(__file__).parent
DEVICE = "cuda:0"


def train(out, *args) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", "--master_port", "29611",
               str(HERE / "gpt.py"), "--out", str(out), *map(str, args)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in done.stdout.splitlines():
        if "[ds_nvcomp]" in line:
            print(line)
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-4000:]}")


def size(directory) -> int:
    return sum(path.stat().st_size for path in Path(directory).rglob("*_states.pt"))


def kinds(checkpoint: Path) -> dict[str, list[torch.Tensor]]:
    """The checkpoint's tensors by kind, on the GPU."""
    optimizer = torch.load(next(checkpoint.glob("*optim_states.pt")), map_location=DEVICE, weights_only=False)["optimizer_state_dict"]
    model = torch.load(next(checkpoint.glob("mp_rank_00_model_states.pt")), map_location=DEVICE, weights_only=False)["module"]
    state = optimizer["base_optimizer_state"]["state"].values()
    return {"fp32 master weights": optimizer["single_partition_of_fp32_groups"],
            "exp_avg": [s["exp_avg"] for s in state], "exp_avg_sq": [s["exp_avg_sq"] for s in state],
            "bf16 weights": [torch.cat([t.reshape(-1) for t in model.values()])]}


def zstd_raw(tensors) -> float:
    """Stored / raw of nvCOMP Zstd on 64 KiB chunks of the bytes as they are: the published recipe."""
    total = raw = 0
    for tensor in tensors:
        data = tensor.reshape(-1).view(torch.uint8)
        [(_, payload)] = encode([Source(data, transforms.WHOLE)], Config(codec="zstd", device="gpu"))
        total, raw = total + payload.nbytes, raw + data.numel()
    return total / raw


def ratio(tensors, codec) -> float:
    sources = [Source(t.reshape(-1).view(torch.uint8), transforms.for_dtype(str(t.dtype).removeprefix("torch."))) for t in tensors]
    return sum(payload.nbytes for _, payload in encode(sources, Config(codec=codec, device="gpu"))) / sum(s.data.numel() for s in sources)


def timed(action, repeats=5) -> float:
    """Median milliseconds by device events."""
    times = []
    for _ in range(repeats + 1):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        action()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[1:])


class Nowhere:
    """Takes packed tiles, and leaves them on the device."""

    def __init__(self, nbytes):
        pass

    def append(self, tile):
        pass

    def take(self, start, stop):
        return [b""]


def speed(weights, codec, gpu_memory, verify) -> tuple[float, float]:
    """GB/s of fp32 input, encode (split, code, pack, checksum; with `verify` also decode and compare) and decode, on 8 GiB of it, no
    host copy."""
    copies = -(-(8 << 30) // (weights.numel() * 4))
    data = weights.repeat(copies)[: 2 << 30].view(torch.uint8)
    source, config = Source(data, transforms.SPLIT32), Config(codec=codec, gpu_memory=gpu_memory, verify=verify)
    wanted = codecs.BY_NAME[codec]
    encode_ms = timed(lambda: list(gpu._Encoder(torch.device(DEVICE), source.transform, wanted, config, [source], into=Nowhere)
                                   .run(lambda raw: None)))
    [(_, payload)] = encode([source], Config(codec=codec, device="gpu"))
    stored = torch.cat([torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else torch.from_numpy(part)
                        for part in payload.parts]).to(DEVICE)
    parsed = parse_payload(stored)
    decode_ms = timed(lambda: gpu.decode(stored, *parsed))
    assert torch.equal(gpu.decode(stored, *parsed), data)
    return data.numel() / encode_ms / 1e6, data.numel() / decode_ms / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results"))
    parser.add_argument("--steps", type=int, default=350)
    args = parser.parse_args()
    versions = {"date": str(date.today()), "device": torch.cuda.get_device_name(), "ds_nvcomp": __version__,
                "torch": torch.__version__, "python": platform.python_version(), "cpus": os.cpu_count()}
    for package in ("deepspeed", "cupy-cuda13x", "cupy-cuda12x", "nvidia-nvcomp-cu13", "nvidia-nvcomp-cu12"):
        try:
            from importlib.metadata import version
            versions[package] = version(package)
        except Exception:
            pass
    result = {"versions": versions}
    with tempfile.TemporaryDirectory() as scratch:
        ours, plain = Path(scratch, "nvcomp"), Path(scratch, "torch")
        save_at = args.steps - 50
        straight = train(ours, "--steps", args.steps, "--save-at", save_at)
        resumed = train(ours, "--steps", args.steps, "--resume")
        torchs = train(plain, "--engine", "torch", "--steps", save_at, "--save-at", save_at)
        same = all(straight["losses"][k] == v for k, v in resumed["losses"].items()) and straight["state"] == resumed["state"]
        tag = f"global_step{save_at}"
        result["training"] = {"parameters": straight["parameters"], "steps": args.steps, "saved_at": save_at, "loss": straight["loss"],
                              "resume_bit_identical": same, "save_seconds": {"ds_nvcomp": straight["save_seconds"],
                                                                             "DeepSpeed torch engine": torchs["save_seconds"]},
                              "bytes": {"ds_nvcomp": size(ours), "torch": size(plain)}}
        tensors = kinds(plain / tag)
        state = {kind: [t.cpu() for t in group] for kind, group in tensors.items()}
        began = time.perf_counter()
        torch.save(state, Path(scratch, "state.pt"))
        result["torch_save_GBps"] = Path(scratch, "state.pt").stat().st_size / (time.perf_counter() - began) / 1e9
        del state
    result["ratios"] = {kind: {"nvCOMP Zstd on raw bytes": zstd_raw(group), **{codec: ratio(group, codec) for codec in (
        "deflate", "ans", "zstd", "gdeflate", "none")}} for kind, group in tensors.items()}
    torch.cuda.empty_cache()
    weights = torch.cat(tensors["fp32 master weights"])
    del tensors
    result["speeds"] = {}
    for codec, memory, verify in (("ans", 512, "none"), ("ans", 2048, "none"), ("ans", 2048, "encode"), ("deflate", 512, "none"),
                                  ("deflate", 2048, "none"), ("deflate", 2048, "encode"), ("none", 512, "none")):
        encode_rate, decode_rate = speed(weights, codec, memory << 20, verify)
        result["speeds"][f"{codec}, {memory} MiB" + (", verify" if verify == "encode" else "")] = {"encode_GBps": encode_rate, "decode_GBps": decode_rate}
        torch.cuda.empty_cache()
    report(result)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"ratio_and_speed_{versions['device'].replace(' ', '_')}.json").write_text(json.dumps(result, indent=1) + "\n")


def report(result) -> None:
    print(json.dumps(result["versions"]))
    training = result["training"]
    stored, raw = training["bytes"]["ds_nvcomp"], training["bytes"]["torch"]
    print(f"\nGPT of {training['parameters'] / 1e6:.0f} M parameters, {training['steps']} steps, loss {training['loss']:.3f}; "
          f"resume bit-identical: {training['resume_bit_identical']}")
    print(f"ZeRO-2 checkpoint: torch {raw / 1e9:.3f} GB, ds_nvcomp {stored / 1e9:.3f} GB, ratio {stored / raw:.4f}; save took "
          f"{training['save_seconds']['DeepSpeed torch engine']:.2f} s and {training['save_seconds']['ds_nvcomp']:.2f} s; "
          f"torch.save alone {result['torch_save_GBps']:.2f} GB/s")
    columns = list(next(iter(result["ratios"].values())))
    print(f"\n{'stored / raw':22}" + "".join(f"{column:>26}" for column in columns))
    for kind, row in result["ratios"].items():
        print(f"{kind:22}" + "".join(f"{row[column]:26.4f}" for column in columns))
    print(f"\n{'8 GiB fp32, on device':26}{'encode GB/s':>14}{'decode GB/s':>14}")
    for codec, row in result["speeds"].items():
        print(f"{codec:26}{row['encode_GBps']:14.1f}{row['decode_GBps']:14.1f}")


if __name__ == "__main__":
    main()
