"""The nine configurations of the study, ours beside them, and the peaks of two extremes.

    python bench/study.py --output FOLDER [--size small|full] [--cells study ours peak NAME ...]
        [--steps N]

`full` (where there is a GPU) is the study's model and batch as `--grid-file seed` has them;
`small` (on a CPU) is the same shape and the same epoch scaled down. There, times come from a sweep
without tracing and peaks from a second one with `--memory-trace`, which does not go with
`--compile`. `peak` is seed-134m itself at batch 48, twice: fp32 with eager attention, whole logits
and no checkpointing (needs 16 GB of memory), then bf16 with chunked loss and full checkpointing.

FOLDER gets study.md, study.json, and report.html, the launcher's own page of the cells; with the
study's own model (`full` and `peak`) also published.md, the figures that the study prints, and ours
below them. A configuration that cannot run here is a row that says why.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from runs import PHASES, Run, refuse_existing, sweep, table, write_stdlib

from launcher.compare.sweep.grid_source import read_grid_file

GIB, MIB = 2**30, 2**20
Values = dict[str, Any]

EAGER: Values = {"attention": "eager", "loss_chunk": 0}
# One choice at a time on top of bf16, then several. `micro_batch` is the study's 125.
OURS: dict[str, Values] = {
    "fp32-eager-whole-logits": {"precision": "fp32", **EAGER},
    "bf16-eager": {"attention": "eager"},
    "bf16-whole-logits": {"loss_chunk": 0},
    "bf16-compile": {"compile": True},
    "bf16-selective": {"activation_checkpointing": "selective"},
    "bf16-full": {"activation_checkpointing": "full"},
    "bf16-offload": {"activation_checkpointing": "offload"},
    "bf16-window64": {"window": 64},
    "bf16-flex-window64": {"attention": "flex", "window": 64},
    "bf16-adamw8bit": {"optimizer": "adamw8bit"},
    "bf16-pure": {"precision": "bf16-pure"},
    "bf16-pure-adamw8bit": {"precision": "bf16-pure", "optimizer": "adamw8bit"},
    "bf16-pure-compile": {"precision": "bf16-pure", "compile": True},
    "bf16-pure-full-in-backward": {
        "precision": "bf16-pure",
        "activation_checkpointing": "full",
        "optimizer": "adamw8bit",
        "optimizer_in_backward": True,
        "clip": 0,
    },
}
PEAK: dict[str, Values] = {
    "peak-fp32-eager": {"precision": "fp32", **EAGER},
    "peak-bf16-full-chunked": {"precision": "bf16", "activation_checkpointing": "full"},
    "peak-bf16-pure-full-chunked": {"precision": "bf16-pure", "activation_checkpointing": "full"},
}
# The study's shape and batches at about a sixth; chunks of the loss in proportion.
SMALL_SHAPE: Values = {"layers": 4, "d_model": 128, "heads": 2, "vocab_size": 2048}
SMALL: Values = {**SMALL_SHAPE, "loss_chunk": 512, "device": "cpu"}
SMALL_BATCH = {125: 8, 195: 12, 303: 20}
SMALL_CORPUS_BYTES = 300_000  # an epoch of about 40 steps
MEMORY_STEPS = 3

# What the study prints: choice, GB in forward, backward and step, s/step, largest batch.
PUBLISHED = (
    ("fp32", (24.9, 32.4, 32.4), 1.96, 125),
    ("bf16", (15.0, 22.4, 22.4), 0.90, 195),
    ("flash attention", (14.4, 21.9, 21.9), 0.40, 195),
    ("fp32, activation checkpointing", (6.7, 14.2, 14.2), 2.4, 303),
)
PUBLISHED_BATCH = 125
ABOUT_PUBLISHED = """\
The study's figures are another GPU's, an NVIDIA A40: decoder of 134,367,744 parameters, context
256, Adam at 5e-4, batch 125; memory in GB as it prints them. Ours are in GiB (2^30 bytes). Compare
how the choices relate within each GPU, not one GPU with the other.

Perplexity, as listed by the study: 132.01, 131.68, 130.92, 135.24; which choice each one belongs to
is not certain.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=("small", "full"), default="full" if has_gpu else "small")
    parser.add_argument("--cells", nargs="+", default=["study", "ours"])
    parser.add_argument("--steps", type=int, help="instead of an epoch")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    refuse_existing(options.output)
    small = options.size == "small"
    with tempfile.TemporaryDirectory() as scratch:
        base, cells = cells_of(small, Path(scratch))
        if "peak" in options.cells:
            base, cells = peak_cells(Path(scratch))
        else:
            cells = {name: c for name, c in cells.items() if chosen(name, options.cells)}
        if options.steps:
            base = {k: v for k, v in base.items() if k != "epochs"} | {"steps": options.steps}
        rows, report = measured(
            base,
            cells,
            Path(scratch),
            traced=not has_gpu,
            timed=has_gpu or "peak" not in options.cells,
        )
        options.output.mkdir(parents=True)
        shutil.copy(report / "report.html", options.output)
    what = "seed-134m at batch 48" if "peak" in options.cells else f"{options.size} size"
    about = f"{what}, {torch.cuda.get_device_name() if has_gpu else 'CPU'}"
    shown = {key: value for key, value in base.items() if key != "data"}
    result = {"about": about, "torch": torch.__version__, "base": shown, "rows": rows}
    (options.output / "study.json").write_text(json.dumps(result, indent=1) + "\n")
    text = markdown(rows, about)
    (options.output / "study.md").write_text(text)
    if base.get("model") == "seed-134m" and not base.keys() & SMALL_SHAPE.keys():
        beside = published(rows, torch.cuda.get_device_name() if has_gpu else "CPU")
        (options.output / "published.md").write_text(beside)
    print(text)


