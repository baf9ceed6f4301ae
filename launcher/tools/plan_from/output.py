"""Print what was understood of a file, the ledger of its run, and the changes that would fit."""

import json
import shlex
from collections.abc import Sequence
from typing import Any, Final

from launcher.forecast.fit import Verdict, verdict
from launcher.forecast.predict import by_category
from launcher.forecast.table import seconds
from launcher.forecast.timing import StepTime
from launcher.tools.plan_from.assess import Planned
from launcher.tools.plan_from.changes import Change, line_of
from launcher.tools.plan_from.keys import Facts
from launcher.util.errors import one_line
from launcher.util.flags import as_flags, as_words
from launcher.util.sizes import gib
from launcher.util.tables import MUST, Column, print_table, say

_COLUMNS: Final = (
    Column(title="key", rank=MUST, folds=26),
    Column(title="ours", rank=MUST, folds=30),
    Column(title="bytes", rank=MUST, folds=20),
)
_LEDGER: Final = (
    Column(title="peak", rank=MUST),
    Column(title="bytes", rank=MUST, right=True),
)
_MOST_NAMES: Final = 12
_NO_DEGREE: Final = (("tensor_parallel", 1), ("context_parallel", 1))
_CATEGORIES: Final = {
    "micro_batch": ("activations",),
    "seq_len": ("activations",),
    "activation_checkpointing": ("activations",),
    "selective": ("activations",),
    "attention": ("activations",),
    "optimizer": ("optimizer",),
    "mixed": ("params", "master", "grads"),
    "weights": ("params", "grads", "optimizer"),
    "strategy": ("params", "grads", "optimizer"),
    "zero": ("params", "master", "grads", "optimizer"),
    "reshard_after_forward": ("params", "temporary"),
    "shard": ("params", "grads", "optimizer"),
    "shard ranks": ("params", "grads", "optimizer"),
    "offload_optimizer": ("optimizer",),
    "offload_param": ("params",),
    "quantize_base": ("frozen",),
    "lora": ("params", "frozen", "optimizer"),
    "lora_rank": ("params", "grads", "optimizer"),
    "loss": ("activations", "temporary"),
}
"""Fact -> the categories of the ledger that it decides."""
_OURS: Final = {
    "gpus": "--gpus",
    "gpus if unsaid": "by default --gpus",
    "alone": "on one GPU",
    "per_machine": "GPUs per node",
    "machines": "nodes",
    "accumulation": "micro-batches per step",
    "mixed": "computes in",
    "weights": "weights loaded in",
    "base": "base loaded in",
    "loss": "logits",
    "foreach": "foreach update",
    "lora": "adapters",
    "layers": "adapters beside",
    "every layer": "adapters beside every layer",
    "embedding_moments": "moments of the embedding",
    "replicas": "replicas",
    "shard": "ranks to shard over",
    "shard ranks": "ranks to shard over",
    "selective": "selective",
    "tf32": "TF32",
    "liger": "Liger's kernels",
    "fsdp_version": "FSDP",
    "overlap_comm": "overlapped reduction",
    "engine": "engine",
    "norm_bytes": "bytes kept by a composed RMSNorm",
    "fine-tunes": "fine-tunes",
    "block_size": "longest sequence",
    "micro_batch_tokens": "tokens per micro-batch",
    "global_batch_tokens": "tokens per step",
    "family": "family",
    "flavor": "size",
}


