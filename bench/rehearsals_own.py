"""Random configurations of `launcher.train` under `shardscale rehearse`, beside `shardscale plan`
of the same flags: real allocator, no kernels run.

    python bench/rehearsals_own.py [--count 100] [--seed 0] [--only NUMBER ...]

Runs on a Python with torch's CUDA build, where the launcher starts, too. Both are the product's own
commands, on the same GPU. Results that are there are kept. Writes results/rehearsals_own.jsonl and
rehearsals_own.md.
"""

import argparse
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prediction_cases import STRATEGIES
from runs import ROOT, table

import shardscale
from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.util.errors import UserError

RESULT = Path(__file__).parent / "results" / "rehearsals_own.jsonl"
GPU = "H100"
MOST_S = 600
MEASURES = ("allocated", "reserved")
MODELS = (
    *("gpt2", "gpt2-medium", "seed-134m", "smollm2-135m", "llama-3.2-1b", "qwen2.5-0.5b"),
    *("qwen3-0.6b", "mistral-7b"),
)
OF_TRANSFORMERS = ("pythia-160m", "opt-125m", "gemma-3-1b")
SMALL = "--layers={layers} --d-model={width} --heads=4 --vocab-size=4096"
"""Small models only: offloaded states are on the host, and updated there."""
SHAPES = (
    # Shared key heads; biases; heads that are wider than the model; heads of 50, which some kernels
    # pad and others do not take.
    (
        *("--d-model=256", "--heads=8", "--kv-heads=2", "--d-ff=704", "--vocab-size=4096"),
        *("--position=rope", "--norm=rms", "--activation=swiglu", "--bias=none"),
    ),
    ("--d-model=320", "--heads=5", "--position=rope", "--activation=relu", "--vocab-size=1000"),
    (
        *("--d-model=256", "--heads=4", "--head-dim=96", "--kv-heads=1", "--vocab-size=50257"),
        *("--position=rope", "--norm=rms", "--activation=swiglu", "--qk-norm", "--tied=False"),
    ),
    ("--d-model=250", "--heads=5", "--bias=none", "--vocab-size=5003"),
)
ATTENTION = (
    *(("--attention=eager",), ("--attention=sdpa-math",), ("--window=100",)),
    *(("--attention=sdpa", "--window=100"), ("--document-attention",)),
    ("--attention=sdpa", "--document-attention"),
)
ALONE_OR_ZERO = tuple(name for name in STRATEGIES if "hybrid" not in name and name != "zero0")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", type=int, default=[], help="run these again")
    options = parser.parse_args()
    lines = RESULT.read_text(encoding="utf-8").splitlines() if RESULT.exists() else []
    known = {row["number"]: row for row in map(json.loads, lines)}
    for number, (ranks, flags) in enumerate(cases(options.count, options.seed)):
        row = known.get(number, {})
        same = (row.get("ranks"), row.get("flags")) == (ranks, shlex.join(flags))
        if same and number not in options.only:
            continue
        known[number] = {"number": number, **compared(ranks, flags)}
        print(number, said(known[number]), flush=True)
        rows = [known[key] for key in sorted(known) if key < options.count]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        RESULT.write_text(text, encoding="utf-8")
        RESULT.with_suffix(".md").write_text(page(rows), encoding="utf-8")


def cases(count: int, seed: int) -> Iterator[tuple[int, list[str]]]:
    """Yield (ranks, flags) of configurations that the launcher accepts."""
    draw = random.Random(seed)
    found = 0
    while found < count:
        ranks, flags = drawn(draw)
        try:
            resolve(parse_run_config(flags), world_size=ranks, device_type="cuda")
        except UserError:
            continue
        found += 1
        yield ranks, flags


