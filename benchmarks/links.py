"""Bytes of a trained GPT's ZeRO-2 checkpoint with master weights linked to the 16-bit weights and without, by codec, each resumed and
compared by bits.

    python benchmarks/links.py [--out results/links.json] [--steps 350]      (one NVIDIA GPU; about 3 minutes)
"""
from __future__ import annotations

import argparse
import json
import platform
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch

from ratio_and_speed import HERE, size, train


def stored(directory: Path) -> dict[str, float]:
    """Stored / raw of each kind of tensor in the checkpoint."""
    from ds_nvcomp.archive.scan import scan
    kinds: dict[str, list[int]] = {}
    for path in directory.rglob("*_states.pt"):
        for row in scan(path).rows:
            kind = next((kind for kind in ("exp_avg_sq", "exp_avg", "single_partition_of_fp32_groups") if kind in row.name),
                        "16-bit weights" if row.name.startswith("module.") else "others")
            found = kinds.setdefault(kind, [0, 0])
            found[0] += row.stored_bytes
            found[1] += row.raw_bytes
    return {kind: stored / raw for kind, (stored, raw) in kinds.items() if raw > 1 << 20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results" / "links.json"))
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--zero", type=int, default=2)
    args = parser.parse_args()
    save_at = args.steps - 50
    result = {"date": str(date.today()), "device": torch.cuda.get_device_name(), "torch": torch.__version__, "python": platform.python_version(),
              "deepspeed": version("deepspeed"), "ds_nvcomp": version("ds_nvcomp"), "zero": args.zero, "steps": args.steps, "cases": {}}
    with tempfile.TemporaryDirectory() as scratch:
        common = ["--steps", args.steps, "--save-at", save_at, "--zero", args.zero]
        torchs = train(Path(scratch, "torch"), "--engine", "torch", "--steps", save_at, "--save-at", save_at, "--zero", args.zero)
        raw = size(Path(scratch, "torch"))
        result |= {"parameters": torchs["parameters"], "raw_bytes": raw}
        for codec, link in (("deflate", "auto"), ("ans", "auto"), ("deflate", "off")):
            out = Path(scratch, f"{codec} {link}")
            straight = train(out, *common, "--codec", codec, "--link", link)
            resumed = train(out, *common, "--resume", "--codec", codec, "--link", link)
            case = {"bytes": size(out), "ratio": size(out) / raw, "save_seconds": straight["save_seconds"], "load_seconds": resumed["load_seconds"],
                    "resume_bit_identical": straight["state"] == resumed["state"] and
                    all(straight["losses"][step] == loss for step, loss in resumed["losses"].items()), "kinds": stored(out)}
            result["cases"][f"{codec}, links {link}"] = case
            print(f"{codec}, links {link}: {case['bytes']:,} of {raw:,} bytes, {case['ratio']:.4f}; resume bit-identical: "
                  f"{case['resume_bit_identical']}; save {case['save_seconds']:.2f} s, load {case['load_seconds']:.2f} s; "
                  + ", ".join(f"{kind} {ratio:.4f}" for kind, ratio in case["kinds"].items()), flush=True)
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
