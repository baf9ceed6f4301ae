"""Fine-tuning on real text: all weights, LoRA, LoRA beside 8 and 4 bits, in one sweep and page.

    python bench/finetune.py --output FOLDER [--steps 300] [--base-steps 600] [--device cpu|cuda]

The examples are the standard library's own: a function's signature is the question, the first line
of its docstring the answer. The base is trained before, on the library's text. Writes finetune.md,
finetune.json and report.html, the launcher's own page of the runs.
"""

import argparse
import ast
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runs import Run, refuse_existing, sweep, table, train, write_stdlib

from launcher.config.schema import DataChoice
from launcher.data.sources import find_source

MIB = 2**20
SHAPE = ("--layers=4", "--d-model=128", "--heads=4", "--kv-heads=2", "--context=192", "--d-ff=384")
LLAMA = ("--position=rope", "--norm=rms", "--activation=swiglu", "--tied=False")
BIASES = ("--bias=none",)
BYTES = ("--tokenizer=byte", "--vocab-size=257")
BASE_TEXT_BYTES = 3_000_000
LORA: dict[str, Any] = {"lora_rank": 8, "lora_targets": "all", "lr": 3e-3}
CELLS: dict[str, dict[str, Any]] = {
    "base-as-it-is": {"lr": 1e-30, "weight_decay": 0},
    "all-weights": {"lr": 5e-4},
    "lora": LORA,
    "lora-int8": {**LORA, "quantize_base": "int8"},
    "lora-nf4": {**LORA, "quantize_base": "nf4"},
    "lora-nf4-bf16": {**LORA, "quantize_base": "nf4", "precision": "bf16"},
}
PARTS = ("params", "frozen", "master", "grads", "optimizer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--base-steps", type=int, default=600)
    options = parser.parse_args()
    refuse_existing(options.output / "finetune.json")
    with tempfile.TemporaryDirectory() as place:
        folder, device = Path(place), f"--device={options.device}"
        examples = write_examples(folder / "docstrings.jsonl")
        text = write_stdlib(folder / "text.txt", BASE_TEXT_BYTES)
        base = train(
            [
                *(*SHAPE, *LLAMA, *BIASES, *BYTES, device, f"--data={text}", "--micro-batch=8"),
                *(f"--steps={options.base_steps}", "--lr=2e-3", "--save-every=1000000"),
            ],
            out=folder / "base",
        )
        assert base.completed, base.reason
        common: dict[str, Any] = {
            **{"strategy": "single", "init_from": str(base.folder), "device": options.device},
            **{"data": str(examples), "steps": options.steps, "micro_batch": 8, "seq_len": 192},
            # Live bytes of a GPU are its allocator's; on a CPU every tensor is followed.
            **{"memory_trace": options.device == "cpu", "save_every": 0},
        }
        cells = [{"name": name, **values} for name, values in CELLS.items()]
        runs = sweep(common, cells, out=folder / "sweep")
        rows = [row(name, run) for name, run in runs.items()]
        options.output.mkdir(parents=True, exist_ok=True)
        result = {"device": options.device, "examples": examples_in(examples), "rows": rows}
        write(options.output, {**result, "steps": options.steps, "base_steps": options.base_steps})
        shutil.copyfile(folder / "sweep" / "report" / "report.html", options.output / "report.html")


def write_examples(path: Path) -> Path:
    """Signatures and what they are said to do, of everything in the standard library that has a
    docstring."""
    with path.open("w", encoding="utf-8") as file:
        for text in find_source(DataChoice()).texts():
            for question, answer in pairs(text):
                file.write(json.dumps({"prompt": question, "completion": answer}) + "\n")
    return path


def pairs(text: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return  # of tests of the compiler
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            answer = (ast.get_docstring(node) or "").partition("\n")[0].strip()
            if answer:
                yield f"def {node.name}({ast.unparse(node.args)}):\n", answer


def examples_in(path: Path) -> int:
    return sum(1 for _ in path.open(encoding="utf-8"))


def row(name: str, run: Run) -> dict[str, Any]:
    if not run.completed:
        return {"name": name, "state": run.state, "reason": run.reason}
    held = next(r for r in run.records("ledger") if r["moment"] == "held")["device"]
    peaks = run.phase_peaks()
    return {
        "name": name,
        "state": run.state,
        "test_loss": run.summary["test_loss"],
        "perplexity": run.summary["perplexity"],
        "held_bytes": {part: held[f"{part}_bytes"] for part in PARTS},
        "peak_bytes": max(peaks.values()) if peaks else None,
    }


def write(folder: Path, result: dict[str, Any]) -> None:
    titles = ["run", "test loss", "perplexity", *(f"{part}, MiB" for part in PARTS)]
    titles += ["peak of live bytes, MiB"]
    lines = []
    for r in result["rows"]:
        if r["state"] != "completed":
            lines.append([f"{r['name']}: {r['reason']}", *[""] * (len(titles) - 1)])
            continue
        held = [f"{r['held_bytes'][part] / MIB:.2f}" for part in PARTS]
        peak = "n/a" if r["peak_bytes"] is None else f"{r['peak_bytes'] / MIB:.1f}"
        figures = [f"{r['test_loss']:.4f}", f"{r['perplexity']:.2f}", *held, peak]
        lines.append([r["name"], *figures])
    text = (
        f"# Fine-tuning\n\n{result['steps']} steps on {result['examples']:,} signatures and "
        f"docstrings of the standard library, after {result['base_steps']} steps on its text; "
        f"{result['device']}.\n\n{table(titles, lines)}\n"
    )
    (folder / "finetune.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / "finetune.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
