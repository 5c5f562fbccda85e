"""Figures of what benchmarks/saves.py measured, and its table again. Needs matplotlib.

    python benchmarks/plots.py benchmarks/results/saves_*.json [--out benchmarks/results] [--format svg]

Of several files, a case that is in more than one is drawn from the last; those of several numbers of ranks make the figure of
scaling. Figures: saves_stall, saves_writers, saves_codecs, saves_scaling.
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from sections.report import table  # noqa: E402

OURS, OTHERS, PALE = "#2f7d32", "#78818c", "#d5dae0"
plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none", "svg.hashsalt": "saves",
                     "figure.dpi": 110})


def measured(section) -> dict:
    return {name: case for name, case in section["cases"].items() if "median" in case}


def ours(name) -> bool:
    return any(word in name for word in ("ds_nvcomp", "ours", "encode to host"))


def bars(axes, rows, unit) -> None:
    """Horizontal bars of (label, value, further, colour); `further` is a paler bar behind."""
    for y, (label, value, further, colour) in enumerate(reversed(rows)):
        if further:
            axes.barh(y, further, color=PALE, height=0.72)
        axes.barh(y, value, color=colour, height=0.72)
        text = f" {value:.3g} {unit}" + (f", durable after {further:.3g}" if further else "")
        axes.text(max(value, further or 0), y, text, va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)])
    axes.tick_params(axis="y", length=0)
    axes.set_axisbelow(True)
    axes.grid(axis="x", color="#eceff2")


def stall(result):
    cases = measured(result["sections"]["stall"])
    whole = max(case["bytes"] for case in cases.values())
    rows = []
    for name, case in cases.items():
        scale = whole / case["bytes"]
        durable = case["median"].get("durable", 0) * scale
        value = case["median"]["seconds"] * scale
        label = name if scale < 1.01 else name.replace(", a part", f" (scaled from {case['bytes'] / 1e9:.3g} GB)")
        rows.append((label, value, durable if durable > 1.05 * value else None, OURS if ours(name) else OTHERS))
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.29 * len(rows)))
    bars(axes, sorted(rows, key=lambda row: row[1]), "s")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(right=3 * max(axes.get_xlim()[1], 1e-6))
    axes.set_title(f"Seconds a save blocks the training: {whole / 1e9:.3g} GB, ZeRO-2, {result['device']}", loc="left", fontsize=10)
    return figure


def writers(result):
    cases = measured(result["sections"]["writer"])
    groups = {place: [(name.split(": ")[1], case["GBps"], None, OURS if ours(name) else OTHERS) for name, case in cases.items()
                      if name.startswith(place)] for place in ("disk", "tmpfs")}
    groups = {place: rows for place, rows in groups.items() if rows}
    figure, panels = plt.subplots(len(groups), figsize=(8, 0.9 + 0.26 * len(cases)), squeeze=False, sharex=True,
                                  height_ratios=[len(rows) for rows in groups.values()])
    for axes, (place, rows) in zip(panels[:, 0], groups.items()):
        bars(axes, rows, "GB/s")
        axes.set_title({"disk": "To disk", "tmpfs": "To /dev/shm"}[place], loc="left", fontsize=10)
    axes.margins(x=0.12)
    return figure


def codecs(result):
    """Stored / raw, and GB/s, by kind of data and codec; darker is smaller."""
    cells = {tuple(name.rsplit(", ", 1)): case for name, case in measured(result["sections"]["adversarial"]).items() if ", " in name}
    kinds, columns = list(dict.fromkeys(kind for kind, _ in cells)), list(dict.fromkeys(codec for _, codec in cells))
    figure, axes = plt.subplots(figsize=(2.6 + 1.5 * len(columns), 0.7 + 0.42 * len(kinds)))
    for y, kind in enumerate(kinds):
        for x, codec in enumerate(columns):
            case = cells.get((kind, codec))
            if case:
                ratio = case["median"]["ratio"]
                axes.add_patch(plt.Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=OURS, alpha=max(0.0, 0.75 * (1 - ratio)), linewidth=0))
                axes.text(x, y, f"{ratio:.3f}   {case['GBps']:.3g} GB/s", ha="center", va="center", fontsize=8)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(kinds) - 0.5, -0.5)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(kinds)), kinds)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(f"Stored / raw and speed to host memory, {result['device']}", loc="left", fontsize=10)
    return figure


def scaling(results):
    by_ranks = {result["ranks"]: measured(result["sections"]["multi"]) for result in results if "multi" in result["sections"]}
    names = [name for name in dict.fromkeys(name for cases in by_ranks.values() for name in cases) if not name.startswith("ZeRO")]
    figure, axes = plt.subplots(figsize=(6, 3.4))
    for i, name in enumerate(names):
        points = sorted((ranks, cases[name]["GBps"]) for ranks, cases in by_ranks.items() if name in cases)
        axes.plot(*zip(*points), "o-", label=name, color=OTHERS if not ours(name) else OURS, alpha=1 - 0.22 * i)
        axes.annotate(f"{points[-1][1]:.0f}", points[-1], textcoords="offset points", xytext=(6, 0), va="center", fontsize=8)
    axes.set_xticks(sorted(by_ranks))
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("GPUs")
    axes.set_title("GB/s of snapshots, all GPUs together", loc="left", fontsize=10)
    return figure


def together(results, section) -> dict | None:
    """The cases of one section of all results with one rank, as one result; later ones take the place of earlier ones."""
    found = [result for result in results if result["ranks"] == 1 and measured(result["sections"].get(section, {"cases": {}}))]
    cases = {name: case for result in found for name, case in measured(result["sections"][section]).items()}
    return {**found[-1], "sections": {section: {"cases": cases}}} if found else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--format", default="svg", choices=("svg", "png"))
    args = parser.parse_args()
    results = [json.loads(path.read_text()) for path in args.files]
    for result in results:
        print(table(result))
    args.out.mkdir(parents=True, exist_ok=True)
    figures = {"stall": ("stall", stall), "writers": ("writer", writers), "codecs": ("adversarial", codecs)}
    drawn = {name: draw(merged) for name, (section, draw) in figures.items() if (merged := together(results, section))}
    if len({result["ranks"] for result in results if "multi" in result["sections"]}) > 1:
        drawn["scaling"] = scaling(results)
    for name, figure in drawn.items():
        path = args.out / f"saves_{name}.{args.format}"
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None} if args.format == "svg" else None)
        print(path)


if __name__ == "__main__":
    main()
