"""Perplexity after pruning half, and after training on: every pattern and method, against dense.

    python bench/pruning.py [--steps 300] [--recovery 100] [--sparsity 0.5] [--output bench/results]

A small model on bench/shakespeare.txt, byte by byte. `--steps` dense; then every pattern by every
method; then `--recovery` steps with a new optimizer, the same for the model that was not pruned,
which is what the others are to be held against. A dense run of all steps in one schedule is beside
them. Perplexities are those of the same sequences of the validation split. Writes pruning.json,
.md and .png.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from runs import ROOT, Run, environment, refuse_existing, table, train

PATTERNS = ("unstructured", "2:4", "heads", "mlp")
METHODS = ("magnitude", "wanda")
TEXT = ROOT / "bench" / "shakespeare.txt"
TRAINING = (
    *("--layers=2", "--d-model=64", "--heads=4", "--context=64", "--vocab-size=257"),
    *("--tokenizer=byte", f"--data={TEXT}"),
)
COMMON = ("--device=cpu", "--micro-batch=16", "--test-batches=0", "--save-every=1000000")
LR, RECOVERY_LR = 3e-3, 1e-3
DENSE = "dense"
MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--recovery", type=int, default=100)
    parser.add_argument("--sparsity", type=float, default=0.5)
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    refuse_existing(options.output / "pruning.json")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        dense = trained(folder / "dense", options.steps, LR, *TRAINING)
        steps = options.steps + options.recovery
        whole = perplexity(trained(folder / "whole", steps, LR, *TRAINING))
        recovered = recover(folder / "dense", options.recovery)
        rows = [
            {
                "name": f"{DENSE}, not pruned",
                "perplexity": {"before": perplexity(dense), "after": perplexity(dense)},
                "recovered": curve(recovered),
                "parameters": dense.records("run")[0]["parameters"],
            }
        ]
        for pattern, method in itertools.product(PATTERNS, METHODS):
            out = folder / f"{pattern}-{method}".replace(":", "-")
            prune(folder / "dense", out, pattern, method, options.sparsity)
            report = json.loads((out / "pruning.json").read_text())
            run = recover(out, options.recovery)
            rows.append(
                {
                    "name": f"{pattern}, {method}",
                    "perplexity": report["perplexity"],
                    "recovered": curve(run),
                    "parameters": run.records("run")[0]["parameters"],
                    "bytes": report["bytes"],
                }
            )
    result = {
        **{"steps": options.steps, "recovery": options.recovery, "sparsity": options.sparsity},
        **{"whole": whole, "rows": rows},
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "pruning.json").write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(result)
    (options.output / "pruning.md").write_text(text)
    plot(result, options.output / "pruning.png")
    print(text)


def trained(out: Path, steps: int, lr: float, *flags: str) -> Run:
    every = max(1, steps // 5)
    run = train(
        [*COMMON, f"--steps={steps}", f"--lr={lr}", f"--eval-every={every}", *flags], out=out
    )
    assert run.completed, run.reason
    return run


def recover(source: Path, steps: int) -> Run:
    """Train on from weights; a pruned run says what masks it has."""
    out = source.with_name(f"{source.name}-recovered")
    return trained(out, steps, RECOVERY_LR, f"--init-from={source}", f"--data={TEXT}")


def prune(source: Path, out: Path, pattern: str, method: str, sparsity: float) -> None:
    command = [sys.executable, "-m", "launcher", "prune", str(source), "--out", str(out)]
    command += ["--pattern", pattern, "--method", method, "--sparsity", str(sparsity)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def curve(run: Run) -> list[tuple[int, float]]:
    """(step, perplexity of the validation split)."""
    return [(r["step"], r["perplexity"]) for r in run.records("eval") if r["split"] == "validation"]


def perplexity(run: Run) -> float:
    return curve(run)[-1][1]


def markdown(result: dict[str, Any]) -> str:
    titles = ["model", "parameters", "pruned", f"after {result['recovery']} steps", "of dense"]
    titles += ["bf16, MiB", "with a bit mask, MiB"]
    rows = result["rows"]
    best = rows[0]["recovered"][-1][1]
    lines = []
    for r in rows:
        end = r["recovered"][-1][1]
        held = r.get("bytes", {}).get("bf16")
        dense = 2 * r["parameters"] if held is None else held["dense"]
        sparse = dense if held is None else held["sparse"]
        figures = [f"{r['parameters']:,}", f"{r['perplexity']['after']:.3f}", f"{end:.3f}"]
        figures += [f"{end / best - 1:+.1%}", f"{dense / MIB:.2f}", f"{sparse / MIB:.2f}"]
        lines.append([r["name"], *figures])
    return (
        f"# Pruning\n\nPerplexity of the validation split of bench/shakespeare.txt: after "
        f"{result['steps']} dense steps {rows[0]['perplexity']['before']:.3f}; with "
        f"{result['sparsity']:.0%} pruned; after {result['recovery']} more steps with a new "
        f"optimizer. A dense run of {result['steps'] + result['recovery']} steps in one schedule: "
        f"{result['whole']:.3f}.\n\n{table(titles, lines)}\n"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Perplexity from just after pruning to the end of the recovery."""
    try:
        import matplotlib
    except ImportError:
        return print("no plot: pip install matplotlib")  # figures are worth more
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for number, r in enumerate(result["rows"]):
        points = [(0, r["perplexity"]["after"]), *r["recovered"]]
        colour = "black" if number == 0 else f"C{(number - 1) // len(METHODS)}"
        dashed = number > 0 and (number - 1) % len(METHODS) == 1
        axes.plot(
            *zip(*points, strict=True), "--" if dashed else "-", color=colour, label=r["name"]
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:.4g}")
    axes.yaxis.set_minor_formatter("{x:.4g}")
    axes.set_xlabel("steps after pruning")
    axes.set_ylabel("perplexity of the validation split")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