def drawn(draw: random.Random) -> tuple[int, list[str]]:
    """Draw a configuration; not every one is possible."""
    ranks = draw.choice((1, 1, 2))
    strategy = draw.choice(ALONE_OR_ZERO)
    layers, micro_batch = draw.randint(1, 4), draw.choice((1, 2, 3, 4))
    modes = ("none", "none", "selective", "full", "offload", "every=2", "keep=qkv", "budget=1GiB")
    flags = [f"--model={draw.choice(MODELS)}", f"--layers={layers}"]
    if draw.random() < 0.4:
        flags = [f"--layers={layers}", *draw.choice(SHAPES)]
    if draw.random() < 0.15:
        flags = [f"--model={draw.choice(OF_TRANSFORMERS)}"]
    if "offload" in strategy:
        width = 64 * draw.randint(2, 8)
        flags = SMALL.format(layers=2 * layers, width=width).split()
    flags += [*STRATEGIES[strategy], f"--activation-checkpointing={draw.choice(modes)}"]
    flags += [f"--precision={draw.choice(('bf16', 'bf16', 'fp32', 'bf16-pure', 'fp16', 'fp8'))}"]
    kinds = ("adamw", "adamw", "adamw", "adamw8bit", "adafactor", "muon", "sgd", "apollo")
    flags += [f"--optimizer={draw.choice(kinds)}", f"--seq-len={draw.choice((128, 256, 511))}"]
    batch = micro_batch * draw.choice((1, 2, 3)) * ranks
    flags += [f"--micro-batch={micro_batch}", f"--global-batch={batch}"]
    if "offload" not in strategy and draw.random() < 0.25:
        flags += [f"--lora-rank={draw.choice((4, 16))}", "--random-base"]
        flags += draw.choice(([], ["--quantize-base=nf4"], ["--quantize-base=int8"]))
    if draw.random() < 0.4:
        flags += draw.choice(ATTENTION)
    if ranks > 1 and draw.random() < 0.3:
        flags += draw.choice((["--tensor-parallel=2"], ["--context-parallel=2"]))
    if draw.random() < 0.1:
        flags += ["--optimizer-in-backward", "--clip=0"]
    if draw.random() < 0.2:
        flags += draw.choice((["--mlp-tile=128"], ["--loss-chunk=0"], ["--dropout=0.1"]))
    return ranks, flags


def compared(ranks: int, flags: list[str]) -> Row:
    """Rehearse and plan one configuration."""
    row: Row = {"ranks": ranks, "flags": shlex.join(flags)}
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        running = rehearsal(ranks, flags, Path(folder))
        try:
            row |= planned(ranks, flags)
        except UserError as error:
            row["error"] = f"plan: {error}"
        try:
            printed, errors = running.communicate(timeout=MOST_S)
        except subprocess.TimeoutExpired:
            running.terminate()
            printed, errors = running.communicate()
    took_s = round(time.monotonic() - started_s)
    try:
        found = json.loads(printed)
    except ValueError:
        return {"error": f"rehearse: {errors.strip().splitlines()[-1:]}", **row, "took_s": took_s}
    if found["verdict"] is None or found["steps"] < 3:
        row.setdefault("error", f"{found['steps']} steps, {found['status']['reason']}")
        print(errors[-4000:], file=sys.stderr, flush=True)
    for measure in MEASURES:
        peaks = [rank[f"{measure}_peak_bytes"] or 0 for rank in found["ranks"]]
        row[f"rehearsed_{measure}_bytes"] = max(peaks, default=0)
    return {**row, "verdicts": [found["verdict"], row.get("verdict")], "took_s": took_s}


