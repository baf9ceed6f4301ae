"""Columns of the comparison: declared once for the console, CSV, Markdown, JSON and the page."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from launcher.compare.report.analysis import LossDifference, RunFigures
from launcher.compare.report.runs import Run

BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
Kind = Literal["text", "count", "rate", "seconds", "bytes", "loss", "gap", "percent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One run, with the results of comparing it with the others."""

    run: Run
    figures: RunFigures
    reference: Run | None
    difference: LossDifference | None
    position: int | None
    setting: str | None
    differs: tuple[str, str]
    """Settings in which not all runs agree, whole and with short paths."""


Value = Callable[[Compared, str], Any]
"""Value of a run, given the column's key."""


@dataclass(frozen=True, slots=True)
class ReportColumn:
    """One figure of a run.

    `show`: "always" on the console and in Markdown, "brief" there if any run has a value, "full"
    only in CSV, JSON and the page's complete table.
    """

    key: str
    title: str
    kind: Kind
    value: Value
    help: str
    show: Literal["always", "brief", "full"] = "full"


def _of(part: str) -> Value:
    """Return what reads a figure of a part of `Compared`; None where that part is missing."""
    part_of = attrgetter(part)
    return lambda compared, key: (found := part_of(compared)) and getattr(found, key)


def _own(compared: Compared, key: str) -> Any:
    return getattr(compared, key)


def _record(compared: Compared, key: str) -> Any:
    return compared.run.record.get(key)


def _memory(compared: Compared, key: str) -> int | None:
    return compared.figures.memory[key]


def _quartile(compared: Compared, key: str) -> float | None:
    steps = compared.run.steps
    if steps is None or steps.rate_quartiles is None:
        return None
    return steps.rate_quartiles[("p25", "median", "p75").index(key.rpartition("_")[2])]


def _steps(compared: Compared, _: str) -> int | None:
    run = compared.run
    if run.steps:
        return len(run.steps.step)
    return None if run.path is None else 0


def _where(compared: Compared, _: str) -> str | None:
    run = compared.run
    if run.completed or run.phase is None:
        return None
    return run.phase if run.failed_rank is None else f"{run.phase}, rank {run.failed_rank}"


