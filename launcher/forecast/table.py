"""A plan as a table on the console."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from rich.text import Text

from launcher.config.sharding import MODEL_PARALLEL
from launcher.forecast.assess import Assessment
from launcher.forecast.cluster import Cluster
from launcher.forecast.efficiency import LEAST_OF_PREDICTED, MOST_OF_PREDICTED
from launcher.forecast.evaluation import Failed
from launcher.forecast.order import ties
from launcher.forecast.search import SearchResult
from launcher.forecast.timing import StepTime
from launcher.model.foreign.config import ForeignConfig
from launcher.parallel.mesh import across_nodes
from launcher.util.flags import flag
from launcher.util.sizes import gib
from launcher.util.tables import MUST, SHY, Column, print_table, say

FAILED = "failed"
Result = TypeVar("Result", Assessment, Failed)


def opening_lines(shown: Sequence[Assessment], cluster: Cluster, notes: Sequence[str]) -> list[str]:
    """State the model, the batch and the machine, and what was assumed about them."""
    run, machine = shown[0].run, cluster.machine
    batch = f"global batch {run.global_batch} x" if same_batch(shown) else "sequences of"
    lines = [
        f"{run.config.model.label}: {run.model.parameter_count:,} parameters, {batch} "
        f"{run.seq_len} tokens, on {cluster.world_size} x "
        f"{gib(cluster.memory_bytes)} ({machine.source})",
    ]
    lines += run.decoder_lines()
    if isinstance(run.model, ForeignConfig):
        lines.append(
            "its bytes are traced with the operators of a CPU, where they are those of a run; they "
            "have not been compared with a GPU"
        )
    lines += notes
    lines += across_nodes(run.config.sharding, cluster.ranks_per_node)
    if cluster.fixed_bytes:
        lines.append(
            f"included: {gib(cluster.fixed_bytes)} per GPU for the CUDA context, NCCL and "
            "transient kernel workspaces"
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
LABEL_PARTS: Mapping[str, str] = {
    "fsdp-grad-op": "--no-reshard-after-forward (ZeRO-2)",
    "-hybrid": "--replicate N (HSDP)",
    "+each": "gradients reduced in each micro-batch",
    "+cpu": "optimizer offloaded to the host",
    "+param": "parameters too",
    **{f"-{name.removesuffix('_parallel')}": f"{flag(name)} N" for name in MODEL_PARALLEL},
}
"""Part of a candidate's label -> its meaning, for the table's legend."""
_STYLES = {"fits": "green", "tight": "yellow", "does not fit": "red"}


def table(
    shown: Sequence[Assessment],
    failed: Sequence[Failed],
    cluster: Cluster,
    *,
    price: float | None,
    choices: int,
) -> None:
    """Print a row per shown candidate and per failure, and a legend."""
    columns = [*COLUMNS, *([] if price is None else [PRICE]), WHERE]
    if not same_batch(shown):  # seconds of different batches cannot be compared
        columns.remove(SECONDS)
    fastest = max(a.merit.tokens_per_s for a in shown if a.verdict == shown[0].verdict)
    per_hour = (price or 0.0) * cluster.world_size
    cells = [_cells(a, fastest, per_hour) for a in shown]
    cells += [_named(each) | {"verdict": Text(FAILED, "red")} for each in failed]
    rows = [[each.get(column.name, "-") for column in columns] for each in cells]
    print_table(columns, rows, otherwise="--json has them all, --page FILE.html draws them")
    tied = sum(a.time is not None and ties(a.time.tokens_per_s, fastest) for a in shown)
    for line in legend([row[0] for row in rows], tied=tied > 1):
        say(line)
    for line in _compiled_lines(shown):
        say(line)
    for line in _failure_lines(failed):
        say(line)
    if len(shown) + len(failed) < choices:
        say(f"best candidate of each sharding; --all or --json shows all {choices}")


def _named(result: Assessment | Failed) -> dict[str, str | Text]:
    choice = result.choice
    return {
        "sharding": choice.label,
        "precision": choice.precision,
        "recompute": choice.checkpointing,
    }


def _cells(a: Assessment, fastest: float, price_per_hour: float) -> dict[str, str | Text]:
    """Return column -> cell, without those that are unknown."""
    cells = _named(a) | {
        "microbatch": str(a.run.config.data.micro_batch),
        "predicted": gib(a.used_bytes),
        "of memory": f"{a.used_bytes / a.memory_bytes:.0%}",
        "verdict": Text(a.verdict, _STYLES[a.verdict]),
        "largest batch": str(a.largest_micro_batch or "-"),
        "highest in": a.highest_in,
    }
    if a.time is not None:
        cells |= {
            "tokens/s": speed(a.time, fastest),
            "s/step": seconds(a.time),
            "per M tokens": f"{price_per_hour * 1e6 / a.time.tokens_per_s / 3600:.3f}",
        }
    return cells


def legend(labels: Sequence[str | Text], *, tied: bool) -> list[str]:
    """Explain the marks and the parts of labels that a table has."""
    lines = []
    if tied:
        lines.append(
            f"{TIED} the range overlaps the fastest one's; of these the simplest is first (four of "
            f"five measured runs took {LEAST_OF_PREDICTED:g} to {MOST_OF_PREDICTED:g} of the "
            "predicted time)"
        )
    text = " ".join(map(str, labels))
    parts = [f"{part} {meaning}" for part, meaning in LABEL_PARTS.items() if part in text]
    return [*lines, *(["sharding: " + "; ".join(parts)] if parts else [])]


def _compiled_lines(shown: Sequence[Assessment]) -> Iterable[str]:
    """Name the candidates that `--compile auto` compiles, where it does not compile all."""
    found = [a.choice.label for a in shown if a.run.compile_reason and a.run.config.loop.compiles]
    if 0 < len(found) < len(shown):
        yield f"compiled by --compile auto: {', '.join(dict.fromkeys(found))}"


def _failure_lines(failed: Sequence[Failed]) -> list[str]:
    """Give each reason once, with the first candidate that it was raised for."""
    first = {each.reason: each.choice for each in reversed(failed)}
    return [
        f"{FAILED} (a fault of the planner, please report it): {choice.label} in "
        f"{choice.precision} with checkpointing {choice.checkpointing}: {reason}"
        for reason, choice in reversed(first.items())
    ]


def same_batch(shown: Sequence[Assessment]) -> bool:
    """Return whether all rows take the same tokens per optimizer step."""
    return len({a.run.global_batch for a in shown}) == 1


def speed(time: StepTime, fastest: float) -> str:
    """Format the range of tokens per second on all GPUs, marked where it overlaps the best's."""
    mark = TIED if ties(time.tokens_per_s, fastest) else " "
    return f"{_rounded(time.least_tokens_per_s)}-{_rounded(time.most_tokens_per_s)}{mark}"


