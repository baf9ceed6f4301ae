"""What a trained model costs at inference: PyTorch, compiled, ONNX Runtime; fp32, bf16, int8.

    python bench/inference.py [RUN...] --output bench/results/inference

Without runs it trains one on the embedded corpus first, and prunes it by two patterns: half of the
hidden units, which makes a smaller model, and two of four weights, which leaves zeros. All is
`shardscale infer-bench`'s, which runs each engine in its own process; ratios are to PyTorch as it
is in fp32, of the same call. The table goes to OUTPUT.md, and all figures to OUTPUT.json.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import ROOT, environment, refuse_existing, train

MODEL = ["--layers=4", "--d-model=256", "--heads=4", "--context=128", "--vocab-size=4096"]
LLAMA = ["--position=rope", "--norm=rms", "--activation=swiglu", "--kv-heads=2", "--d-ff=704"]
LLAMA += ["--bias=none"]
STEPS, MICRO_BATCH = 200, 8
PATTERNS = ("mlp", "2:4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options, flags = parser.parse_known_args()
    for suffix in (".md", ".json"):
        refuse_existing(options.output.with_suffix(suffix))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = folder / "inference"
        runs = options.runs or dense_and_pruned(folder)
        command = [sys.executable, "-m", "launcher", "infer-bench", *map(str, runs), *flags]
        subprocess.run([*command, f"--out={found}"], cwd=ROOT, env=environment(), check=True)
        shutil.copyfile(found / "inference.md", options.output.with_suffix(".md"))
        document = json.loads((found / "inference.json").read_text())
        for row in document["rows"]:  # thousands of numbers that nobody reads
            del row["tokens"]
        text = json.dumps(document, indent=1) + "\n"
        options.output.with_suffix(".json").write_text(text)


def dense_and_pruned(folder: Path) -> list[Path]:
    """The same model thrice, not trained again after it was pruned."""
    dense = trained(folder / "dense")
    runs = [dense]
    for pattern in PATTERNS:
        out = folder / f"pruned-{pattern.replace(':', '-')}"
        command = [sys.executable, "-m", "launcher", "prune", str(dense), f"--out={out}"]
        command += [f"--pattern={pattern}", "--sparsity=0.5", "--method=magnitude"]
        subprocess.run(command, cwd=ROOT, env=environment(), check=True)
        runs.append(out)
    return runs


def trained(out: Path) -> Path:
    """A run that predicts the embedded corpus better than chance."""
    size = [
        *MODEL,
        *LLAMA,
        f"--steps={STEPS}",
        f"--micro-batch={MICRO_BATCH}",
        "--save-every=1000000",
    ]
    run = train([*size, "--lr=2e-3", "--test-batches=1", "--data=stdlib"], out=out)
    assert run.completed, run.reason
    return out


if __name__ == "__main__":
    main()
