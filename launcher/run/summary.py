"""What a run comes to: `summary.json`, and the closing lines."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from launcher.errors import Failure
from launcher.measure.device_memory import peak_rss_bytes
from launcher.measure.memory import MemoryMeter
from launcher.measure.phases import PHASES, PhaseTimes
from launcher.measure.records import WARMUP_STEPS, EvalRecord, PhaseRecord, RunRecord
from launcher.measure.sampler import SamplerSummary
from launcher.parallel.world import World
from launcher.run.journal import Journal
from launcher.sizes import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The values of `summary.json`."""

    values: Mapping[str, Any]
    failure: Failure | None
    """Records of a rank that its disk has not taken."""

    def lines(self, folder: Path) -> list[str]:
        """What the main rank says last."""
        values = self.values
        rate = values["tokens_per_s"]
        ranks = values["ranks"]
        spread = ""
        if values["world_size"] > 1:
            lowest = min(rank["peak_bytes"] for rank in ranks)
            spread = f" to {gib(values['peak_bytes'])} on rank {values['peak_rank']}"
            spread = f"{gib(lowest)}{spread}"
        lines = [
            f"done: {_test_line(values)}"
            + (f"{rate:,.0f} tokens/s" if rate else "too few steps for a rate")
            + f", {values['duration_s']:.0f} s",
            f"peak memory ({values['peak_kind']}): {spread or gib(values['peak_bytes'])}; "
            f"everything is in {folder}",
        ]
        for rank in ranks:
            samples = rank["samples"]
            if samples and (samples["missing"] or samples["gpu_lost"]):
                what = ["the GPU was lost"] if samples["gpu_lost"] else []
                what += [f"{name}: {why}" for name, why in samples["missing"].items()]
                lines.append(f"not measured on rank {rank['rank']}: {'; '.join(what)}")
        return lines


def _test_line(values: Mapping[str, Any]) -> str:
    if values["test_loss"] is None:
        return ""
    read, whole = values["test_tokens"], values["test_split_tokens"]
    cut = ", cut short by --max-minutes" if values["test_cut_short"] else ""
    return f"test loss {values['test_loss']:.4f}, perplexity {values['perplexity']:.2f} over " + (
        "the whole split, " if read == whole else f"{read:,} of {whole:,} tokens{cut}, "
    )


def summarize(
    run: RunRecord,
    world: World,
    journal: Journal,
    test: EvalRecord | None,
    *,
    memory: MemoryMeter,
    samples: SamplerSummary | None,
    training_power_w: float | None,
    duration_s: float,
    resumed_step: int,
    skipped_steps: int,
    stopped_by: str,
    test_split_tokens: int,
    test_cut_short: bool,
) -> Summary:
    """Gather what every rank has to say (all ranks call this)."""
    tokens_per_s = journal.tokens_per_s()
    on_gpu = world.device.type == "cuda"
    live_peak_bytes = max(memory.peaks().values(), default=None)
    mine = {
        "rank": world.rank,
        "peak_bytes": live_peak_bytes if on_gpu else peak_rss_bytes(),
        "traced_peak_bytes": live_peak_bytes,
        "tokens_per_s": tokens_per_s,
        "training_power_w": training_power_w,
        "samples": None if samples is None else asdict(samples),
        "trouble": journal.file.trouble,
    }
    ranks = _gather(mine, world)
    troubles = [trouble for rank in ranks if (trouble := rank.pop("trouble"))]
    worst = max(ranks, key=lambda rank: rank["peak_bytes"])
    return Summary(
        values={
            "strategy": run.strategy,
            "model": run.model,
            "world_size": run.world_size,
            "steps": len(journal.phase_times),
            "resumed_step": resumed_step,
            "skipped_steps": skipped_steps,
            "stopped_by": stopped_by,
            "test_loss": None if test is None else test.loss,
            "perplexity": None if test is None else test.perplexity,
            "test_tokens": 0 if test is None else test.tokens,
            "test_split_tokens": test_split_tokens,
            "test_cut_short": test_cut_short,
            "tokens_per_s": tokens_per_s,
            "first_step_s": next((t.duration_s for t in journal.phase_times), None),
            "peak_bytes": worst["peak_bytes"],
            "peak_kind": "allocated on the GPU" if on_gpu else "resident set of the process",
            "peak_rank": worst["rank"],
            "tokens_per_joule": _tokens_per_joule(tokens_per_s, ranks),
            "duration_s": duration_s,
            "ranks": ranks,
        },
        failure=Failure(f"{troubles[0]}: records are missing there") if troubles else None,
    )


def phase_records(
    times: list[PhaseTimes], peaks: Mapping[tuple[str, str], int]
) -> Iterable[PhaseRecord]:
    """Mean seconds and highest bytes of each phase, for each period that has any."""
    periods = {"first_step": times[:1], "steady": times[WARMUP_STEPS:]}
    for period in ("init", "resume", "first_step", "steady", "save", "evaluation"):
        spent = periods.get(period, [])
        phases = PHASES if spent else [phase for p, phase in peaks if p == period]
        for phase in phases:
            seconds = [getattr(step, f"{phase}_s") for step in spent]
            yield PhaseRecord(
                period=period,
                phase=phase,
                steps=len(spent),
                mean_s=sum(seconds) / len(seconds) if seconds else None,
                peak_bytes=peaks.get((period, phase)),
            )


def _tokens_per_joule(tokens_per_s: float | None, ranks: list[dict[str, Any]]) -> float | None:
    """All tokens over all GPUs' energy while training; None unless every GPU has a figure."""
    powers_w = [rank["training_power_w"] for rank in ranks]
    lost = any(rank["samples"] and rank["samples"]["gpu_lost"] for rank in ranks)
    if tokens_per_s is None or lost or None in powers_w:
        return None
    return tokens_per_s / float(sum(powers_w))


def _gather(value: dict[str, Any], world: World) -> list[dict[str, Any]]:
    if world.size == 1:
        return [value]
    values: list[Any] = [None] * world.size
    dist.all_gather_object(values, value)
    return values
