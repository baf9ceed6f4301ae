"""Markdown table of the training runs in a folder of results: planned and measured peaks, times.

    python bench/gpu/table.py bench/results/gpu-h200

"planned" and "measured" are the run's ledger at the steady peak; "allocated" and "reserved" are the
caching allocator's peaks of all steps, "device" is what the whole device used. Losses are compared
with default/run's, which is bf16, or in the section `precision` with fp32's.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from runner import read_records

GIB = 2**30
HEADER = ("run", "state", "planned GiB", "measured GiB", "allocated GiB", "reserved GiB")
MORE = ("device GiB", "ms/step", "tokens/s", "loss off", "skipped")
REFERENCES = {"precision": "precision/fp32"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    print(table(read_records(parser.parse_args().folder)))


def table(records: Iterable[dict[str, Any]]) -> str:
    """With the device that the figures are of above it; parts without a run are left out."""
    by_part = {record["part"]: record for record in records}
    runs = {name: r["figures"]["run"] for name, r in by_part.items() if "run" in r["figures"]}
    devices = {f"{r['machine']['name']}: {r['machine']['figures']}" for r in by_part.values()}
    lines = [*sorted(devices), "", "| " + " | ".join((*HEADER, *MORE)) + " |"]
    lines.append("|" + "---|" * len((*HEADER, *MORE)))
    for name, run in runs.items():
        reference = REFERENCES.get(name.partition("/")[0], "default/run")
        cells = [name, by_part[name]["state"], *ledger_peak(run)]
        cells += [gib(run.get(f"{peak}_peak_bytes")) for peak in ("allocated", "reserved")]
        cells += [gib(run.get("device_used_bytes")), *speed(run)]
        cells += [loss_off(run, runs.get(reference, {})), str(run.get("skipped_steps", "n/a"))]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def ledger_peak(run: dict[str, Any]) -> tuple[str, str]:
    peak = run.get("ledger", {}).get("peak", {})
    return gib(peak.get("planned")), gib(peak.get("measured"))


def gib(size_bytes: int | None) -> str:
    return "n/a" if size_bytes is None else f"{size_bytes / GIB:.3f}"


def speed(run: dict[str, Any]) -> tuple[str, str]:
    if "step_s" not in run:
        return "n/a", "n/a"
    return f"{1e3 * run['step_s']:.1f}", f"{run['tokens_per_s']:,.0f}"


def loss_off(run: dict[str, Any], reference: dict[str, Any]) -> str:
    """Largest relative difference of a step's loss."""
    pairs = zip(run.get("losses", ()), reference.get("losses", ()), strict=False)
    off = [abs(ours - theirs) / theirs for ours, theirs in pairs if theirs]
    return f"{max(off):.1e}" if off else "n/a"


if __name__ == "__main__":
    main()
