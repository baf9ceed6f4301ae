"""Predicted order of candidates beside the measured one, on this machine's CPU.

    python bench/plan_order.py [--rounds 2] [--steps 16] [--plans NAME ...]

Measures the machine once (`shardscale profile`), plans three small models with that profile, and
trains the first five candidates of each plan with the command that the plan prints. Candidates of
one plan run in turn, round by round, so that other load hits all alike. A pair of candidates agrees
if the one that the plan puts first is measured faster, or if the plan calls them a tie. A quiet
machine needs about six minutes; results are written plan by plan.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from runs import ROOT, environment, train, write_stdlib

from launcher.config.arguments import parse_run_config
from launcher.forecast.assess import Assessment
from launcher.forecast.candidates import given_fields
from launcher.forecast.cluster import Cluster, find_cluster
from launcher.forecast.evaluation import Search
from launcher.forecast.order import ties
from launcher.forecast.plan_answer import command_of
from launcher.forecast.plan_cli import parse_options
from launcher.forecast.search import plan
from launcher.forecast.table import best_of_each
from launcher.torchrun import split_command

RESULTS: Final = ROOT / "bench" / "results" / "plan_order.json"
CANDIDATES: Final = 5
CORPUS_BYTES: Final = 400_000
COMMON: Final = "--model nano --tokenizer byte --global-batch 16"
PLANS: Final = {
    "GPT-2 shape, 2 ranks": f"--gpus 2 {COMMON}",
    "Llama shape of 1M, 2 ranks": (
        f"--gpus 2 {COMMON} --d-model 128 --heads 4 --kv-heads 2 --position rope --norm rms "
        "--activation swiglu --no-tied"
    ),
    "LoRA, 1 rank": f"--gpus 1 {COMMON} --lora-rank 8 --random-base",
}
QUICK: Final = ("--test-batches", "1", "--log-level", "error")


def measure_machine(path: Path) -> None:
    """Write the rates of this machine, of 2 processes with a thread each."""
    command = [sys.executable, "-m", "launcher", "profile", "--device", "cpu", "--model", "nano"]
    subprocess.run([*command, "--out", str(path)], cwd=ROOT, env=environment(), check=True)


def first_candidates(flags: Sequence[str], profile: Path) -> tuple[list[Assessment], Cluster]:
    """Plan with the profile; returns the first rows of the table."""
    options, training = parse_options([*flags, "--profile", str(profile)])
    cluster, _ = find_cluster(options)
    config = parse_run_config(training, cluster.world_size)
    search = Search(cluster=cluster, goal="fastest", evaluate_all=False)
    fixed = given_fields(training, config)
    found = plan(config, fixed, search, progress=lambda done, total: None)
    return best_of_each(found.best_first)[:CANDIDATES], cluster


def train_flags(a: Assessment, flags: Sequence[str], cluster: Cluster) -> list[str]:
    """Take the flags of `launcher.train` from the command that the plan prints."""
    _, training = parse_options(flags)
    return split_command(command_of(a, training, cluster).split()[1:])[2]


def _row(a: Assessment, flags: Sequence[str], cluster: Cluster) -> dict[str, Any]:
    assert a.time is not None  # what is trained fits
    return {
        "candidate": a.choice.label,
        "precision": a.choice.precision,
        "recompute": a.choice.checkpointing,
        "micro_batch": a.run.config.data.micro_batch,
        "flags": train_flags(a, flags, cluster),
        "least_tokens_per_s": a.time.least_tokens_per_s,
        "predicted_tokens_per_s": a.time.tokens_per_s,
        "most_tokens_per_s": a.time.most_tokens_per_s,
        "rounds_tokens_per_s": [],
    }


def measured(
    candidates: Sequence[Assessment],
    flags: Sequence[str],
    cluster: Cluster,
    corpus: Path,
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Train all candidates in turn, round by round."""
    rows = [_row(a, flags, cluster) for a in candidates]
    extra = [*QUICK, "--steps", str(options.steps), "--data", str(corpus), "--device", "cpu"]
    with tempfile.TemporaryDirectory() as folder:
        for number, row in itertools.product(range(options.rounds), rows):
            out = Path(folder) / f"{number}-{row['candidate']}"
            run = train([*row["flags"], *extra], out=out, ranks=cluster.world_size)
            if not run.completed:
                sys.exit(f"{row['candidate']}: {run.state}: {run.reason}")
            row["rounds_tokens_per_s"].append(run.tokens_per_s())
    for row in rows:
        row["tokens_per_s"] = statistics.median(row["rounds_tokens_per_s"])
    return rows


def verdict_of(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Compare a pair, `one` planned before `other`."""
    if one["tokens_per_s"] >= other["tokens_per_s"]:
        return "agrees"
    tied = ties(one["predicted_tokens_per_s"], other["predicted_tokens_per_s"])
    return "tie" if tied else "differs"


def page(results: dict[str, Any]) -> str:
    """Format the results in Markdown."""
    lines = [
        "# Predicted order of candidates beside the measured one",
        "",
        f"`python bench/plan_order.py --rounds {results['rounds']} --steps {results['steps']}`, "
        f"{results['cores']} cores, load {results['load']:.1f} at the start. Tokens per second of "
        "all ranks; measured: median of the rounds, of each the median step.",
    ]
    for name, rows in results["plans"].items():
        order = sorted(range(len(rows)), key=lambda n: -rows[n]["tokens_per_s"])
        pairs = [verdict_of(a, b) for a, b in itertools.combinations(rows, 2)]
        counts = ", ".join(
            f"{pairs.count(each)} {text}"
            for each, text in (
                ("agrees", "agree"),
                ("tie", "differ within the printed tie"),
                ("differs", "differ"),
            )
        )
        head = ["planned", "candidate", "precision", "recompute", "micro-batch"]
        head += ["predicted", "measured", "measured as"]
        lines += ["", f"## {name}", "", f"{len(pairs)} pairs: {counts}.", ""]
        lines += ["| " + " | ".join(head) + " |", "|---:|---|---|---|---:|---:|---:|---:|"]
        for number, row in enumerate(rows):
            spread = f"{row['least_tokens_per_s']:,.0f}-{row['most_tokens_per_s']:,.0f}"
            tied = ties(row["predicted_tokens_per_s"], rows[0]["predicted_tokens_per_s"])
            cells = [
                *(str(number + 1), row["candidate"], row["precision"], row["recompute"]),
                *(str(row["micro_batch"]), spread + ("=" if tied else "")),
                *(f"{row['tokens_per_s']:,.0f}", str(order.index(number) + 1)),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write bench/results/plan_order.json and .md, plan by plan."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--plans", nargs="+", choices=list(PLANS), default=list(PLANS))
    parser.add_argument("--profile", type=Path, help="rates measured before")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "steps": options.steps,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "plans": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_stdlib(Path(folder) / "corpus.txt", CORPUS_BYTES)
        profile = options.profile or Path(folder) / "machine.json"
        if options.profile is None:
            measure_machine(profile)
        for name in options.plans:
            flags = PLANS[name].split()
            candidates, cluster = first_candidates(flags, profile)
            rows = measured(candidates, flags, cluster, corpus, options)
            results["plans"][name] = rows
            for row in rows:
                print(name, row, flush=True)
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(page(results))


if __name__ == "__main__":
    main()
