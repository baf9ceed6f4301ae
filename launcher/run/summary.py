"""First and last lines of a run's console, its run record and `summary.json`."""

import math
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from rich.text import Text

from launcher.config.resolve import Resolved
from launcher.config.schema import LoopChoice
from launcher.data import Corpus
from launcher.measure import PHASES
from launcher.measure.memory import MemoryMeter, peak_rss_bytes
from launcher.measure.phases import StepTimes
from launcher.measure.records import (
    EvalRecord,
    PhaseRecord,
    RankSummary,
    SamplerSummary,
    Summary,
)
from launcher.model.products import flops_per_token
from launcher.parallel.mesh import across_nodes
from launcher.parallel.world import World
from launcher.run.journal import Journal
from launcher.run.notes import default_text, unused_rows
from launcher.run.prepare import Prepared
from launcher.run.training_record import TrainingRecord
from launcher.strategies import variant_of
from launcher.util.errors import Failure
from launcher.util.sizes import counted, gib

FEW_TOKENS = 1000
"""Below this many tokens, a perplexity is mostly the choice of its text."""


def introduction(
    prepared: Prepared, record: TrainingRecord, folder: Path, world: World
) -> list[str | Text]:
    """Return the first lines of the console."""
    sharding = prepared.resolved.config.sharding
    ranks = "1 process" if record.world_size == 1 else f"{record.world_size} processes"
    data_ranks = sharding.data_ranks(record.world_size)
    reason = prepared.resolved.attention.reason
    if sharding.context_parallel_method == "ring":
        reason = "K/V blocks circulate around the ranks of a sequence"
    for dimension, size in sharding.model_parallel.items():
        if size > 1:
            ranks += f", {dimension.replace('_', '-')} {size}"
    model = prepared.resolved.model
    trained = ""
    if model.lora is not None:
        bits = "" if model.quantize_base == "none" else f" of {model.quantize_base}"
        trained = f" ({model.trained_parameter_count:,} trained beside frozen ones{bits})"
    if model.masks:
        trained = " (what was pruned of them stays zero)"
    why = prepared.resolved.precision_reason
    return [
        f"{record.model}: {record.parameters:,} parameters{trained}, {record.precision}"
        f"{why and f' ({why})'}; "
        f"{record.strategy} "
        f"(= {record.strategy_also_called}) on {ranks}, {record.device_name or record.device}",
        *prepared.resolved.decoder_lines(),
        f"attention: {record.attention}: {reason}",
        *prepared.resolved.compile_lines(),
        *prepared.resolved.budget_lines(),
        *across_nodes(sharding, world.local_size),
        *_deepspeed_lines(sharding.deepspeed),
        prepared.recipe,
        f"corpus: {prepared.corpus.description}",
        *default_text(prepared.resolved.config),
        *unused_rows(prepared.resolved.config, model.vocab_size, prepared.corpus.vocab_size),
        f"{record.steps} steps of {record.global_batch} x {record.seq_len} tokens: micro-batch "
        f"{record.micro_batch} x {counted(data_ranks, 'rank')} x {record.accumulation} "
        f"accumulated; seed {prepared.resolved.config.loop.seed}; run folder {folder}",
        _saves_line(prepared.resolved.config.loop),
        *_repeats(record, prepared.corpus),
        *_example_lines(prepared, world),
    ]


def _repeats(record: TrainingRecord, corpus: Corpus) -> list[str]:
    tokens = record.steps * record.global_batch * record.seq_len
    epochs = epochs_of(tokens, corpus, record.seq_len)
    # `--epochs 1` rounds up to whole steps
    return [] if epochs < 1.05 else [f"every token is read {epochs:.3g} times, {tokens:,} in all"]


def _example_lines(prepared: Prepared, world: World) -> list[str | Text]:
    if not world.is_main or prepared.corpus.first_document.learned is None:
        return []
    from launcher.run.first_example import first_example

    return first_example(prepared.corpus, prepared.resolved.config.data.tokenizer)


def epochs_of(tokens: int, corpus: Corpus, seq_len: int) -> float:
    """Return the epochs of the training split in so many tokens read of it."""
    return tokens / (seq_len * corpus.train.sequence_count(seq_len))


def amount_line(summary: Summary) -> str:
    """Return how much of the training split a run has read, in all its attempts."""
    tokens, epochs = summary.train_tokens or 0, summary.epochs or 0
    return f"trained on {tokens:,} tokens, {epochs:.3g} epochs"


