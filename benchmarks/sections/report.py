"""What was measured, as one compact table."""
from __future__ import annotations


def table(result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"{result['date']}  {result['device']}, ranks {result['ranks']}, CPUs {result['cpus']}, driver {result['driver']}", versions,
             f"{'':46}{'median s':>10}{'first s':>10}{'n':>4}{'GB/s':>9}  also"]
    for section, entry in result["sections"].items():
        lines.append(f"{section} ({entry.get('seconds', 0):.0f} s)  {_reason(entry)}".rstrip())
        for name, case in entry["cases"].items():
            if "median" not in case:
                lines.append(f"  {name:46}{_reason(case) or 'unfinished'}")
                continue
            rest = "  ".join(f"{key} {value:.4g}" for key, value in case["median"].items() if key != "seconds")
            rate = f"{case['GBps']:9.2f}" if "GBps" in case else " " * 9
            lines.append(f"  {name:44}{case['median']['seconds']:10.4f}{case['first']['seconds']:10.4f}{len(case['samples']):4}{rate}"
                         f"  {rest}  {_reason(case)}".rstrip())
    return "\n".join(lines)


def _reason(entry) -> str:
    return next((f"{key}: {' '.join(entry[key].split())[:90]}" for key in ("error", "skipped") if key in entry), "")
