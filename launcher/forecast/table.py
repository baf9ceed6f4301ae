"""A plan on the screen, as plain records, and as a page to sort and to filter."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from launcher.forecast.assess import Assessment, Place
from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED
from launcher.forecast.failures import FAILED, Failed, failed_lines
from launcher.forecast.order import ties
from launcher.forecast.predict import by_category
from launcher.forecast.search import Found
from launcher.forecast.timing import StepTime
from launcher.parallel.mesh import across_nodes
from launcher.util.page import page_html
from launcher.util.sizes import gib
from launcher.util.tables import MUST, SHY, Column, print_table, say

_NOT_ON_THE_PAGE = ("config", "ledger", "peaks_bytes")


def opening_lines(shown: Sequence[Assessment], place: Place, notes: Sequence[str]) -> list[str]:
    """What is planned, and what had to be assumed."""
    run, machine = shown[0].run, place.machine
    batch = f"global batch {run.global_batch} x" if same_batch(shown) else "sequences of"
    lines = [
        f"{run.config.model.label}: {run.model.parameter_count:,} parameters, {batch} "
        f"{run.seq_len} tokens, on {place.world_size} x "
        f"{gib(place.memory_bytes)} ({machine.source})",
    ]
    lines += notes
    lines += across_nodes(run.config.sharding, place.ranks_per_node)
    if place.fixed_bytes:
        lines.append(
            f"{gib(place.fixed_bytes)} of each GPU go to the CUDA context, NCCL and what kernels "
            "take for a moment, and are counted"
        )
    return lines


SECONDS = Column(title="s/step", rank=5, right=True)
COLUMNS = (
    Column(title="sharding", rank=MUST),
    Column(title=f"micro{SHY}batch", rank=1, right=True),
    Column(title="precision", rank=3),
    Column(title="recompute", rank=4),
    Column(title="predicted", rank=MUST, right=True),
    Column(title="of memory", rank=6, right=True),
    Column(title="verdict", rank=MUST),
    Column(title="tokens/s", rank=2, right=True),
    SECONDS,
    Column(title="largest batch", rank=7, right=True),
)
PRICE = Column(title="per M tokens", rank=2, right=True)
WHERE = Column(title="highest in", rank=8)
TIED = "="
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def table(
    shown: Sequence[Assessment],
    failed: Sequence[Failed],
    place: Place,
    *,
    price: float | None,
    choices: int,
) -> None:
    """Print one row for each of the best of all `choices`, and for what failed."""
    columns = [*COLUMNS, *([] if price is None else [PRICE]), WHERE]
    if not same_batch(shown):  # seconds of different batches cannot be compared
        columns.remove(SECONDS)
    rows: list[list[str | Text]] = []
    best = max((a.time for a in shown if a.verdict == shown[0].verdict), key=_tokens_per_s)
    tied = 0
    for a in shown:
        fits = a.verdict != "does not fit"
        tied += fits and ties(a.time.tokens_per_s, best.tokens_per_s)
        cost = []
        if price is not None:
            per_million = price * place.world_size * 1e6 / a.time.tokens_per_s / 3600
            cost = [f"{per_million:.3f}" if fits else "-"]
        rows.append(
            [
                a.choice.label,
                str(a.run.config.data.micro_batch),
                a.choice.precision,
                a.choice.checkpointing,
                gib(a.used_bytes),
                f"{a.used_bytes / a.memory_bytes:.0%}",
                Text(a.verdict, _STYLES[a.verdict]),
                speed(a.time, best) if fits else "-",
                *([seconds(a.time) if fits else "-"] if SECONDS in columns else []),
                str(a.largest_micro_batch or "-"),
                *cost,
                a.why_not,
            ]
        )
    rows += [_failed_row(each, columns) for each in failed]
    print_table(columns, rows, otherwise="--json has them all, --page FILE.html draws them")
    if tied > 1:
        say(
            f"{TIED} the range overlaps the fastest one's; of these the simplest is first (four of "
            f"five published runs took {LEAST_OF_PREDICTED:g} to {MOST_OF_PREDICTED:g} of the "
            "predicted time)"
        )
    for line in failed_lines(failed):
        say(line)
    if len(shown) + len(failed) < choices:
        say(f"the best of each way of sharding; all {choices} choices with --all or --json")


def _failed_row(failed: Failed, columns: Sequence[Column]) -> list[str | Text]:
    choice = failed.choice
    cells: dict[str, str | Text] = {
        "sharding": choice.label,
        "precision": choice.precision,
        "checkpointing": choice.checkpointing,
        "verdict": Text(FAILED, "red"),
    }
    return [cells.get(column.name, "-") for column in columns]


def _tokens_per_s(time: StepTime) -> float:
    return time.tokens_per_s


def same_batch(shown: Sequence[Assessment]) -> bool:
    """Whether all rows take the same tokens per optimizer step."""
    return len({a.run.global_batch for a in shown}) == 1


def speed(time: StepTime, best: StepTime) -> str:
    """Range of tokens per second on all GPUs, marked where it overlaps the best's."""
    mark = TIED if ties(time.tokens_per_s, best.tokens_per_s) else " "
    return f"{_rounded(time.least_tokens_per_s)}-{_rounded(time.most_tokens_per_s)}{mark}"


def seconds(time: StepTime) -> str:
    """Range of an optimizer step's seconds."""
    return f"{_two_digits(time.least_s)}-{_two_digits(time.most_s)}"


