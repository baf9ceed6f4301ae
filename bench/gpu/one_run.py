"""One training run on one GPU and its figures, in FOLDER/run.json.

    python bench/gpu/one_run.py FOLDER [--hold-ledger] [--decoder NAME] TRAIN_FLAG...

40 steps, on bytes, since no tokenizer has to be trained for that. `ledger` has each line of the
steady peak as planned and as measured, in bytes; `--hold-ledger` fails where one is off by more
than 0.05% of the planned peak and what cuBLASLt takes in torch 2.11. Losses of equal models and
precisions can be compared between runs: weights and batches are the same. `--decoder` trains one of
decoders.py from random weights.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from decoders import DECODERS, write_config
from machine import is_null_gpu
from runs import ROOT, Run

from launcher.strategies.ledger import CATEGORIES
from launcher.util.processes import for_children

BOUND = 0.0005  # of the planned peak; tests/nullgpu/test_ledger.py holds the same one
LT_BYTES = 2 * 2**20 + 16 * 2**10  # for two handles of cuBLAS; tests/nullgpu/test_trains.py has it
WARMUP_STEPS = 5
STEPS = 12 if is_null_gpu() else 40  # the null GPU skips all of them, and 20 in a row end a run
FLAGS = (
    *("--steps", str(STEPS), "--tokenizer", "byte", "--test-batches", "2"),
    *("--save-every=0", "--report-to=none"),
)
MIB = 2**20
PEAKS = ("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hold-ledger", action="store_true")
    parser.add_argument("--decoder", choices=DECODERS)
    options, flags = parser.parse_known_args()
    decoder, model = [], []
    if options.decoder:
        decoder = ["--decoder", options.decoder]
        model = ["--model", str(write_config(options.decoder, options.folder))]
    run = options.folder / "run"
    command = [sys.executable, "-m", "launcher.torchrun", "--nproc", "1", "-m", "launcher.train"]
    command += [*FLAGS, *model, *flags, "--out", str(run)]
    code = subprocess.run(command, cwd=ROOT, env=os.environ | for_children()).returncode
    found = {"flags": [*decoder, *flags], **figures(run)}
    (options.folder / "run.json").write_text(json.dumps(found, indent=1) + "\n")
    if code:
        sys.exit(code)
    if options.hold_ledger and (off := off_plan(found)):
        sys.exit(f"off the plan: {', '.join(off)}")


def figures(folder: Path) -> dict[str, Any]:
    """Return the figures of a run folder, as far as the run has come."""
    status = content(folder / "status.json")
    found: dict[str, Any] = {"state": status.get("state"), "reason": status.get("reason")}
    if not (folder / "rank0.jsonl").exists():
        return found
    run = Run(folder=folder, state=str(found["state"]), reason=found["reason"])
    (about,) = run.records("run")
    steps = run.records("step")
    names = ("device_name", "strategy", "precision", "attention", "activation_checkpointing")
    found |= {name: about[name] for name in (*names, "micro_batch", "global_batch", "seq_len")}
    found["losses"] = [step["loss"] for step in steps]
    found["skipped_steps"] = sum(not step["applied"] for step in steps)
    for name in PEAKS:
        found[name] = max((s[name] for s in steps if s.get(name) is not None), default=None)
    if not is_null_gpu() and (steady := steps[WARMUP_STEPS:]):
        found["step_s"] = statistics.median(step["duration_s"] for step in steady)
        found["tokens_per_s"] = steady[0]["tokens"] / found["step_s"]
    plan = content(folder / "summary.json").get("plan") or {}
    if "predicted" in plan:
        lines = (*CATEGORIES, "peak")
        found["ledger"] = {
            line: {"planned": plan["predicted"][line], "measured": plan["measured"][line]}
            for line in lines
        }
    return found | {"plan": plan}


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def off_plan(found: dict[str, Any]) -> list[str]:
    """Lines of the ledger that differ from the plan by more than the bound, for people."""
    if "ledger" not in found:
        return [f"no plan for this run: {found['plan'].get('reason', 'it has no summary')}"]
    most = BOUND * found["ledger"]["peak"]["planned"] + LT_BYTES
    return [
        f"{line} {sides['planned'] / MIB:,.1f} MiB planned, {sides['measured'] / MIB:,.1f} measured"
        for line, sides in found["ledger"].items()
        if abs(sides["planned"] - sides["measured"]) > most
    ]


if __name__ == "__main__":
    main()
