"""What cutting sequences or matrices over ranks saves and costs, on 4 processes of a CPU.

    python bench/dimensions.py [--rounds 3] [--long | --tensor] [--output FOLDER]

Each layout reads the same global batch of long sequences. One run follows every live tensor
(`--memory-trace`): its highest moment on the worst rank, its activations there, and what `plan`
says of them. Then each round runs all layouts one after the other without that, so that a ratio of
tokens/s is one of neighbours (the median counts). Sent: what a rank tells the others of its
sequences in a step, by the planner's arithmetic. Processes of one machine share its cores: no
layout can be faster here than they allow. Writes dimensions.json and .md. `--long` trains on 65,536
tokens over 4 processes and on 20,000 in one instead, into dimensions_long.json and .md. `--tensor`
cuts matrices, with the loss in chunks and on made-up tokens, all layouts in one process group for
bytes and in one for each round: what a rank sends the others of its matrices is counted call by
call in forward and backward of a step, beside what the planner says. States are what the rank with
the highest peak has between steps: parameters, optimizer states, and gradients where they stay.
Into dimensions_tensor.json and .md.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, cast

from runs import Run, refuse_existing, run_ranks, table, train, write_stdlib

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.forecast.collectives import sent_bytes
from launcher.forecast.dimensions import sequence_transfers, tensor_transfers
from launcher.forecast.traffic import Collective

RANKS = 4
MIB = 2**20
# Name -> (what it is held against, flags).
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    f"{strategy}{name}": (strategy, (*flags, *more))
    for strategy, flags in (
        ("ddp", ("--strategy=ddp",)),
        ("fsdp", ("--strategy=fsdp",)),
        ("zero3", ("--zero=3",)),
    )
    for name, more in (
        ("", ()),
        (", sequence 2", ("--context-parallel=2",)),
        (", sequence 4", ("--context-parallel=4",)),
        (", sequence 4 in a ring", ("--context-parallel=4", "--context-parallel-method=ring")),
    )
}
SHAPE = (
    *("--layers=4", "--d-model=256", "--heads=4", "--context=2048", "--tokenizer=byte"),
    *("--vocab-size=260", "--micro-batch=1", f"--global-batch={RANKS}", "--device=cpu"),
    "--test-batches=0",
)
# What each is held against: the same without the cut, or without recomputing.
TENSOR: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("ddp", ("--strategy=ddp",)),
    "ddp, tensor 2": ("ddp", ("--strategy=ddp", "--tensor-parallel=2")),
    "fsdp": ("fsdp", ("--strategy=fsdp",)),
    "fsdp, tensor 2": ("fsdp", ("--strategy=fsdp", "--tensor-parallel=2")),
    "zero3": ("zero3", ("--zero=3",)),
    "zero3, tensor 2": ("zero3", ("--zero=3", "--tensor-parallel=2")),
    "single, tensor 4": ("ddp", ("--strategy=single", "--tensor-parallel=4")),
    "ddp, tensor 2, sequence 2": (
        "ddp",
        ("--strategy=ddp", "--tensor-parallel=2", "--context-parallel=2"),
    ),
    **{
        f"ddp, tensor 2, {checkpointing} checkpointing": (
            "ddp, tensor 2",
            (
                *("--strategy=ddp", "--tensor-parallel=2"),
                f"--activation-checkpointing={checkpointing}",
            ),
        )
        for checkpointing in ("selective", "full")
    },
}
CHUNKED = (*SHAPE, "--loss-chunk=512")
NARROW = (
    *("--layers=1", "--d-model=256", "--heads=4", "--context=65536", "--tokenizer=byte"),
    *("--vocab-size=260", "--micro-batch=1", "--global-batch=1", "--device=cpu", "--steps=1"),
    *("--test-batches=0", "--memory-trace", "--activation-checkpointing=full"),
)
LONG = {
    "65,536 tokens on 4 processes, FSDP": (
        RANKS,
        ("--seq-len=65536", "--context-parallel=4", "--strategy=fsdp"),
    ),
    "20,000 tokens on one": (1, ("--seq-len=20000",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="of speed; --tensor knows 0")
    part = parser.add_mutually_exclusive_group()
    part.add_argument("--long", action="store_true", help="only the two long runs")
    part.add_argument("--tensor", action="store_true", help="only matrices that are cut")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    name = "_long" if options.long else "_tensor" if options.tensor else ""
    stem = options.output / f"dimensions{name}"
    refuse_existing(stem.with_suffix(".json"))
    shape = NARROW if options.long else CHUNKED if options.tensor else SHAPE
    with tempfile.TemporaryDirectory() as folder:
        flags = [*shape, f"--data={write_stdlib(Path(folder) / 'text.txt', 2_000_000)}"]
        if options.long:
            rows = long_runs(flags, Path(folder))
            shown = long_markdown(rows)
        elif options.tensor:
            rows = tensor_layouts(flags, Path(folder), options.rounds)
            shown = tensor_markdown(rows)
        else:
            rows = layouts(flags, Path(folder), options.rounds)
            shown = markdown(rows)
    options.output.mkdir(parents=True, exist_ok=True)
    result = {"rounds": options.rounds, "shape": shape, "rows": rows}
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    lines = f"# Dimensions, {RANKS} processes on a CPU\n\n`{' '.join(shape)}`\n\n{shown}\n"
    stem.with_suffix(".md").write_text(lines)
    print(lines)


def layouts(shape: list[str], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each layout."""
    traced: dict[str, Run] = {}
    timed: dict[str, list[Run]] = {name: [] for name in LAYOUTS}
    for name, (_, flags) in LAYOUTS.items():
        traced[name] = one(name, [*shape, *flags, "--steps=3", "--memory-trace"], folder / name)
    for number in range(rounds):
        for name, (_, flags) in LAYOUTS.items():
            out = folder / f"{name} {number}"
            timed[name].append(one(name, [*shape, *flags, "--steps=6"], out))
    rows = []
    for name, (against, flags) in LAYOUTS.items():
        plan, other = traced[name].summary["plan"], traced[against].summary["plan"]
        pairs = zip(timed[name], timed[against], strict=True)
        rows.append(
            {
                "name": name,
                "peak_bytes": plan["measured"]["peak"],
                "activations_bytes": plan["measured"]["activations"],
                "activations_ratio": plan["measured"]["activations"]
                / other["measured"]["activations"],
                "predicted_bytes": plan["predicted"]["peak"],
                "sent_bytes": sent(flags, "context"),
                "tokens_per_s": [run.tokens_per_s() for run in timed[name]],
                "ratio": statistics.median(a.tokens_per_s() / b.tokens_per_s() for a, b in pairs),
            }
        )
    return rows


