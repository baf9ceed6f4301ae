"""Report of a rehearsal, as text and as JSON."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from launcher.forecast.efficiency import predicted_range
from launcher.measure.hardware import CONTEXT_BYTES, NCCL_GROUP_BYTES
from launcher.tools.rehearse.failures import (
    caught_lines,
    failed_lines,
    lacking,
    out_of_memory_lines,
    suggestions,
)
from launcher.tools.rehearse.rehearsal import Rehearsal
from launcher.tools.rehearse.stage import Stage
from launcher.tools.rehearse.timeline import Kind, Timeline
from launcher.tools.rehearse.unseen import other_gpu_lines, unseen_lines
from launcher.tools.rehearse.values import value_lines
from launcher.tools.rehearse.verdict import outside_bytes
from launcher.tools.watch.folder import WatchedRank
from launcher.tools.watch.tables import phase_name, phase_rows, table
from launcher.util.sizes import counted, gib

LABEL = "real allocator, no kernels run"
MOST_MODULES = 8
_MUCH_ON_HOST = 1 << 28  # some hundredths of a second
_OUTSIDE = {
    "CUDA context": ("450 to 600 MiB reported for A100 and H100", CONTEXT_BYTES),
    "NCCL": ("544 to 688 MB per group reported for A100", NCCL_GROUP_BYTES),
}


def lines(result: Rehearsal) -> Iterator[str]:
    """Yield the report."""
    stage = result.stage
    if not stage.ranks:
        yield (
            f"no process has trained with torch on the GPU; the program's exit code is {stage.code}"
        )
        yield (
            f"  the node has {counted(result.gpus, 'GPU')}: a program that asks "
            "for more, or sets CUDA_VISIBLE_DEVICES to others, needs --gpus N"
        )
        return
    yield _headline(result)
    if stage.ran_out:
        yield from out_of_memory_lines(result)
        if result.whole is stage:
            yield "What it needs is not known: started again without a limit, it did not train"
    yield from caught_lines(stage)
    yield from _steps(stage)
    whole, worst = result.whole, result.whole.worst
    if whole is not stage:
        yield f"Without a limit it needs (rank {worst.number}, {whole.steps} steps; {LABEL}):"
    yield from failed_lines(whole)
    rows = [row[:-1] for row in phase_rows(worst)]  # a rehearsal has no seconds
    yield from table((f"rank {worst.number}", "allocated", "reserved"), rows)
    yield from _contents(whole, worst)
    yield from unseen_lines(whole)
    if len(whole.ranks) > 1:
        yield from table(("peaks", "allocated", "reserved", "resident set"), _ranks(whole))
    yield from other_gpu_lines(whole)
    yield from _outside(result)
    yield from _seconds(result)
    yield from value_lines(whole)
    yield from _cards(result)
    yield f"run folder {stage.folder}: shardscale report {stage.folder}"


def as_json(result: Rehearsal) -> dict[str, Any]:
    """Return the report as plain values."""
    whole = result.whole
    ranks = [
        {
            "rank": rank.number,
            "allocated_peak_bytes": rank.allocated_peak_bytes,
            "reserved_peak_bytes": rank.reserved_peak_bytes,
            "host_rss_bytes": rank.highest("host_rss_bytes"),
            "phases": rank.of_kind("phase"),
            **dict.fromkeys(("peak", "end")),
            **(dataclasses.asdict(whole.held[rank.number]) if rank.number in whole.held else {}),
            "seconds": _as_seconds(result, rank.number),
            "values": rank.events("value_read"),
        }
        for rank in whole.ranks
    ]
    return {
        "label": LABEL,
        "verdict": result.verdict,
        "gpu": result.gpu.name,
        "gpus": result.gpus,
        "world_size": result.stage.world_size,
        "memory_bytes": result.gpu.memory_bytes,
        "outside_bytes": outside_bytes(result.stage.world_size),
        "steps": whole.steps,
        "status": dataclasses.asdict(result.stage.status),
        "null_gpu_lacks": lacking(whole),
        "out_of_memory": result.stage.events("out_of_memory"),
        "suggestions": suggestions(result),
        "ranks": ranks,
        "other_gpus": whole.other_gpus,
        "cards": [dataclasses.asdict(card) for card in result.cards],
        "folder": str(result.stage.folder),
        "report": list(lines(result)),
    }


def _headline(result: Rehearsal) -> str:
    found = result.verdict
    words = {None: "no verdict", "tight": "too close to call"}.get(found, found)
    ranks = counted(result.stage.world_size, "rank")
    return (
        f"{words} on {result.gpu.name} ({gib(result.gpu.memory_bytes)}): "
        f"{result.stage.ranks[0].label}, {ranks}, {result.stage.steps} steps; {LABEL}"
    )


def _steps(stage: Stage) -> Iterator[str]:
    """Yield what counts as a step, where that is no optimizer's."""
    if any(rank.ended.get("has_optimizer") is False for rank in stage.ranks):
        yield (
            "The program updates its weights without an optimizer of torch.optim: "
            "each forward and backward counts as a step, the first eight as one"
        )
    if (turns := _turns(stage)) > 1:
        yield (
            f"{turns} optimizers step in turn, as a GAN's: each optimizer's step counts, and the "
            "seconds of a step are those of a round, in which all have stepped"
        )


