"""CPU seconds of `shardscale plan`: a small question and large ones, cold, and again with what the
first has left in the cache.

    python bench/planning.py [--before CHECKOUT] [--case PART-OF-ITS-NAME]

What is not measured now is kept from the results that are there. `--before` is another checkout of
these sources, run in turn with this one, so that both meet the same load. CPU seconds are of the
process and of all that it has started.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
CASES = {
    "gpt2-xl, 4 GPUs of 24 GiB": "--model gpt2-xl --gpus 4 --gpu-memory 24GiB",
    "gpt2-xl, 8 A100": "--model gpt2-xl --gpus 8 --gpu A100-80GB --global-batch 128",
    "gpt2-xl, 8 A100, every choice": (
        "--model gpt2-xl --gpus 8 --gpu A100-80GB --global-batch 128 --all"
    ),
    "13b, 1,024 H100": "--model 13b --gpus 1024 --gpu H100 --global-batch 2048",
    "llama-3.1-8b, 64 H100, sequences and matrices cut": (
        "--model llama-3.1-8b --gpus 64 --gpu H100 --seq-len 8192 --global-batch 128"
    ),
}


def planned(checkout: Path, flags: str, cache: str) -> dict[str, float]:
    """Seconds of one plan: CPU, and until it was there."""
    environment = os.environ | {"SHARDSCALE_CACHE": cache, "PYTHONPATH": str(checkout)}
    before, began_s = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "launcher", "plan", "--quiet", *flags.split()],
        cwd=checkout,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": cpu_s, "wall_s": time.monotonic() - began_s}


def measured(flags: str, before: Path | None) -> dict[str, Any]:
    """One case under both checkouts."""
    found: dict[str, Any] = {"flags": flags}
    if before is not None:
        with tempfile.TemporaryDirectory() as cache:
            found["before"] = planned(before, flags, cache)
    with tempfile.TemporaryDirectory() as cache:
        found["cold"] = planned(ROOT, flags, cache)
        found["cached"] = planned(ROOT, flags, cache)
    return found


def main() -> None:
    """Writes bench/results/planning.json and .md, case by case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--case", default="")
    options = parser.parse_args()
    known = RESULTS / "planning.json"
    cases: dict[str, Any] = json.loads(known.read_text())["cases"] if known.exists() else {}
    record = {"cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0], "cases": cases}
    for name, flags in CASES.items():
        if options.case not in name:
            continue
        cases[name] = cases.get(name, {}) | measured(flags, options.before)
        (RESULTS / "planning.json").write_text(json.dumps(record, indent=2) + "\n")
        (RESULTS / "planning.md").write_text(page(record))
        print(name, cases[name], flush=True)


def page(record: dict[str, Any]) -> str:
    """The table, in Markdown."""
    lines = [
        "# CPU seconds of `shardscale plan`",
        "",
        f"`python bench/planning.py`, {record['cores']} cores, load {record['load']:.1f} at the "
        "beginning. Seconds of CPU (until it was there).",
        "",
        "| | before | cold | cached |",
        "|---|---:|---:|---:|",
    ]
    for name, case in record["cases"].items():
        cells = [
            f"{case[when]['cpu_s']:.1f} ({case[when]['wall_s']:.1f})" if when in case else "-"
            for when in ("before", "cold", "cached")
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
