"""A plan on the screen, and as plain records."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from launcher.plan.assess import Assessment, Place
from launcher.sizes import gib

LINES = ("params", "master", "grads", "optimizer", "buffers", "activations", "temporary")


def opening_lines(best: Assessment, place: Place, notes: Sequence[str]) -> list[str]:
    """What is planned, and what had to be assumed."""
    run, machine = best.run, place.machine
    lines = [
        f"{run.config.model.model}: {run.model.parameter_count:,} parameters, global batch "
        f"{run.global_batch} x {run.seq_len} tokens, on {place.world_size} x "
        f"{gib(place.memory_bytes)} ({machine.source})",
    ]
    lines += notes
    if place.fixed_bytes:
        lines.append(
            f"{gib(place.fixed_bytes)} of each GPU go to the CUDA context and NCCL before the "
            "first tensor, and are counted"
        )
    return lines


def table(
    found: Sequence[Assessment], place: Place, *, price: float | None, show_all: bool
) -> None:
    """Print one row for each choice; of each way of sharding only the best, unless `show_all`."""
    shown = list(found) if show_all else _best_of_each(found)
    grid = Table(title=None, header_style="bold", expand=False)
    for name, justify in (
        *(("sharding", "left"), ("precision", "left"), ("checkpointing", "left")),
        *(("micro-batch", "right"), ("largest", "right"), ("predicted", "right")),
        *(("of memory", "right"), ("", "left"), ("s/step", "right"), ("tokens/s", "right")),
    ):
        grid.add_column(name, justify="right" if justify == "right" else "left", no_wrap=True)
    if price is not None:
        grid.add_column("per M tokens", justify="right", no_wrap=True)
    grid.add_column("highest in", overflow="fold")
    styles = {"fits": "green", "tight": "yellow", "does not fit": "red"}
    for a in shown:
        fits = a.verdict != "does not fit"
        cells = [
            a.choice.label,
            a.choice.precision,
            a.choice.checkpointing,
            str(a.run.config.data.micro_batch),
            str(a.largest_micro_batch or "-"),
            gib(a.used_bytes),
            f"{a.used_bytes / a.memory_bytes:.0%}",
            f"[{styles[a.verdict]}]{a.verdict}[/]",
            f"{a.time.total_s:.3g}" if fits else "-",
            f"{a.time.tokens_per_s:,.0f}" if fits else "-",
        ]
        if price is not None:
            cells.append(f"{cost_per_million_tokens(a, place, price):.3f}" if fits else "-")
        grid.add_row(*cells, a.why_not)
    console = Console()
    # Piped, there is no screen to fit into.
    Console(width=None if console.is_terminal else 200).print(grid)
    if len(shown) < len(found):
        print(f"the best of each way of sharding; all {len(found)} choices with --all or --json")


def closing_lines(found: Sequence[Assessment], place: Place, command: str) -> Iterable[str]:
    """The command for the best one; or what is missing."""
    best = found[0]
    if best.verdict == "does not fit":
        yield (
            f"nothing fits: the smallest, {best.choice.label} in {best.choice.precision} with "
            f"checkpointing {best.choice.checkpointing}, needs {gib(-best.margin_bytes)} more on "
            "each GPU; use more GPUs, a smaller model, or a shorter --seq-len"
        )
        return
    if best.prediction.host_bytes or best.prediction.disk_bytes:
        ranks = place.ranks_per_node
        yield (
            f"each node needs {gib(ranks * best.prediction.host_bytes)} of host memory"
            f" and {gib(ranks * best.prediction.disk_bytes)} of disk for what is offloaded"
        )
    yield f"{best.verdict}, {gib(best.margin_bytes)} to spare on each GPU:"
    yield ""
    yield f"  {command}"


def cost_per_million_tokens(a: Assessment, place: Place, price: float) -> float:
    """In the currency of `price`, which is per GPU and hour."""
    return price * place.world_size * 1e6 / a.time.tokens_per_s / 3600


def as_records(found: Sequence[Assessment], place: Place) -> list[dict[str, Any]]:
    """Every prediction, its ledger in the schema of the measuring side."""
    return [
        {
            "sharding": a.choice.label,
            "precision": a.choice.precision,
            "activation_checkpointing": a.choice.checkpointing,
            "micro_batch": a.run.config.data.micro_batch,
            "accumulation": a.run.accumulation,
            "largest_micro_batch": a.largest_micro_batch,
            "verdict": a.verdict,
            "used_bytes": a.used_bytes,
            "reserved_bytes": a.reserved_bytes,
            "fixed_bytes": place.fixed_bytes,
            "memory_bytes": a.memory_bytes,
            "margin_bytes": a.margin_bytes,
            "host_bytes": a.prediction.host_bytes,
            "disk_bytes": a.prediction.disk_bytes,
            "ledger": a.highest.as_dict(),
            "peaks_bytes": {" ".join(key): value for key, value in a.prediction.peaks.items()},
            "forward_s": a.time.forward_s,
            "backward_s": a.time.backward_s,
            "step_s": a.time.step_s,
            "exposed_communication_s": a.time.exposed_communication_s,
            "tokens_per_s": a.time.tokens_per_s,
            "config": a.run.config.flat(),
        }
        for a in found
    ]


def _best_of_each(found: Sequence[Assessment]) -> list[Assessment]:
    best: dict[str, Assessment] = {}
    for a in found:
        best.setdefault(a.choice.label, a)
    return list(best.values())