def _turns(stage: Stage) -> int:
    """Return how many optimizers, or sets of them, step in turn."""
    return max((int(rank.ended.get("turns", 1)) for rank in stage.ranks), default=1)


def _contents(stage: Stage, rank: WatchedRank) -> Iterator[str]:
    content = stage.held.get(rank.number)
    if content is None:
        yield "  (no sequence of allocations was recorded: the program records its own)"
        return
    at, end = content.peak, content.end
    categories = sorted(
        {**at.by_category, **end.by_category}, key=lambda name: -at.by_category.get(name, 0)
    )
    rows = [
        (name, gib(at.by_category.get(name, 0)), gib(end.by_category.get(name, 0)))
        for name in categories
    ]
    rows.append(("all", gib(at.total_bytes), gib(end.total_bytes)))
    period, _, phase = at.phase.partition("/")
    head = f"held at the peak ({phase_name(period, phase)})"
    yield from table((head, "bytes", "after the last step"), rows)
    largest = list(at.by_module.items())[:MOST_MODULES]
    yield from table(
        ("modules at the peak", "bytes"), [(name, gib(size)) for name, size in largest]
    )


def _ranks(stage: Stage) -> list[tuple[str, ...]]:
    return [
        (
            f"rank {rank.number}",
            gib(rank.allocated_peak_bytes),
            gib(rank.reserved_peak_bytes),
            gib(rank.highest("host_rss_bytes")),
        )
        for rank in stage.ranks
    ]


def _outside(result: Rehearsal) -> Iterator[str]:
    names = ["CUDA context", *(["NCCL"] if result.stage.world_size > 1 else [])]
    rows = [(name, gib(_OUTSIDE[name][1])) for name in names]
    yield from table(("outside of torch's allocator", "bytes"), rows)
    for name in names:
        yield f"    {name}: {_OUTSIDE[name][0]}"
    resident = max((rank.highest("host_rss_bytes") or 0 for rank in result.whole.ranks), default=0)
    yield f"  host memory: {gib(resident or None)} resident set of the largest rank"