def _deepspeed_lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    from launcher.config.deepspeed_file import startup_lines

    return startup_lines(file)


def _saves_line(loop: LoopChoice) -> str:
    minutes = loop.saves_after_s / 60
    when = [
        *([] if not loop.save_every else [f"every {loop.save_every} steps"]),
        *([] if minutes == math.inf else [f"every {minutes:g} minutes (--save-minutes)"]),
        *(["at the end"] if loop.saves_last else []),
    ]
    return f"saves {', '.join(when)}" if when else "saves only where a signal stops it"


def run_record(prepared: Prepared, world: World, name: str) -> TrainingRecord:
    """Return the first record of this rank's file."""
    resolved = prepared.resolved
    config, model = resolved.config, resolved.model
    variant = variant_of(config)
    on_gpu = world.device.type == "cuda"
    return TrainingRecord(
        run=name,
        rank=world.rank,
        world_size=world.size,
        hostname=socket.gethostname(),
        device=str(world.device),
        device_name=torch.cuda.get_device_name(world.device) if on_gpu else None,
        strategy=variant.label,
        strategy_also_called=variant.also_called,
        **config.sharding.model_parallel,
        precision=config.optim.precision,
        model=config.model.label,
        attention=_attention(resolved, world.device),
        activation_checkpointing=model.activation_checkpointing,
        parameters=model.parameter_count,
        matmul_parameters=model.matmul_parameter_count,
        flops_per_token=flops_per_token(model, resolved.seq_len),
        micro_batch=config.data.micro_batch,
        accumulation=resolved.accumulation,
        global_batch=resolved.global_batch,
        seq_len=resolved.seq_len,
        steps=resolved.steps,
        started_unix_s=time.time(),
    )


def _attention(resolved: Resolved, device: torch.device) -> str:
    if resolved.config.sharding.context_parallel_method == "ring":
        return "ring"
    # only the GPU itself knows which heads a kernel takes
    return str(resolved.attention.on(device, seq_len=resolved.seq_len))


def closing_lines(summary: Summary, folder: Path) -> list[str]:
    """Return the last lines of the console."""
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
    few = f" ({read:,} tokens: too few to compare runs by)" if (read or 0) < FEW_TOKENS else ""
    return f"test loss {summary.test_loss:.4f}, perplexity {summary.perplexity:.2f} over " + (
        f"the whole split{few}, " if read == whole else f"{read:,} of {whole:,} tokens{cut}, "
    )


def summarize(
    known: Summary,
    run: TrainingRecord,
    world: World,
    journal: Journal,
    test: EvalRecord | None,
    *,
    corpus: Corpus,
    memory: MemoryMeter,
    samples: SamplerSummary,
    training_power_w: float | None,
) -> tuple[Summary, Failure | None]:
    """Complete the summary with what all ranks measured; all ranks call this.

    Also returns a failure, where a rank's disk has not taken all records.
    """
    tokens_per_s = journal.tokens_per_s()
    on_gpu = world.device.type == "cuda"
    live_peak_bytes = memory.peak_bytes()
    mine = RankSummary(
        rank=world.rank,
        peak_bytes=live_peak_bytes or 0 if on_gpu else peak_rss_bytes(),
        traced_peak_bytes=live_peak_bytes,
        tokens_per_s=tokens_per_s,
        training_power_w=training_power_w,
        samples=samples,
    )
    gathered = world.gathered((mine, journal.file.trouble))
    ranks = [rank for rank, _ in gathered]
    troubles = [trouble for _, trouble in gathered if trouble]
    worst = max(ranks, key=lambda rank: rank.peak_bytes)
    summary = replace(
        known,
        strategy=run.strategy,
        model=run.model,
        world_size=run.world_size,
        steps=journal.times.count,
        epochs=epochs_of(known.train_tokens or 0, corpus, run.seq_len),
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
    """Yield mean seconds and highest bytes of each phase, for each period that has any."""
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
    """Return all tokens over all GPUs' energy in training; None unless every GPU was measured."""
    powers_w = [rank.training_power_w for rank in ranks if rank.training_power_w is not None]
    lost = any(rank.samples and rank.samples.gpu_lost for rank in ranks)
    if tokens_per_s is None or lost or len(powers_w) < len(ranks):
        return None
    # 0 W: the energy counter has not moved between its two readings, the run was too short.
    return tokens_per_s / total_w if (total_w := sum(powers_w)) > 0 else None
