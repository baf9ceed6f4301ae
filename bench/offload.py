"""What offload costs and saves: each choice beside the same strategy without it.

    python bench/offload.py [--size small|full] [--rounds 3] [--nvme-path DIR] [--output FOLDER]
        [--choices NAME...]

Each round runs all choices one after the other, so a ratio is one of neighbours; the median over
the rounds counts. Bytes are what the run's ledger holds between steps: model states on the device,
in host memory and on disk, and beside them the engine's own buffers. `full` (where there is a GPU)
is gpt2-xl, 1.5 B parameters, in bf16; `small` (on a CPU) shows only that each choice runs and what
the detour costs: there the device's memory is the host's, and one ledger holds both. DeepSpeed's
Adam on the host has all cores on a GPU machine, where nothing else computes on them. What cannot
run here is a row with the reason. Writes offload.json and .md (offload_cuda on a GPU).
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from runs import Run, refuse_existing, table, train, write_stdlib

from launcher.strategies.zero.nvme_build import is_built
from launcher.util.processes import usable_cores

GIB = 2**30
PLACES = ("device", "host", "disk")
# Choice -> (the row it is held against, flags).
CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "zero2": ("zero2", ("--zero=2",)),
    "zero2, optimizer in host memory": ("zero2", ("--zero=2", "--offload-optimizer=cpu")),
    "zero3": ("zero3", ("--zero=3",)),
    "zero3, optimizer in host memory": ("zero3", ("--zero=3", "--offload-optimizer=cpu")),
    "zero3, half of the optimizer in host memory": (
        "zero3",
        ("--zero=3", "--offload-optimizer=cpu", "--offload-fraction=0.5"),
    ),
    "zero3, parameters in host memory": ("zero3", ("--zero=3", "--offload-param=cpu")),
    "zero3, both in host memory": (
        "zero3",
        ("--zero=3", "--offload-optimizer=cpu", "--offload-param=cpu"),
    ),
    "zero3, optimizer on NVMe": ("zero3", ("--zero=3", "--offload-optimizer=nvme")),
    "zero3, both on NVMe": (
        "zero3",
        ("--zero=3", "--offload-optimizer=nvme", "--offload-param=nvme"),
    ),
    "fsdp": ("fsdp", ("--strategy=fsdp",)),
    "fsdp, parameters and optimizer in host memory": (
        "fsdp",
        ("--strategy=fsdp", "--offload-param=cpu"),
    ),
    "single, full checkpointing": (
        "single, full checkpointing",
        ("--strategy=single", "--activation-checkpointing=full"),
    ),
    "single, activations in host memory": (
        "single, full checkpointing",
        ("--strategy=single", "--activation-checkpointing=offload"),
    ),
}
FULL_CHECKPOINTING = "--activation-checkpointing=full"
SHAPES = {
    "small": (
        *("--model=seed-134m", "--layers=4", "--d-model=256", "--heads=4", "--vocab-size=2048"),
        *("--micro-batch=2", "--steps=10", "--device=cpu"),
    ),
    "full": ("--model=gpt2-xl", "--micro-batch=16", "--steps=10", "--device=cuda"),
}
TEXT_BYTES = 60_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    has_gpu = torch.cuda.is_available()
    parser.add_argument("--size", choices=("small", "full"), default="full" if has_gpu else "small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nvme-path", type=Path, help="a folder on a local disk (a temporary one)")
    parser.add_argument("--choices", nargs="+", choices=list(CHOICES), default=list(CHOICES))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.size == "full":
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    stem = options.output / ("offload_cuda" if options.size == "full" else "offload")
    refuse_existing(stem.with_suffix(".json"))
    runs: dict[str, list[Run]] = {name: [] for name in options.choices}
    with tempfile.TemporaryDirectory() as folder:
        text = write_stdlib(Path(folder) / "text.txt", TEXT_BYTES)
        shape = [*SHAPES[options.size], "--precision=bf16", "--tokenizer=byte", f"--data={text}"]
        for number in range(options.rounds):
            for name in options.choices:
                flags = [*shape, *flags_of(name, options.nvme_path or Path(folder))]
                runs[name].append(run := one_run(flags, Path(folder) / str(number) / name))
                rate = f"{run.tokens_per_s():,.0f} tokens/s" if run.completed else run.reason
                print(f"round {number + 1}: {name}: {rate}", flush=True)
        rows = [row(name, runs) for name in runs]
    where = torch.cuda.get_device_name() if options.size == "full" else "CPU"
    result = {"size": options.size, "device": where, "rounds": options.rounds, "rows": rows}
    options.output.mkdir(parents=True, exist_ok=True)
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    shown = " ".join((*SHAPES[options.size], "--precision=bf16"))
    lines = f"# Offload, {options.size} size on {where}\n\n`{shown}`\n\n{markdown(rows)}"
    stem.with_suffix(".md").write_text(lines)
    print(lines)


def flags_of(name: str, nvme_path: Path) -> list[str]:
    flags = list(CHOICES[name][1])
    if not any("activation" in flag for flag in flags):
        # Without it gpt2-xl's activations would hide what the states take.
        flags.append(FULL_CHECKPOINTING)
    if on_nvme(flags):
        flags.append(f"--nvme-path={nvme_path}")
    return flags


def on_nvme(flags: list[str]) -> bool:
    return any(flag.endswith("=nvme") for flag in flags)


def one_run(flags: list[str], out: Path) -> Run:
    """A run of the launcher; it would compile DeepSpeed's I/O for minutes where it is missing."""
    if on_nvme(flags) and not is_built():
        reason = "DeepSpeed's asynchronous I/O is not compiled on this machine"
        return Run(folder=out, state="unavailable", reason=reason)
    return train(flags, out=out)