def cells_of(small: bool, folder: Path) -> tuple[Values, dict[str, Values]]:
    """Return the settings that all cells have in common, and those that make each one."""
    study = read_grid_file("seed")
    cells = {row["name"]: {k: v for k, v in row.items() if k != "name"} for row in study.rows}
    for name, cell in OURS.items():
        cells[name] = {"precision": "bf16", "micro_batch": 125, **cell}
    base = dict(study.base)
    if small:
        base |= SMALL | {"data": str(write_stdlib(folder / "text.txt", SMALL_CORPUS_BYTES))}
        for cell in cells.values():
            cell["micro_batch"] = SMALL_BATCH.get(cell["micro_batch"], cell["micro_batch"])
    return base, cells


def peak_cells(folder: Path) -> tuple[Values, dict[str, Values]]:
    """Two steps of the whole model; what they learn does not matter."""
    text = str(write_stdlib(folder / "text.txt", 80_000))
    base = {"model": "seed-134m", "micro_batch": 48, "steps": 2, "tokenizer": "byte", "data": text}
    return base, PEAK


def chosen(name: str, wanted: Sequence[str]) -> bool:
    return name in wanted or ("ours" if name in OURS else "study") in wanted


def measured(
    base: Values, cells: dict[str, Values], folder: Path, *, traced: bool, timed: bool
) -> tuple[list[Values], Path]:
    """One row per configuration, and the folder of the launcher's report; `traced` runs have peaks
    on a CPU, `timed` ones are not slowed down by that."""
    named = [{"name": name, **cell} for name, cell in cells.items()]
    memory = times = None
    if traced:
        steps = {k: v for k, v in base.items() if k != "epochs"} | {"memory_trace": True}
        steps.setdefault("steps", MEMORY_STEPS)
        memory = sweep(steps, [c for c in named if not c.get("compile")], out=folder / "memory")
    if timed:
        times = sweep(base, named, out=folder / "speed")
    runs = times or memory or {}
    rows = [row(name, cells[name], run, (memory or runs).get(name)) for name, run in runs.items()]
    return rows, folder / ("speed" if times else "memory") / "report"


def row(name: str, cell: Values, run: Run, memory: Run | None) -> Values:
    """Peaks are None where a compiled run cannot be traced."""
    found: Values = {"name": name, "cell": cell, "state": run.state, "reason": run.reason}
    if run.completed:
        (record,) = run.records("run")
        found |= {
            "micro_batch": record["micro_batch"],
            "attention": record["attention"],
            "step_time_s": run.step_time_s(),
            "tokens_per_s": run.tokens_per_s(),
            "perplexity": run.summary["perplexity"],
            "peaks_bytes": memory.phase_peaks() if memory and memory.completed else None,
        }
    return found


def markdown(rows: Sequence[Values], about: str) -> str:
    """The table for people; what could not run comes below it."""
    done = [r for r in rows if r["state"] == "completed"]
    largest = max(max(r["peaks_bytes"].values()) for r in done if r["peaks_bytes"])
    unit, size = ("GiB", GIB) if largest >= GIB else ("MiB", MIB)
    titles = ["configuration", "attention", "batch", *(f"{p} {unit}" for p in PHASES)]
    titles += [f"peak {unit}", "of the largest", "s/step", "tokens/s", "perplexity"]
    lines = []
    for r in done:
        memory = ["n/a"] * 5
        if peaks := r["peaks_bytes"]:
            top = max(peaks.values())
            memory = [f"{peaks[phase] / size:.2f}" for phase in PHASES]
            memory += [f"{top / size:.2f}", f"1/{largest / top:.2f}"]
        speed = [f"{r['step_time_s']:.3f}", f"{r['tokens_per_s']:,.0f}", f"{r['perplexity']:.2f}"]
        lines.append([r["name"], str(r["attention"]), str(r["micro_batch"]), *memory, *speed])
    text = f"# The study's configurations and ours\n\n{about}.\n\n{table(titles, lines)}\n"
    missing = [f"- {r['name']}: {r['state']}: {r['reason']}" for r in rows if r not in done]
    return text + ("\nWhat does not run here:\n\n" + "\n".join(missing) + "\n" if missing else "")


def published(rows: Sequence[Values], place: str) -> str:
    """The study's own figures, and those of our rows below them, as a page for people."""
    titles = ["configuration", "measured on", *PHASES, "s/step", "batch", "largest batch"]
    lines = []
    for choice, peaks_gb, step_time_s, largest_batch in PUBLISHED:
        memory = [f"{size:.1f} GB" for size in peaks_gb]
        speed = [f"{step_time_s:.2f}", str(PUBLISHED_BATCH), str(largest_batch)]
        lines.append([choice, "NVIDIA A40, 48 GB (the study's)", *memory, *speed])
    for r in rows:
        if r["state"] == "completed":
            peaks = r["peaks_bytes"] or {}
            memory = [f"{peaks[p] / GIB:.1f} GiB" if p in peaks else "n/a" for p in PHASES]
            speed = [f"{r['step_time_s']:.2f}", str(r["micro_batch"]), "n/a"]
            lines.append([r["name"], place, *memory, *speed])
    return f"# Beside the published study\n\n{table(titles, lines)}\n\n{ABOUT_PUBLISHED}"


if __name__ == "__main__":
    main()