def rehearsal(ranks: int, flags: list[str], folder: Path) -> "subprocess.Popen[str]":
    """Start the launcher under `shardscale rehearse`."""
    text = folder / "text.txt"
    text.write_text((ROOT / "docs" / "failures.md").read_text(encoding="utf-8") * 20)
    start = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    training = [
        *("-m", "launcher.train", *flags, "--device=cuda", "--data", str(text)),
        *("--tokenizer=byte", "--steps=4", "--report-to=none", "--test-batches=0"),
        *("--out", str(folder / "run")),
    ]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "launcher", "rehearse", "--json", "--gpu", GPU),
            *("--out", str(folder / "rehearsed"), "--", sys.executable, *start, *training),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def planned(ranks: int, flags: list[str]) -> Row:
    """Plan the same flags, with every one of them fixed."""
    plan = shardscale.plan(gpus=ranks, gpu=GPU, every=True, **as_keywords(flags))
    wanted = resolve(parse_run_config(flags), world_size=ranks, device_type="cuda")
    (record,) = [record for record in plan if matches(record["config"], wanted.config)]
    peaks = {
        phase: size
        for phase, size in record["peaks_bytes"].items()
        if phase.split()[0] not in ("save", "resume")  # which three steps do not reach
    }
    return {
        "planned_allocated_bytes": max(peaks.values()),
        "planned_phase": max(peaks, key=lambda phase: peaks[phase]),
        "planned_reserved_bytes": record["reserved_bytes"],
        "verdict": record["verdict"],
    }


def as_keywords(flags: list[str]) -> dict[str, Any]:
    """Return flags as `shardscale.plan` takes them."""
    words = (flag.removeprefix("--").partition("=") for flag in flags)
    return {
        name.replace("-", "_").removeprefix("no_"): value if equals else not name.startswith("no-")
        for name, equals, value in words
    }


def matches(config: dict[str, Any], wanted: Any) -> bool:
    """Return True for the candidate of a plan that is what the run does."""
    names = (
        *("strategy", "reshard_after_forward", "reduce_each_micro_batch", "replicate"),
        *("offload_optimizer", "offload_param", "tensor_parallel", "context_parallel"),
    )
    flat = wanted.flat()
    return all(config.get(name) == flat.get(name) for name in names)


def said(row: Row) -> str:
    """One line."""
    if "error" in row:
        return f"failed: {row['flags']}: {row['error']}"
    return ", ".join(f"{m} {off(row, m):+.3%}" for m in MEASURES) + f": {row['flags']}"


def off(row: Row, measure: str) -> float:
    """Planned over rehearsed, less 1."""
    return float(row[f"planned_{measure}_bytes"] / row[f"rehearsed_{measure}_bytes"] - 1)


def page(rows: list[Row]) -> str:
    """Return the page."""
    good = [row for row in rows if "error" not in row]
    errors = []
    for measure in MEASURES:
        found = sorted(abs(off(row, measure)) for row in good) or [0.0]
        figures = (statistics.median(found), found[int(0.95 * (len(found) - 1))], found[-1])
        errors.append([measure, *(f"{figure:.4%}" for figure in figures)])
    same = sum(row["verdicts"][0] == row["verdicts"][1] for row in good)
    lines = [
        "# Rehearsals of our own launcher beside our own plans",
        "",
        f"{len(good)} of {len(rows)} random configurations of `launcher.train` under `shardscale "
        f"rehearse --gpu {GPU}`, 3 steps on 1 or 2 ranks, beside `shardscale plan` of the same "
        f"flags, by `bench/rehearsals_own.py`; real allocator, no kernels run. {same} have the "
        "same verdict.",
        "",
        table(("plan's error of", "median", "95th percentile", "worst"), errors),
        "",
    ]
    lines += [f"- {row['number']}: {said(row)}" for row in rows if "error" in row]
    cells = [
        [
            f"{row['flags'].replace('--', '')}",
            str(row["ranks"]),
            *(f"{row[f'rehearsed_{m}_bytes'] / 2**20:,.1f}" for m in MEASURES),
            *(f"{off(row, m):+.3%}" for m in MEASURES),
        ]
        for row in sorted(good, key=lambda row: -abs(off(row, "allocated")))
    ]
    head = ("configuration", "ranks", "allocated MiB", "reserved MiB", "error", "error of reserved")
    return "\n".join([*lines, table(head, cells)]) + "\n"


if __name__ == "__main__":
    main()
