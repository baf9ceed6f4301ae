"""What a run comes to: `summary.json`, and the closing lines."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from launcher.measure.memory import MemoryMeter, peak_rss_bytes
from launcher.measure.phases import PHASES, StepTimes
from launcher.measure.records import (
    EvalRecord,
    PhaseRecord,
    RankSummary,
    RunRecord,
    SamplerSummary,
    Summary,
)
from launcher.parallel.world import World
from launcher.run.journal import Journal
from launcher.util.errors import Failure
from launcher.util.sizes import gib


def closing_lines(summary: Summary, folder: Path) -> list[str]:
    """What the main rank says last."""
    rate, peak = summary.tokens_per_s, gib(summary.peak_bytes)
    if len(summary.ranks) > 1:
        lowest = min(rank.peak_bytes for rank in summary.ranks)
        peak = f"{gib(lowest)} to {peak} on rank {summary.peak_rank}"
    lines = [
        f"done: {_test_line(summary)}"
        + (f"{rate:,.0f} tokens/s" if rate else "too few steps for a rate")
        + f", {summary.duration_s:.0f} s",
        f"peak memory ({summary.peak_kind}): {peak}; everything is in {folder}",
    ]
    for rank in summary.ranks:
        if rank.samples and (rank.samples.missing or rank.samples.gpu_lost):
            what = ["the GPU was lost"] if rank.samples.gpu_lost else []
            what += [f"{name}: {why}" for name, why in rank.samples.missing.items()]
            lines.append(f"not measured on rank {rank.rank}: {'; '.join(what)}")
    return lines


def _test_line(summary: Summary) -> str:
    if summary.test_loss is None:
        return ""
    read, whole = summary.test_tokens, summary.test_split_tokens
    cut = ", cut short by --max-minutes" if summary.test_cut_short else ""
    return f"test loss {summary.test_loss:.4f}, perplexity {summary.perplexity:.2f} over " + (
        "the whole split, " if read == whole else f"{read:,} of {whole:,} tokens{cut}, "
    )


def summarize(
    known: Summary,
    run: RunRecord,
    world: World,
    journal: Journal,
    test: EvalRecord | None,
    *,
    memory: MemoryMeter,
    samples: SamplerSummary | None,
    training_power_w: float | None,
) -> tuple[Summary, Failure | None]:
    """Add what every rank has to say to what is known on each (all ranks call this).

    The failure is of records that a rank's disk has not taken.
    """
    tokens_per_s = journal.tokens_per_s()
    on_gpu = world.device.type == "cuda"
    live_peaks = memory.peaks().values()
    mine = RankSummary(
        rank=world.rank,
        peak_bytes=max(live_peaks) if on_gpu else peak_rss_bytes(),
        traced_peak_bytes=max(live_peaks, default=None),
        tokens_per_s=tokens_per_s,
        training_power_w=training_power_w,
        samples=samples,
    )
    gathered = [(mine, journal.file.trouble)] * world.size
    if world.size > 1:
        dist.all_gather_object(gathered, gathered[0])
    ranks = [rank for rank, _ in gathered]
    troubles = [trouble for _, trouble in gathered if trouble]
    worst = max(ranks, key=lambda rank: rank.peak_bytes)
    summary = replace(
        known,
        strategy=run.strategy,
        model=run.model,
        world_size=run.world_size,
        steps=journal.times.count,
        test_loss=None if test is None else test.loss,
        perplexity=None if test is None else test.perplexity,
        test_tokens=0 if test is None else test.tokens,
        tokens_per_s=tokens_per_s,
        first_step_s=(journal.times.first_s or {}).get("duration_s"),
        peak_bytes=worst.peak_bytes,
        peak_kind="allocated on the GPU" if on_gpu else "resident set of the process",
        peak_rank=worst.rank,
        tokens_per_joule=_tokens_per_joule(tokens_per_s, ranks),
        ranks=ranks,
    )
    return summary, Failure(f"{troubles[0]}: records are missing there") if troubles else None


def phase_records(times: StepTimes, peaks: Mapping[tuple[str, str], int]) -> Iterable[PhaseRecord]:
    """Mean seconds and highest bytes of each phase, for each period that has any."""
    first_s = times.first_s
    periods = {"first_step": (int(first_s is not None), first_s)}
    periods["steady"] = (times.steady, times.steady_s)
    for period in ("init", "resume", "first_step", "steady", "save", "evaluation"):
        steps, sums_s = periods.get(period, (0, None))
        phases = PHASES if steps else [phase for p, phase in peaks if p == period]
        for phase in phases:
            yield PhaseRecord(
                period=period,
                phase=phase,
                steps=steps,
                mean_s=sums_s[f"{phase}_s"] / steps if steps and sums_s else None,
                peak_bytes=peaks.get((period, phase)),
            )


def _tokens_per_joule(tokens_per_s: float | None, ranks: list[RankSummary]) -> float | None:
    """All tokens over all GPUs' energy while training; None unless every GPU has a figure."""
    powers_w = [rank.training_power_w for rank in ranks if rank.training_power_w is not None]
    lost = any(rank.samples and rank.samples.gpu_lost for rank in ranks)
    if tokens_per_s is None or lost or len(powers_w) < len(ranks):
        return None
    # A counter that has not moved between its two readings says no watts: too short to tell.
    return tokens_per_s / total_w if (total_w := sum(powers_w)) > 0 else None