def seconds(time: StepTime) -> str:
    """Format the range of an optimizer step's seconds."""
    return f"{_two_digits(time.least_s)}-{_two_digits(time.most_s)}"


def _rounded(rate: float) -> str:
    """Three digits at most: 870, 14.2k, 1.31M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= 0.9995 * size:  # what rounds to 1.00 of it
            return f"{rate / size:#.3g}".rstrip(".") + unit
    return f"{rate:.3g}"


def _two_digits(value: float) -> str:
    return f"{value:#.2g}".rstrip(".") if value < 99.5 else f"{value:.0f}"


def closing_lines(result: SearchResult, cluster: Cluster) -> Iterable[str]:
    """Say what the best candidate needs and leaves, or how much memory is missing."""
    best = result.best_first[0]
    if best.verdict == "does not fit":
        yield (
            f"nothing fits: the smallest, {best.choice.label} in {best.choice.precision} with "
            f"checkpointing {best.choice.checkpointing}, needs {gib(-best.margin_bytes)} more on "
            "each GPU; use more GPUs, a smaller model, or a shorter --seq-len"
        )
        if result.adapters is not None:
            yield _adapters_line(result.adapters)
        return
    if best.prediction.host_bytes or best.prediction.disk_bytes:
        ranks = cluster.ranks_per_node
        yield (
            f"each node needs {gib(ranks * best.prediction.host_bytes)} of host memory"
            f" and {gib(ranks * best.prediction.disk_bytes)} of disk for what is offloaded"
        )
    yield from best.run.budget_lines()
    if best.run.config.loop.compiles:
        yield from best.run.compile_lines()
    yield f"{best.verdict}, {gib(best.margin_bytes)} to spare on each GPU:"


def _adapters_line(a: Assessment) -> str:
    model = a.run.config.model
    flags = f"--init-from FOLDER --lora-rank {model.lora_rank}"
    if model.quantize_base != "none":
        flags += f" --quantize-base {model.quantize_base}"
    return (
        f"{a.verdict}, to fine-tune weights that you have: {flags} trains adapters beside them "
        f"({a.choice.label} in {a.choice.precision} with checkpointing {a.choice.checkpointing} "
        f"takes {gib(a.used_bytes)})"
    )


def allocator_lines(shown: Sequence[Assessment], cluster: Cluster) -> Iterable[str]:
    """Explain reserved bytes, and why they depend on the size of the GPU."""
    if cluster.machine.device == "cpu":
        return
    best = shown[0]
    kept = best.used_bytes - best.prediction.peak_bytes - cluster.fixed_bytes
    if kept > 0:
        off = not best.run.expandable_segments
        yield (
            f"predicted {gib(best.used_bytes)} = tensors {gib(best.prediction.peak_bytes)} + "
            f"{gib(cluster.fixed_bytes)} + freed blocks that CUDA's allocator keeps {gib(kept)}"
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


def best_of_each(results: Sequence[Result]) -> list[Result]:
    """Return the first result of each way of sharding."""
    first: dict[str, Result] = {}
    for result in results:
        first.setdefault(result.choice.label, result)
    return list(first.values())