def print_planned(planned: Planned, changes: Sequence[Change], *, as_json: bool) -> None:
    """Print all of it as text, or as one JSON object."""
    if as_json:
        print(json.dumps(record_of(planned, changes), indent=2, default=str))
        return
    reading, run = planned.reading, planned.assessment.run
    engine = reading.engine
    say(
        f"{reading.source.path}: {reading.kind.name}, planned as {engine.version} ({engine.source})"
    )
    rows = [
        [one_line(f"{key}: {value}", 120), ours(facts), effect(planned, facts)]
        for key, value, facts in reading.words
    ]
    if rows:
        print_table(_COLUMNS, rows, otherwise="--json has them all")
    if reading.left_out:
        say("not taken into account: " + "; ".join(reading.left_out))
    if reading.no_effect:
        more = len(reading.no_effect) - _MOST_NAMES
        names = ", ".join(reading.no_effect[:_MOST_NAMES]) + (
            f" and {more} more" if more > 0 else ""
        )
        say(f"without effect on bytes: {names}")
    print()
    cluster = planned.cluster
    say(
        f"{run.config.model.label}: {run.model.parameter_count:,} parameters, global batch "
        f"{run.global_batch} x {run.seq_len} tokens, on {cluster.world_size} x "
        f"{gib(cluster.memory_bytes)} ({cluster.machine.source})"
    )
    shown = {k: v for k, v in planned.fields.items() if v is not None and (k, v) not in _NO_DEGREE}
    say("as flags: " + shlex.join(as_words(shown)))
    for note in planned.notes:
        say(note)
    ledger = [[name, gib(size)] for name, size in planned.lines().items()]
    print_table(_LEDGER, [*ledger, ["in all", gib(planned.used_bytes)]], otherwise="--json")
    say(verdict_line(planned))
    for change in changes:
        fits = verdict(change.used_bytes, planned.memory_bytes) == "fits"
        say(("would fit: " if fits else "would be tight: ") + line_of(change, planned))
    if planned.verdict != "fits" and not changes:
        say(
            "no change of its keys was found with which it fits: give more GPUs, a smaller "
            "--micro-batch or a smaller model"
        )


def verdict_line(planned: Planned) -> str:
    """Say in one line whether it fits, with how much, and how fast it is."""
    time = planned.assessment.time
    return fits_line(planned.verdict, planned.used_bytes, planned.memory_bytes, time)


def fits_line(found: Verdict, used_bytes: int, memory_bytes: int, time: StepTime | None) -> str:
    """Say in one line whether so many bytes fit, and how fast the run is."""
    share = f"{gib(used_bytes)} of {gib(memory_bytes)} ({used_bytes / memory_bytes:.0%})"
    pace = "" if time is None or found == "does not fit" else f", {seconds(time)} s per step"
    return f"{found}: {share}{pace}"


def ours(facts: Facts) -> str:
    """Spell facts in our words: as flags where they are flags."""
    parts = []
    for name, value in facts.items():
        if name == "mixed" and value is None:
            parts.append("no mixed precision")
        elif name in _OURS:
            word = _OURS[name]
            named = word if value is True else f"no {word}" if value is False else f"{word} {value}"
            parts.append(named)
        elif name.startswith(("companion", "bucket", "target")):
            parts.append(f"{name.partition(' ')[2]} {value}")
        else:
            parts.append(as_flags({name: value}))
    return ", ".join(parts)


def effect(planned: Planned, facts: Facts) -> str:
    """Say which bytes at the peak facts decide, and how many these are."""
    ledger = by_category(planned.assessment.highest)
    names = dict.fromkeys(name for fact in facts for name in _CATEGORIES.get(fact, ()))
    shown = [f"{name} {gib(ledger[name])}" for name in names if ledger.get(name)]
    if shown:
        return ", ".join(shown)
    if "model" in facts or "flavor" in facts:
        return f"{planned.assessment.run.model.parameter_count:,} parameters"
    return "-"


def record_of(planned: Planned, changes: Sequence[Change]) -> dict[str, Any]:
    """Return all of it as plain values."""
    reading = planned.reading
    return {
        "file": str(reading.source.path),
        "kind": reading.kind.name,
        "engine": reading.engine.version,
        "verdict": planned.verdict,
        "used_bytes": planned.used_bytes,
        "memory_bytes": planned.memory_bytes,
        "allocated_bytes": planned.allocated_bytes,
        "reserved_bytes": planned.used_bytes - planned.cluster.fixed_bytes,
        "step_s": planned.step_s,
        "ledger_bytes": planned.lines(),
        "flags": planned.fields,
        "words": [
            {"key": key, "value": value, "ours": ours(facts), "effect": effect(planned, facts)}
            for key, value, facts in reading.words
        ],
        "not_taken_into_account": reading.left_out,
        "without_effect": reading.no_effect,
        "notes": planned.notes,
        "changes": [
            {
                "edit": dict(change.edit),
                "what": change.what,
                "used_bytes": change.used_bytes,
                "slower": change.slower,
            }
            for change in changes
        ],
    }
