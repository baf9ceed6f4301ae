"""The columns of the comparison, once, for the console, CSV, Markdown and the page."""

import math
from dataclasses import dataclass
from typing import Any, Literal

BYTE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
Kind = Literal["text", "count", "rate", "seconds", "bytes", "loss", "gap", "percent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One figure of a run. `always` columns show even where no run has a value."""

    key: str
    title: str
    kind: Kind
    help: str
    brief: bool = False  # on the console and in Markdown too
    always: bool = False


def _column(key: str, title: str, kind: Kind, help: str, marks: str = "") -> Column:
    return Column(
        key=key, title=title, kind=kind, help=help, brief="b" in marks, always="a" in marks
    )


COLUMNS = (
    _column("position", "#", "count", "Place by tokens/s among completed runs", "ba"),
    _column("run", "run", "text", "Name of the run folder", "ba"),
    _column("strategy", "strategy", "text", "Sharding choice", "ba"),
    _column("strategy_also_called", "also called", "text", "The same in the other words", "ba"),
    _column("setting", "setting", "text", "What runs share to be compared in speed and memory"),
    _column("precision", "precision", "text", "Precision of the computation", "b"),
    _column("world_size", "ranks", "count", "Processes, one per device", "b"),
    _column("context_parallel", "per sequence", "count", "Ranks that share each sequence"),
    _column("tensor_parallel", "per matrix", "count", "Ranks that share each matrix"),
    _column("micro_batch", "micro-batch", "count", "Sequences per rank and forward"),
    _column("accumulation", "accum.", "count", "Micro-batches per optimizer step"),
    _column("global_batch", "global batch", "count", "Sequences per optimizer step, all ranks"),
    _column("state", "state", "text", "How the run ended", "ba"),
    _column("tokens_per_s", "tokens/s", "rate", "All ranks, without the warm-up steps", "ba"),
    _column(
        "tokens_per_s_median", "tokens/s, median step", "rate", "Of the steps after the warm-up"
    ),
    _column("tokens_per_s_p25", "tokens/s, 25%", "rate", "A quarter of these steps was slower"),
    _column("tokens_per_s_p75", "tokens/s, 75%", "rate", "A quarter of these steps was faster"),
    _column("steady_steps", "steps timed", "count", "Steps after the warm-up, which are averaged"),
    _column("tokens_per_s_per_rank", "tokens/s per rank", "rate", "Tokens/s over ranks"),
    _column("step_time_s", "s/step", "seconds", "Mean time of a step, without warm-up", "b"),
    _column("tflops_per_rank", "TFLOP/s per rank", "loss", "6 N_matmul + 12 L d T per token"),
    _column("mfu", "MFU", "percent", "FLOP/s over the GPU's bf16 peak", "b"),
    _column(
        *("allocated_peak_bytes", "allocated peak", "bytes"),
        *("Tensors in the GPU's caching allocator at the highest moment, worst rank", "b"),
    ),
    _column(
        *("reserved_peak_bytes", "reserved peak", "bytes"),
        *("What the caching allocator held at the highest moment, rank 0", "b"),
    ),
    _column(
        *("device_used_bytes", "device used", "bytes"),
        *("What the whole device used at the highest moment, worst rank", "b"),
    ),
    _column(
        *("tracked_live_bytes", "tracked live peak", "bytes"),
        *("CPU: all live tensors at the highest moment (--memory-trace), worst rank", "b"),
    ),
    _column(
        *("resident_set_bytes", "resident set", "bytes"),
        *("CPU: highest resident set of a process, libraries included, worst rank", "b"),
    ),
    _column(
        "perplexity", "perplexity", "loss", "exp(loss) over what was read of the test split", "ba"
    ),
    _column("test_loss", "test loss", "loss", "Mean over what was read of the test split"),
    _column(
        *("loss_difference", "largest loss difference", "gap"),
        *("Largest |loss - reference loss| over all steps", "ba"),
    ),
    _column("differs", "differs in", "text", "Settings that are not the same in all runs", "b"),
    _column("loss_difference_step", "at step", "count", "Where the largest difference is"),
    _column("reference", "against", "text", "The run the losses are held against"),
    _column("steps", "steps", "count", "Optimizer steps done"),
    _column("first_step_s", "first step", "seconds", "Time of step 1, warm-up included"),
    _column("duration_s", "duration", "seconds", "Whole run, evaluation included"),
    _column("where", "ended in", "text", "Phase and rank a run that failed was in"),
    _column("reason", "reason", "text", "Why it failed"),
)


def shown(value: Any, kind: Kind) -> str:
    """A value for people, `n/a` when it is not known."""
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
    """At least three digits, as assets/format.js has it: a tie is rounded up."""
    value *= 1 + 1e-12
    return f"{value:,.0f}" if value >= 99.95 or value == 0 else f"{value:#.3g}"


def printable(text: str) -> str:
    """Text without control, direction-changing or undecodable characters: names come from folders
    that anybody may have made, and go to terminals and files."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