def row(name: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Ratios to the neighbours without offload, and the bytes of each place."""
    against, _ = CHOICES[name]
    failed = next((run for run in runs[name] if not run.completed), None)
    if failed is not None:
        return {"name": name, "state": failed.state, "reason": failed.reason}
    own, others = runs[name], runs.get(against, [])  # none where --choices leaves it out
    held = next(r for r in own[-1].records("ledger") if r["moment"] == "held")
    peaks = own[-1].phase_peaks()
    pairs = [(a, b) for a, b in zip(own, others, strict=False) if b.completed]
    return {
        "name": name,
        "against": against,
        "tokens_per_s": [run.tokens_per_s() for run in own],
        "ratios": [a.tokens_per_s() / b.tokens_per_s() for a, b in pairs],
        **{f"{place}_bytes": states(held[place]) for place in PLACES},
        "buffers_bytes": sum(lines["buffers_bytes"] for lines in places(held)),
        "device_peak_bytes": max(peaks.values()) if peaks else None,
    }


def places(held: dict[str, Any]) -> list[dict[str, Any]]:
    return [held[place] for place in PLACES]


def states(lines: dict[str, Any]) -> int:
    names = ("params", "master", "grads", "optimizer")
    return sum(lines[f"{name}_bytes"] for name in names)


def markdown(rows: list[dict[str, Any]]) -> str:
    titles = ["choice", "tokens/s", "of the same without", "device GiB", "host GiB", "disk GiB"]
    titles += ["buffers GiB", "device peak GiB"]
    lines = []
    for r in rows:
        if "reason" in r:
            continue
        peak = r["device_peak_bytes"]
        lines.append(
            [
                r["name"],
                f"{statistics.median(r['tokens_per_s']):,.0f}",
                f"{statistics.median(r['ratios']):.3f}" if r["ratios"] else "n/a",
                *(f"{r[f'{place}_bytes'] / GIB:.3f}" for place in (*PLACES, "buffers")),
                "n/a" if peak is None else f"{peak / GIB:.3f}",
            ]
        )
    missing = [f"- {r['name']}: {r['state']}: {r['reason']}" for r in rows if "reason" in r]
    text = table(titles, lines) + "\n"
    return text + ("\nWhat does not run here:\n\n" + "\n".join(missing) + "\n" if missing else "")


if __name__ == "__main__":
    main()