def one(name: str, flags: list[str], out: Path, ranks: int = RANKS) -> Run:
    """A run that must end well."""
    run = train(flags, out=out, ranks=ranks)
    assert run.completed, (name, run.reason)
    print(f"{name}: {run.tokens_per_s():,.0f} tokens/s", flush=True)
    return run


def sent(flags: tuple[str, ...], dimension: str) -> float:
    """Bytes that a rank sends those of its `sequence`, or of its `tensor`, in a step. Chunks of the
    loss change how often it sends, not how much."""
    config = parse_run_config([*SHAPE, *flags], world_size=RANKS)
    run = resolve(config, world_size=RANKS, device_type="cpu")
    transfers_of = sequence_transfers if dimension == "context" else tensor_transfers
    ranks, total = getattr(run.config.sharding, f"{dimension}_parallel"), 0.0
    for transfers in transfers_of(run).values():
        total += sum(sent_bytes(cast(Collective, t.kind), t.size_bytes, ranks) for t in transfers)
    return run.accumulation * total


def tensor_layouts(shape: list[str], folder: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each layout of TENSOR; all bytes, and each round, from one process group."""
    found = in_one_group("bytes", shape, folder)
    speeds = [in_one_group("speed", shape, folder) for _ in range(rounds)]
    rows = []
    for name, (against, more) in TENSOR.items():
        mine, other = found[name], found[against]
        rows.append(
            {
                "name": name,
                "against": against,
                **mine,
                "planned_sent_bytes": sent(more, "tensor"),
                "activations_ratio": mine["activations_bytes"] / other["activations_bytes"],
                "states_ratio": mine["states_bytes"] / other["states_bytes"],
                "tokens_per_s": [speed[name]["tokens_per_s"] for speed in speeds],
                "ratios": [s[name]["tokens_per_s"] / s[against]["tokens_per_s"] for s in speeds],
            }
        )
    return rows


def in_one_group(what: str, shape: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """Run dimensions_rank.py, and return what it finds of each layout of TENSOR."""
    results = folder / "results.json"
    flags = json.dumps({name: [*shape, *more] for name, (_, more) in TENSOR.items()})
    worker = str(Path(__file__).with_name("dimensions_rank.py"))
    run_ranks([worker, str(results), what, flags], ranks=RANKS)
    found: dict[str, dict[str, Any]] = json.loads(results.read_text(encoding="utf-8"))
    return found


def long_runs(shape: list[str], folder: Path) -> list[dict[str, Any]]:
    """Live peaks of a rank."""
    rows = []
    for name, (ranks, flags) in LONG.items():
        run = one(name, [*shape, *flags], folder / name, ranks)
        plan = run.summary["plan"]
        rows.append(
            {
                "name": name,
                "peak_bytes": plan["measured"]["peak"],
                "predicted_bytes": plan["predicted"]["peak"],
                "loss": run.records("step")[0]["loss"],
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    head = ["layout", "live peak MiB", "planned", "activations MiB", "of those without", "sent MiB"]
    lines = [
        [
            row["name"],
            f"{row['peak_bytes'] / MIB:.1f}",
            f"{row['predicted_bytes'] / MIB:.1f}",
            f"{row['activations_bytes'] / MIB:.1f}",
            f"{row['activations_ratio']:.2f}",
            f"{row['sent_bytes'] / MIB:.1f}",
            f"{row['ratio']:.2f}",
        ]
        for row in rows
    ]
    return table([*head, "tokens/s, of those without"], lines)


def tensor_markdown(rows: list[dict[str, Any]]) -> str:
    head = ["layout", "held against", "live peak MiB", "planned", "activations MiB", "of those"]
    head += ["states MiB", "of those", "sent MiB", "planned", "tokens/s, of those"]
    lines = [
        [
            row["name"],
            row["against"],
            *(f"{row[f'{n}_bytes'] / MIB:.1f}" for n in ("peak", "predicted", "activations")),
            f"{row['activations_ratio']:.2f}",
            f"{row['states_bytes'] / MIB:.1f}",
            f"{row['states_ratio']:.2f}",
            *(f"{row[f'{n}_bytes'] / MIB:.3f}" for n in ("sent", "planned_sent")),
            f"{statistics.median(row['ratios']):.2f}" if row["ratios"] else "-",
        ]
        for row in rows
    ]
    return table(head, lines)


def long_markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        [row["name"], *(f"{row[f'{n}_bytes'] / MIB:.1f}" for n in ("peak", "predicted"))]
        for row in rows
    ]
    return table(["run", "live peak of a rank, MiB", "planned"], lines)


if __name__ == "__main__":
    main()
