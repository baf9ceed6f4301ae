"""Does `--micro-batch auto` find the largest that runs: every strategy under a real memory limit.

    python bench/micro_batch.py [--memory-limit 300MiB] [--output bench/results]

For each strategy on 1 or 2 CPU processes the launcher searches and trains. Then plain runs check
what it found: the micro-batch itself must run, and the first one more than 3% above it must run out
of memory. Trial processes and folders that are still there afterwards are counted. Writes
micro_batch.json and .md.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from runs import QUIET, environment, refuse_existing, table, train, write_stdlib

from launcher.forecast.trials import WORKER

STRATEGIES = {
    "single": (1, ("--strategy=single",)),
    "ddp": (2, ("--strategy=ddp",)),
    "fsdp": (2, ("--strategy=fsdp",)),
    "zero1": (2, ("--zero=1",)),
    "zero2": (2, ("--zero=2",)),
    "zero3": (2, ("--zero=3",)),
}
FLAGS = (
    *("--layers=4", "--d-model=128", "--heads=4", "--context=64", "--vocab-size=2048"),
    *("--tokenizer=byte", "--device=cpu", "--steps=3"),
)
WITHIN = 1.03
TEXT_BYTES = 400_000
FOUND = re.compile(r"--micro-batch auto: (\d+), found with (\d+) trials? in (\d+) s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--memory-limit", default="300MiB")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    path = options.output / "micro_batch.json"
    refuse_existing(path)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        text = write_stdlib(Path(folder) / "text.txt", TEXT_BYTES)
        for name in STRATEGIES:
            flags = [*FLAGS, f"--data={text}", f"--memory-limit={options.memory_limit}"]
            rows.append(one_strategy(name, flags, Path(folder) / name))
            print(json.dumps(rows[-1]), flush=True)
    result = {"memory_limit": options.memory_limit, "flags": FLAGS, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(result))
    print(markdown(result))
    sys.exit(0 if all(row["right"] for row in rows) else 1)


def one_strategy(name: str, flags: list[str], folder: Path) -> dict[str, Any]:
    """Search, train with what was found, check it and the next in runs of their own."""
    ranks, strategy = STRATEGIES[name]
    (folder / "tmp").mkdir(parents=True)
    found, trials, search_s = search([*flags, *strategy], ranks, folder)
    left = len(processes_left()) + len(list((folder / "tmp").glob("shardscale-trials-*")))
    above = int(WITHIN * found) + 1
    states = {
        size: train(
            [*flags, *strategy, f"--micro-batch={size}"], out=folder / str(size), ranks=ranks
        ).state
        for size in (found, above)
    }
    return {
        "strategy": name,
        "found": found,
        "trials": trials,
        "search_s": search_s,
        "found_again": states[found],
        "above": above,
        "above_ended": states[above],
        "left_over": left,
        "right": (states[found], states[above], left) == ("completed", "oom", 0),
    }


def search(flags: list[str], ranks: int, folder: Path) -> tuple[int, int, int]:
    """(micro-batch, trials, seconds) that a real `--micro-batch auto` run says it took."""
    command = [sys.executable, "-m", "launcher.torchrun", "--nproc", str(ranks), "-m"]
    command += ["launcher.train", *QUIET, *flags, "--micro-batch=auto", f"--out={folder / 'auto'}"]
    own = {"SHARDSCALE_CACHE": str(folder / "cache"), "TMPDIR": str(folder / "tmp")}
    done = subprocess.run(
        command, env=environment() | own, capture_output=True, text=True, check=False
    )
    said = FOUND.search(done.stderr)
    if done.returncode or said is None:
        sys.exit(done.stderr)
    size, trials, seconds = map(int, said.groups())
    return size, trials, seconds


def processes_left() -> list[psutil.Process]:
    time.sleep(1)
    return [p for p in psutil.process_iter(["cmdline"]) if WORKER in (p.info["cmdline"] or [])]


def markdown(result: dict[str, Any]) -> str:
    titles = ["strategy", "found", "trials", "seconds", "run again", "first above 3%", "ended as"]
    titles += ["left over"]
    lines = [
        [
            *(row["strategy"], f"{row['found']}", f"{row['trials']}", f"{row['search_s']}"),
            *(row["found_again"], f"{row['above']}", row["above_ended"], f"{row['left_over']}"),
        ]
        for row in result["rows"]
    ]
    flags = " ".join((*result["flags"], f"--memory-limit={result['memory_limit']}"))
    return f"# `--micro-batch auto` under a real limit\n\n`{flags}`\n\n{table(titles, lines)}\n"


if __name__ == "__main__":
    main()
