"""Markdown table of a part's runs: planned and measured peaks, step time, losses beside single's.

python bench/gpu/table.py build/gpu/results/2_memory [--beside REHEARSAL/2_memory]

Bytes are those of the run's first rank. "planned" is what the run itself says was predicted for the
highest moment of a step; "allocated" and "reserved" are the caching allocator's peaks, "device" is
what the whole device uses. `--beside` adds the same runs' peaks from another folder, as of a
rehearsal without a GPU (real allocator, no kernels run).
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

GIB = 2**30
WARMUP_STEPS = 3
PEAKS = ("allocated", "reserved")
HEADER = ("run", "state", "planned GiB", *(f"{name} GiB" for name in PEAKS), "device GiB")
TIMES = ("ms/step", "tokens/s", "loss off single's")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--beside", type=Path)
    options = parser.parse_args()
    elsewhere = [f"{name} elsewhere" for name in PEAKS] if options.beside else []
    titles = (*HEADER, *elsewhere, *TIMES)
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    for run in sorted(options.folder.glob("*/run")):
        name = run.parent.name
        steps = steps_of(run)
        cells = [name, state(run), planned(run), *(peak(steps, p) for p in PEAKS)]
        cells.append(gib(max((s["device_used_bytes"] for s in steps), default=None)))
        if options.beside:
            cells += [peak(steps_of(options.beside / name / "run"), p) for p in PEAKS]
        single = options.folder / f"{name.partition('-')[0]}-single" / "run"
        cells += [*speed(steps), loss_off(steps, steps_of(single))]
        print("| " + " | ".join(cells) + " |")


def state(run: Path) -> str:
    return str(content(run / "status.json").get("state", "not started"))


def planned(run: Path) -> str:
    plan = content(run / "summary.json").get("plan") or {}
    return gib(plan.get("predicted", {}).get("peak"))


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Records of steps, none where the run left none."""
    path = run / "rank0.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def peak(steps: list[dict[str, Any]], name: str) -> str:
    values = [step.get(f"{name}_peak_bytes") for step in steps]
    return gib(max((value for value in values if value is not None), default=None))


def gib(size_bytes: int | None) -> str:
    return "n/a" if size_bytes is None else f"{size_bytes / GIB:.3f}"


def speed(steps: list[dict[str, Any]]) -> tuple[str, str]:
    """Median milliseconds of a step, and tokens/s, behind the warm-up."""
    steady = steps[WARMUP_STEPS:]
    if not steady:
        return "n/a", "n/a"
    duration_s = statistics.median(step["duration_s"] for step in steady)
    return f"{1e3 * duration_s:.1f}", f"{steady[0]['tokens'] / duration_s:,.0f}"


def loss_off(steps: list[dict[str, Any]], single: list[dict[str, Any]]) -> str:
    """Largest relative difference of a step's loss; resumed runs have only the later steps."""
    exact = {step["step"]: step["loss"] for step in single}
    pairs = [(step["loss"], exact[step["step"]]) for step in steps if step["step"] in exact]
    off = [abs(ours - theirs) / theirs for ours, theirs in pairs if theirs]
    return f"{max(off):.1e}" if off else "n/a"


if __name__ == "__main__":
    main()
