"""Does the planner's verdict hold where it is hard: real runs under limits near what they need.

    python bench/near_limit.py [--runs 40] [--seed 0] [--output bench/results/near_limit.json]

Each run is a random strategy, precision, checkpointing, batch and shape on 1 or 2 CPU processes,
of at least 100 MiB (below that it is the libraries' memory that is guessed, not the tensors'), with
a real `--memory-limit` drawn within a quarter of what the planner says it needs. The verdict
is the planner's own (`launcher.forecast.fit`, which `--micro-batch auto` and suggestions after
running out of memory ask); what really happened is the exit code in the run's status.json.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runs import environment

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.fit import Room, needed_bytes
from launcher.util.errors import ExitCode

ROOT = Path(__file__).parents[1]
EDGE = 0.25
LEAST_MIB = 100
STRATEGIES = {
    "single": ("--strategy=single",),
    "ddp": ("--strategy=ddp",),
    "fsdp": ("--strategy=fsdp",),
    "fsdp-grad-op": ("--strategy=fsdp", "--no-reshard-after-forward"),
    "zero1": ("--zero=1",),
    "zero2": ("--zero=2",),
    "zero3": ("--zero=3",),
    "zero2+cpu": ("--zero=2", "--offload-optimizer=cpu"),
    "zero3+cpu": ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
}
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    if options.output is not None and options.output.exists():
        sys.exit(f"{options.output} exists: nothing is overwritten")
    draw = random.Random(options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text(Path(argparse.__file__).read_text() * 2)
        for number in range(1, options.runs + 1):
            rows.append(one_run(draw, corpus, Path(folder) / f"run-{number}"))
            print(f"[{number}/{options.runs}] {json.dumps(rows[-1])}", flush=True)
    summary = summarize(rows)
    print(json.dumps(summary, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps({**summary, "rows": rows}, indent=1) + "\n")
    sys.exit(1 if summary["fits_but_ran_out"] or summary["others"] else 0)


def one_run(draw: random.Random, corpus: Path, out: Path) -> dict[str, Any]:
    """Draw a configuration and a limit, ask the planner, run it."""
    needed = 0.0
    while needed < LEAST_MIB:
        flags, ranks = configuration(draw)
        resolved = resolve(parse_run_config(flags), world_size=ranks, device_type="cpu")
        anywhere = Room(size_bytes=2**50, gpu=None, capped=True)
        needed = needed_bytes(resolved, anywhere) / MIB
    limit_mib = int(needed * draw.uniform(1 - EDGE, 1 + EDGE))
    code, reason = run([*flags, f"--memory-limit={limit_mib}MiB"], ranks, corpus, out)
    return {
        "flags": " ".join(flags),
        "ranks": ranks,
        "needed_mib": round(needed, 1),
        "limit_mib": limit_mib,
        "limit_over_needed": round(limit_mib / needed, 3),
        "verdict": "fits" if needed <= limit_mib else "does not fit",
        "exit_code": code,
        "reason": reason,
    }


def configuration(draw: random.Random) -> tuple[list[str], int]:
    """(flags, ranks) of a random run."""
    strategy = draw.choice(list(STRATEGIES))
    ranks = 1 if strategy == "single" else 2
    micro_batch, accumulation = draw.choice((2, 4, 8, 12)), draw.choice((1, 2))
    flags = [
        *STRATEGIES[strategy],
        f"--precision={draw.choice(('fp32', 'bf16'))}",
        f"--activation-checkpointing={draw.choice(('none', 'selective', 'full'))}",
        f"--layers={draw.randint(2, 8)}",
        f"--d-model={64 * draw.randint(2, 5)}",
        "--heads=4",
        f"--context={draw.choice((64, 100, 128))}",
        f"--vocab-size={draw.choice((2048, 8192))}",
        f"--micro-batch={micro_batch}",
        f"--global-batch={micro_batch * accumulation * ranks}",
        *("--tokenizer=byte", "--device=cpu", "--steps=3", "--report-to=none"),
        "--save-every=0",
    ]
    return flags, ranks


def run(flags: list[str], ranks: int, corpus: Path, out: Path) -> tuple[int, str | None]:
    """(exit code, why) of its status: torchrun's own code would be 1 whatever failed."""
    start = [sys.executable, "-m", "launcher.torchrun", "--nproc", str(ranks)]
    command = [*start, "-m", "launcher.train", *flags, f"--data={corpus}", f"--out={out}"]
    single_threaded = {**environment(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=single_threaded, capture_output=True, text=True, check=False)
    status = out / "status.json"
    if not status.exists():
        sys.exit(done.stderr)
    found = json.loads(status.read_text())
    return int(found["exit_code"]), found["reason"]


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how often each verdict was right."""
    fits = [row for row in rows if row["verdict"] == "fits"]
    not_fits = [row for row in rows if row["verdict"] == "does not fit"]
    would_have = [row for row in not_fits if row["exit_code"] == ExitCode.DONE]
    ended = (ExitCode.DONE, ExitCode.OUT_OF_MEMORY)
    return {
        "runs": len(rows),
        "fits": len(fits),
        "fits_but_ran_out": sum(row["exit_code"] == ExitCode.OUT_OF_MEMORY for row in fits),
        "does_not_fit": len(not_fits),
        "does_not_fit_but_ran": len(would_have),
        "others": [row for row in rows if row["exit_code"] not in ended],
    }


if __name__ == "__main__":
    main()