def _seconds(result: Rehearsal) -> Iterator[str]:
    """Yield what a step takes, and what that is made of."""
    rank = result.slowest
    if rank is None:
        if result.whole.ended_well:
            reasons = [event["reason"] for event in result.whole.ranks[0].events("no_timeline")]
            reasons += [_too_few_steps(result.whole.steps)]
            yield f"no seconds: {reasons[0]}"
        return
    found, timeline = result.seconds[rank], result.whole.timelines[rank]
    least_s, most_s = predicted_range(found.total_s)
    speed, turns = "", _turns(result.whole)
    if turns == 1 and (tokens := tokens_of(result)):
        speed = f", {tokens / found.total_s:,.0f} tokens/s"
    what = "step" if turns == 1 else "round"
    yield (
        f"A {what} of rank {rank} would take {found.total_s:.4f} s ({least_s:.4f} to "
        f"{most_s:.4f}){speed}, by the plan's rates of {result.gpu.name}: not a measurement"
    )
    kernels, operators, messages = (
        len(timeline.calls(kind)) for kind in (Kind.KERNEL, Kind.OPERATOR, Kind.COLLECTIVE)
    )
    rows = [
        ("products of matrices", found.products_s),
        ("fused attention", found.attention_s),
        ("kernels and copies bound by memory", found.moved_s),
        (f"starts of {kernels:,} kernels", found.starts_s),
        (f"{messages:,} messages between ranks", found.messages_s),
        ("transfers from and to the host", found.transfers_s),
        (f"beside these: the host, {operators:,} operators, hooks", found.host_s),
    ]
    shown = [(name, f"{each:.4f}") for name, each in rows if each >= 5e-5]  # else as 0.0000
    yield from table(("made of", "s"), shown)
    yield from _missing(result.whole, timeline)


def _too_few_steps(steps: int) -> str:
    """Return why a program that ended by itself has no seconds, and how it gets them."""
    more = f": --steps {steps - 1} leaves one for them" if steps > 2 else ""
    return f"the program took no whole step after those that were recorded{more}"


def _missing(stage: Stage, timeline: Timeline) -> Iterator[str]:
    """Yield what the seconds lack."""
    if timeline.left_out:
        yield f"    left out of it: {', '.join(timeline.left_out)}, which followed the step"
    if timeline.host_bytes >= _MUCH_ON_HOST:
        size = gib(timeline.host_bytes)
        yield f"    not in it: operators on tensors of the host, of {size}, as an optimizer's there"
    evaluations = stage.ranks[0].ended.get("evaluated_after", 0)
    if "evaluation" in timeline.left_out and 1 < stage.steps <= evaluations:
        yield (
            "    every step is followed by forwards without gradients (an evaluation, or generated "
            "texts), whose seconds are not known"
        )
    for count, what in (
        (
            timeline.received,
            "messages come from one other rank each: waiting for that rank, as in "
            "a pipeline's bubbles, is not in it",
        ),
        (
            timeline.uncounted_products,
            "calls of Triton kernels multiply: they are counted by the "
            "bytes that they move, so this is too little",
        ),
        (
            timeline.assumed_causal,
            "calls of FlexAttention have masks, which are not known here: "
            "they are counted as causal",
        ),
        (
            timeline.unknown_kernels,
            "kernels were launched by no operator that torch knows: only their starts are counted",
        ),
    ):
        if count:
            yield f"    {count:,} {what}"


def tokens_of(result: Rehearsal) -> int | None:
    """Return the tokens of a step of all ranks, where they are known."""
    steps = result.whole.ranks[0].of_kind("step") if result.whole.ranks else []
    return steps[-1].get("tokens") if steps else None


def _as_seconds(result: Rehearsal, rank: int) -> dict[str, float] | None:
    found = result.seconds.get(rank)
    if found is None:
        return None
    least_s, most_s = predicted_range(found.total_s)
    return {**dataclasses.asdict(found), "least_s": least_s, "most_s": most_s}


def _cards(result: Rehearsal) -> Iterator[str]:
    if not result.cards:
        return
    yield f"The recorded allocations replayed on every GPU of the table ({LABEL}):"
    rows = [
        (
            *(card.gpu, gib(card.memory_bytes), gib(card.used_bytes)),
            *("no fp8" if card.lacks == "fp8" else card.verdict, _step(card.step_s)),
        )
        for card in result.cards
    ]
    yield from table(("GPU", "memory", "used", "verdict", "s/step"), rows)
    if slow := [card.gpu for card in result.cards if card.lacks == "bf16"]:
        yield f"    {', '.join(slow)}: no bf16 in hardware, so seconds are those of fp16"


def _step(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{seconds:.3f}"
