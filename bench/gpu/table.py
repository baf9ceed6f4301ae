"""Markdown table of the runs in a folder: peaks, step time, throughput. Used by gpu.sh.

python bench/gpu_table.py RUNS
"""

import json
import statistics
import sys
from pathlib import Path

GIB = 2**30
HEADER = ("run", "state", "allocated GiB", "reserved GiB", "device GiB", "ms/step", "tokens/s")


def main(folder: Path) -> None:
    print("| " + " | ".join(HEADER) + " |")
    print("|" + "---|" * len(HEADER))
    for run in sorted(path for path in folder.iterdir() if path.is_dir()):
        print("| " + " | ".join(row(run)) + " |")


def row(run: Path) -> list[str]:
    status = run / "status.json"
    state = json.loads(status.read_text())["state"] if status.exists() else "not started"
    lines = (run / "rank0.jsonl").read_text().splitlines() if status.exists() else []
    steps = [r for r in map(json.loads, lines) if r["kind"] == "step" and r["step"] > 5]
    if not steps:
        return [run.name, state, *["n/a"] * 5]

    def peak(name: str) -> str:
        values = [step[name] for step in steps if step.get(name) is not None]
        return f"{max(values) / GIB:.2f}" if values else "n/a"

    duration_s = statistics.median(step["duration_s"] for step in steps)
    return [
        run.name,
        state,
        peak("allocated_peak_bytes"),
        peak("reserved_peak_bytes"),
        peak("device_used_bytes"),
        f"{1e3 * duration_s:.1f}",
        f"{steps[0]['tokens'] / duration_s:,.0f}",
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
