"""300 steps in every precision, against fp32: loss curves and the test loss they end at.

    python bench/precision.py [--device cpu|cuda] [--steps 300] [--only TEXT...]
                              [--output bench/results]

A small model on the standard library's source text (on a CPU the first 1.5 MB of it, byte by byte):
the same initial weights and the same batches in each run, so that what differs is rounding. A
second seed in fp32 shows how much two runs differ anyway. On a CPU the launcher refuses fp8; there
the same engine is run with emulated fp8 matmuls, to see what the format does to the loss. Writes
precision.json, .md and .png (precision_cuda with a larger model on a GPU).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from runs import ROOT, Run, environment, refuse_existing, table, train, write_stdlib

from launcher.run.prepare import prepare

APOLLO = ("--optimizer=apollo", "--apollo-rank=32")
VARIANTS = {
    "fp32": ("--precision=fp32",),
    "fp32, another seed": ("--precision=fp32", "--seed=1"),
    "bf16": ("--precision=bf16",),
    "fp16": ("--precision=fp16",),
    "fp8": ("--precision=fp8",),
    "bf16-pure": ("--precision=bf16-pure",),
    "bf16-pure, no compensation": ("--precision=bf16-pure", "--no-compensation"),
    "bf16, moments in bf16": ("--precision=bf16", "--moments-dtype=bf16"),
    "bf16, adamw8bit": ("--precision=bf16", "--optimizer=adamw8bit"),
    "bf16-pure, adamw8bit": ("--precision=bf16-pure", "--optimizer=adamw8bit"),
    # Another algorithm, not another rounding: its curve may differ by more. Its rate is relative to
    # a weight's root mean square, 0.02 at first: 5e-2 * 0.02 is the others' 1e-3.
    "bf16, adafactor at lr 5e-2": ("--precision=bf16", "--optimizer=adafactor", "--lr=5e-2"),
    "bf16, apollo": ("--precision=bf16", *APOLLO),
    # Its steps are as long as AdamW's at the same rate, but its best rate is larger.
    "bf16, apollo at lr 1e-2": ("--precision=bf16", *APOLLO, "--lr=1e-2"),
    "bf16, adamw at lr 3e-3": ("--precision=bf16", "--lr=3e-3"),
}
EMULATED = "fp8, emulated"
MODELS = {
    "cpu": ("--layers=4", "--d-model=128", "--heads=2", "--context=64", "--micro-batch=16"),
    "cuda": ("--model=gpt2", "--seq-len=512", "--micro-batch=32"),
}
TOKENS = {
    "cpu": ("--tokenizer=byte", "--vocab-size=272"),  # fp8 wants multiples of 16
    "cuda": ("--tokenizer=bpe", "--vocab-size=32000"),
}
# Where the loss spikes early, any rounding sends two runs apart for good: a small rate, slowly.
LR = {"cpu": "--lr=1e-3", "cuda": "--lr=6e-4"}
WARMUP_STEPS = 30  # or half of fewer steps
TEXT_BYTES = 1_500_000  # on a CPU: 300 steps are no epoch, and the test split is soon read
SMOOTH_STEPS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run fp32 and what has one of these in its name"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--emulate-fp8", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.emulate_fp8:
        emulate_fp8(options.emulate_fp8)
    stem = options.output / ("precision" if options.device == "cpu" else "precision_cuda")
    refuse_existing(stem.with_suffix(".json"))
    flags = [*MODELS[options.device], *TOKENS[options.device], LR[options.device]]
    flags += [f"--warmup-steps={min(WARMUP_STEPS, options.steps // 2)}"]
    flags += ["--strategy=single", f"--device={options.device}", f"--steps={options.steps}"]
    with tempfile.TemporaryDirectory() as folder:
        text = "stdlib"
        if options.device == "cpu":
            text = str(write_stdlib(Path(folder) / "text.txt", TEXT_BYTES))
        rows = []
        wanted = {n for n in (*VARIANTS, EMULATED) if any(t in n for t in options.only)} | {"fp32"}
        for number, (name, more) in enumerate(VARIANTS.items()):
            if name not in wanted:
                continue
            run = train([*flags, f"--data={text}", *more], out=Path(folder) / str(number))
            rows.append(row(name, run))
            print(json.dumps({k: v for k, v in rows[-1].items() if k != "losses"}), flush=True)
        if options.device == "cpu" and EMULATED in wanted:
            run = emulated([*flags, f"--data={text}"], Path(folder) / "emulated")
            rows.append(row(EMULATED, run))
    result = {"device": options.device, "torch": torch.__version__, "flags": flags, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(result) + "\n")
    text = markdown(rows, options.device, flags)
    stem.with_suffix(".md").write_text(text)
    plot([r for r in rows if "losses" in r], stem.with_suffix(".png"))
    print(text)


def emulated(flags: list[str], out: Path) -> Run:
    command = [sys.executable, __file__, "--emulate-fp8", *flags, f"--out={out}"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, stdout=subprocess.DEVNULL)
    return Run(folder=out, state="completed", reason=None)


def emulate_fp8(flags: list[str]) -> None:
    """Train as the launcher does, past its refusal of fp8 on a CPU."""
    from launcher.parallel.world import leave, start
    from launcher.run.session import Session
    from launcher.train import train as train_here

    prepared = prepare(
        [*flags, "--report-to=none", "--save-every=0"], world_size=1, ranks_per_node=1
    )
    config = prepared.resolved.config.replace(precision="fp8")
    prepared = replace(prepared, resolved=replace(prepared.resolved, config=config))
    world = start("cpu", timeout_s=60, needs_group=False)
    with Session(prepared, world) as session:
        train_here(prepared, world, session)
    leave(0, together=True)


def row(name: str, run: Run) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "state": run.state, "reason": run.reason}
    if run.completed:
        found |= {
            "losses": [round(step["loss"], 5) for step in run.records("step")],
            "skipped_steps": run.summary["skipped_steps"],
            "test_loss": run.summary["test_loss"],
            "tokens_per_s": run.tokens_per_s(),
        }
    return found


def markdown(rows: list[dict[str, Any]], device: str, flags: list[str]) -> str:
    """Differences to fp32: of the curves step by step, and of the loss on the whole test split."""
    reference = rows[0]
    titles = ["run", "test loss", "minus fp32", "perplexity", "mean of the last 50 steps"]
    titles += ["largest difference to fp32 in a step", "median", "skipped steps"]
    lines = []
    for r in rows:
        if "losses" not in r:
            continue
        gaps = [abs(a - b) for a, b in zip(r["losses"], reference["losses"], strict=True)]
        lines.append(
            [
                r["name"],
                f"{r['test_loss']:.4f}",
                f"{r['test_loss'] - reference['test_loss']:+.4f}",
                f"{math.exp(r['test_loss']):.3f}",
                f"{statistics.mean(r['losses'][-50:]):.4f}",
                f"{max(gaps):.4f}",
                f"{statistics.median(gaps):.5f}",
                str(r["skipped_steps"]),
            ]
        )
    missing = [f"- {r['name']}: {r['state']}: {r['reason']}" for r in rows if "losses" not in r]
    head = f"# {len(reference['losses'])} steps in every precision\n\n{device}: `{' '.join(flags)}`"
    text = f"{head}\n\n{table(titles, lines)}\n\n![loss curves](precision.png)\n"
    if device == "cuda":
        text = text.replace("precision.png", "precision_cuda.png")
    return text + ("\nWhat does not run here:\n\n" + "\n".join(missing) + "\n" if missing else "")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The curves, and below them how far each is from fp32's."""
    try:
        import matplotlib
    except ImportError:
        return print("no plot: pip install matplotlib")  # figures are worth more
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 8), sharex=True)
    reference = rows[0]["losses"]
    for number, r in enumerate(rows):
        style = {"label": r["name"], "color": f"C{number}", "linewidth": 1}
        smooth = running_mean(r["losses"])
        above.plot(range(1, len(smooth) + 1), smooth, **style)
        if number:
            gaps = [a - b for a, b in zip(r["losses"], reference, strict=True)]
            below.plot(range(1, len(gaps) + 1), running_mean(gaps), **style)
    above.set_ylabel(f"training loss, mean of {SMOOTH_STEPS} steps")
    below.axhline(0, color="0.6", linewidth=1)
    below.set_ylabel(f"minus fp32's, mean of {SMOOTH_STEPS} steps")
    below.set_xlabel("step")
    above.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def running_mean(values: list[float]) -> list[float]:
    starts = (max(0, end - SMOOTH_STEPS) for end in range(1, len(values) + 1))
    return [statistics.mean(values[s:e]) for e, s in enumerate(starts, start=1)]


if __name__ == "__main__":
    main()