_C = ReportColumn
_run, _figure, _series, _difference = map(_of, ("run", "figures", "run.steps", "difference"))
# fmt: off
COLUMNS = (
    _C("position", "#", "count", _own, "Rank by tokens/s among completed runs", "always"),
    _C("run", "run", "text", lambda c, _: c.run.name, "Name of the run folder", "always"),
    _C("strategy", "strategy", "text", _record, "Sharding strategy", "always"),
    _C("strategy_also_called", "also called", "text", _record,
       "The same strategy in the other library's words", "always"),
    _C("setting", "setting", "text", _own,
       "Model, sequence length and device; runs are ranked within one setting"),
    _C("precision", "precision", "text", _record, "Compute precision", "brief"),
    _C("world_size", "ranks", "count", _record, "Processes, one per device", "brief"),
    _C("context_parallel", "context parallel", "count", _record, "Ranks per sequence"),
    _C("tensor_parallel", "tensor parallel", "count", _record, "Ranks per weight matrix"),
    _C("micro_batch", "micro-batch", "count", _record, "Sequences per rank and forward"),
    _C("accumulation", "accum.", "count", _record, "Micro-batches per optimizer step"),
    _C("global_batch", "global batch", "count", _record,
       "Sequences per optimizer step, all ranks"),
    _C("state", "state", "text", _run, "How the run ended", "always"),
    _C("tokens_per_s", "tokens/s", "rate", _figure, "All ranks, without warm-up", "always"),
    _C("tokens_per_s_median", "tokens/s, median step", "rate", _quartile,
       "Median over the steps after warm-up"),
    _C("tokens_per_s_p25", "tokens/s, 25%", "rate", _quartile,
       "25th percentile over the steps after warm-up"),
    _C("tokens_per_s_p75", "tokens/s, 75%", "rate", _quartile,
       "75th percentile over the steps after warm-up"),
    _C("steady_steps", "steps timed", "count", _series,
       "Steps after warm-up, over which times are averaged"),
    _C("tokens_per_s_per_rank", "tokens/s per rank", "rate", _figure, "Tokens/s over ranks"),
    _C("step_time_s", "s/step", "seconds", _figure, "Mean step time, without warm-up", "brief"),
    _C("tflops_per_rank", "TFLOP/s per rank", "loss", _figure,
       "6 N_matmul + 12 L d T per token"),
    _C("mfu", "MFU", "percent", _figure, "FLOP/s over the GPU's bf16 peak", "brief"),
    _C("allocated_peak_bytes", "allocated peak", "bytes", _memory,
       "Peak of tensors in the GPU's caching allocator, worst rank", "brief"),
    _C("reserved_peak_bytes", "reserved peak", "bytes", _memory,
       "Peak of memory held by the caching allocator, rank 0", "brief"),
    _C("device_used_bytes", "device used", "bytes", _memory,
       "Peak memory use of the whole device, worst rank", "brief"),
    _C("tracked_live_bytes", "tracked live peak", "bytes", _memory,
       "CPU: peak of all live tensors (--memory-trace), worst rank", "brief"),
    _C("resident_set_bytes", "resident set", "bytes", _memory,
       "CPU: peak resident set of a process, libraries included, worst rank", "brief"),
    _C("perplexity", "perplexity", "loss", _figure,
       "exp(loss) over the test sequences read", "always"),
    _C("test_loss", "test loss", "loss", _figure, "Mean over the test sequences read"),
    _C("loss_difference", "largest loss difference", "gap",
       lambda c, _: _difference(c, "largest"),
       "Largest |loss - reference loss| over all steps", "always"),
    _C("differs", "differs in", "text", lambda c, _: c.differs[0] or None,
       "Settings that are not the same in all runs", "brief"),
    _C("loss_difference_step", "at step", "count", lambda c, _: _difference(c, "at_step"),
       "Step of the largest loss difference"),
    _C("reference", "against", "text", _difference, "Run that losses are compared with"),
    _C("expert_load_max", "fullest expert", "loss", _series,
       "Mixture of experts: most tokens of any expert at the last step, over an equal share"),
    _C("expert_entropy", "entropy of experts", "loss", _series,
       "Mixture of experts: entropy of the shares of tokens at the last step; 1 is balance"),
    _C("steps", "steps", "count", _steps, "Completed optimizer steps"),
    _C("first_step_s", "first step", "seconds", _series, "Time of step 1, warm-up included"),
    _C("duration_s", "duration", "seconds", lambda c, _: c.run.summary.duration_s,
       "Whole run, evaluation included"),
    _C("where", "ended in", "text", _where, "Phase and rank in which a run failed"),
    _C("reason", "reason", "text", _run, "Why it failed"),
)
# fmt: on

# Kept longest on a narrow terminal; other brief columns go first.
NARROW_FIRST = (
    *("run", "state", "tokens_per_s", "allocated_peak_bytes", "tracked_live_bytes", "perplexity"),
    *("step_time_s", "reserved_peak_bytes", "device_used_bytes", "resident_set_bytes"),
    *("loss_difference", "differs", "strategy", "precision", "world_size"),
)


def shown(value: Any, kind: Kind) -> str:
    """Format a value for people; `n/a` if unknown."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "n/a"
    if kind == "text":
        return printable(str(value))
    if kind == "gap" and value == 0:
        return "0"
    if kind == "bytes":
        unit, name = next(((unit, name) for unit, name in BYTE_UNITS if value >= unit), (1, "B"))
        return f"{three_digits(value / unit)} {name}"
    if kind == "seconds":
        return f"{three_digits(value)} s"
    if kind == "rate":
        return three_digits(value)
    formats = {"count": ",d", "loss": ",.4g", "gap": ".1e", "percent": ".1%"}
    if kind == "loss" and value < 1e4:
        return f"{value:.2f}" if value >= 10 else f"{value:.4f}"
    return format(value, formats[kind])


def three_digits(value: float) -> str:
    """Format with at least three digits; ties round up, as in assets/format.js."""
    value *= 1 + 1e-12
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else f"{value:#.3g}"


def printable(text: str) -> str:
    """Replace control, direction-changing and undecodable characters.

    Names come from untrusted folders, and go to terminals and files.
    """
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