def _rounded(rate: float) -> str:
    """Three digits at most: 870, 14.2k, 1.31M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if rate >= 0.9995 * size:
            return f"{rate / size:#.3g}".rstrip(".") + unit
    return f"{rate:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"


def closing_lines(result: Found, place: Place) -> Iterable[str]:
    """What the best one needs and leaves; or what is missing."""
    best = result.best_first[0]
    if best.verdict == "does not fit":
        yield (
            f"nothing fits: the smallest, {best.choice.label} in {best.choice.precision} with "
            f"checkpointing {best.choice.checkpointing}, needs {gib(-best.margin_bytes)} more on "
            "each GPU; use more GPUs, a smaller model, or a shorter --seq-len"
        )
        if result.adapters is not None:
            yield _said_of_adapters(result.adapters)
        return
    if best.prediction.host_bytes or best.prediction.disk_bytes:
        ranks = place.ranks_per_node
        yield (
            f"each node needs {gib(ranks * best.prediction.host_bytes)} of host memory"
            f" and {gib(ranks * best.prediction.disk_bytes)} of disk for what is offloaded"
        )
    yield from best.run.budget_lines()
    yield f"{best.verdict}, {gib(best.margin_bytes)} to spare on each GPU:"


def _said_of_adapters(a: Assessment) -> str:
    model = a.run.config.model
    flags = f"--init-from FOLDER --lora-rank {model.lora_rank}"
    if model.quantize_base != "none":
        flags += f" --quantize-base {model.quantize_base}"
    return (
        f"{a.verdict}, to fine-tune weights that you have: {flags} trains adapters beside them "
        f"({a.choice.label} in {a.choice.precision} with checkpointing {a.choice.checkpointing} "
        f"takes {gib(a.used_bytes)})"
    )


def allocator_lines(shown: Sequence[Assessment], place: Place) -> Iterable[str]:
    """Why the same run is predicted to take another size of another GPU."""
    if place.machine.device == "cpu":
        return
    best = shown[0]
    kept = best.used_bytes - best.prediction.peak_bytes - place.fixed_bytes
    if kept > 0:
        off = not best.run.config.loop.expandable_segments
        yield (
            f"predicted {gib(best.used_bytes)} = tensors {gib(best.prediction.peak_bytes)} + "
            f"{gib(place.fixed_bytes)} + what CUDA's allocator keeps beside them {gib(kept)}"
            + " (without expandable segments)"
            * off
        )
    squeezed = [a for a in shown if a.with_room_bytes > a.used_bytes]
    if squeezed:
        cases = (
            f"{a.choice.label} takes {gib(a.used_bytes)} here, {gib(a.with_room_bytes)} there"
            for a in squeezed[:3]
        )
        yield (
            "on a larger GPU the allocator would keep more freed blocks, which it gives back here: "
            + "; ".join(cases)
        )


def as_records(found: Sequence[Assessment], place: Place) -> list[dict[str, Any]]:
    """Every prediction, its ledger in the schema of the measuring side."""
    return [
        {
            "sharding": a.choice.label,
            "precision": a.choice.precision,
            "activation_checkpointing": a.choice.checkpointing,
            "blocks_keep": a.run.model.activation_checkpointing,
            "micro_batch": a.run.config.data.micro_batch,
            "accumulation": a.run.accumulation,
            "largest_micro_batch": a.largest_micro_batch,
            "verdict": a.verdict,
            "used_bytes": a.used_bytes,
            "reserved_bytes": a.used_bytes - place.fixed_bytes,
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
            "least_total_s": a.time.least_s,
            "most_total_s": a.time.most_s,
            "exposed_communication_s": a.time.exposed_communication_s,
            "tokens_per_s": a.time.tokens_per_s,
            "config": a.run.config.flat(),
        }
        for a in found
    ]


def best_of_each(found: Sequence[Assessment]) -> list[Assessment]:
    """The first of each way of sharding."""
    best: dict[str, Assessment] = {}
    for a in found:
        best.setdefault(a.choice.label, a)
    return list(best.values())


def write_page(path: Path, found: Sequence[Assessment], place: Place, command: str) -> None:
    """Write an HTML page with every choice in a table and as a bar of bytes."""
    run = found[0].run
    data = {
        "model": run.config.model.label,
        "parameters": run.model.parameter_count,
        "global_batch": run.global_batch if same_batch(found) else None,
        "seq_len": run.seq_len,
        "devices": place.world_size,
        "memory_bytes": place.memory_bytes,
        "machine": place.machine.name,
        "source": place.machine.source,
        "command": command,
        "range": [LEAST_OF_PREDICTED, MOST_OF_PREDICTED],
        "rows": [page_row(assessment, place) for assessment in found],
    }
    page = page_html("shardscale plan", ("scatter.js", "plan.js"), data)
    path.write_text(page, encoding="utf-8")


def page_row(a: Assessment, place: Place) -> dict[str, Any]:
    """One choice, as pages show it."""
    (record,) = as_records([a], place)
    fits = a.verdict != "does not fit"
    lines = {f"{name}_bytes": size for name, size in by_category(a.highest).items()}
    beside = a.used_bytes - place.fixed_bytes - (a.highest.device.used_bytes or 0)
    return {name: value for name, value in record.items() if name not in _NOT_ON_THE_PAGE} | {
        "share": a.used_bytes / a.memory_bytes,
        "simplicity": a.merit.simplicity,
        "tokens_per_step": a.time.tokens,
        "step_time_s": a.time.total_s if fits else None,
        "tokens_per_s": a.time.tokens_per_s if fits else None,
        "highest_in": a.why_not,
        "lines": lines
        | {"allocator_slack_bytes": max(0, beside), "context_bytes": place.fixed_bytes},
    }
