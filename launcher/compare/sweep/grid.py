"""Expand a grid into cells: every combination of its values, named and checked in advance."""

import itertools
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launcher.compare.sweep.grid_source import OURS, SweepGrid, Values, flags_of
from launcher.config.arguments import SUPERSEDES, parse_run_config
from launcher.config.resolve import resolve
from launcher.config.schema import RunConfig, field_types
from launcher.config.transformers_config import tokenizer_of
from launcher.forecast import for_runs
from launcher.measure.records import SweepRow
from launcher.parallel.world import choose_device
from launcher.run.prepare import check_init_from, prepare
from launcher.strategies import VARIANTS
from launcher.util.errors import UserError
from launcher.util.flags import fields_of, flag, is_number

HYBRID_GROUPS = 2
ABBREVIATIONS = {
    **{"micro_batch": "mb", "global_batch": "gb", "seq_len": "seq"},
    **{"strategy": "", "precision": "", "model": "", "data": ""},
}

LONGEST_VALUE, LONGEST_STEM = 80, 200
"""Bytes of a cell's name, of which folders and files are named: a name has at most 255."""
MOST_CELLS = 100_000
SILENT_CELLS = 100
SAY_EVERY_S = 10.0

T = TypeVar("T")
ChooseDevice = Callable[[str, int], str]


def flags_given(tokens: Sequence[str]) -> tuple[Values, Values]:
    """Split training flags into typed ones and those that `--config` adds, as flat values.

    Raises:
        UserError: from the parser of `launcher.train`.
    """
    config = parse_run_config(tokens)
    names = fields_of(tokens)
    flat = config.flat()
    # A typed default counts too: it may override a grid file's base.
    typed = {key: flat.get(key) for key in field_types() if key in names and key not in OURS}
    return typed, {k: v for k, v in not_default(config).items() if k not in typed}


def cells_of(
    grid: SweepGrid, typed: Values, *, nproc: int, choose_device: ChooseDevice = choose_device
) -> list[SweepRow]:
    """Expand the grid into cells, in order: pending, or refused with the reason.

    `choose_device` resolves a cell's `--device` on the machine that will run it.

    Raises:
        UserError: a typed flag and the grid set the same thing, or no cell can run.
    """
    varied = {key for row in grid.rows for key in row} | grid.axes.keys()
    varied |= {other for key in varied for other in SUPERSEDES.get(key, ())}
    for key in sorted(varied & typed.keys()):
        raise UserError(f"{flag(key)} {typed[key]} is also set by the grid: leave one of them out")
    base = {**_without_superseded(grid.base, typed), **typed}
    count = max(1, len(grid.rows)) * math.prod(map(len, grid.axes.values()))
    if count > MOST_CELLS:
        raise UserError(
            f"this grid has {count:,} cells, more than the limit of {MOST_CELLS:,}: remove values"
        )
    rows = [
        _cell(name, values, base, nproc, choose_device)
        for name, values in _with_progress(_combinations(grid), count, "checking")
    ]
    first = next((row for row in rows if row.state == "refused"), None)
    if first and all(row.done for row in rows):
        raise UserError(f"no cell of this sweep can run; {first.name}: {first.reason}")
    return rows


def training_flags(row: SweepRow) -> list[str]:
    """Return the flags of a cell's training, which saves no model unless the cell asks for it."""
    saves = {} if row.flags.get("save_minutes") else {"save_every": 0}
    return flags_of({**saves, **row.flags})


def open_corpora(rows: Sequence[SweepRow], *, nproc: int) -> None:
    """Read and tokenize the data of all cells once, before the first cell starts.

    Missing files are then known in advance, and tokenization does not count against a cell's
    time-out. Cells whose data cannot be read are refused.

    Raises:
        UserError: no cell can run.
    """
    to_run = [row for row in rows if not row.done]
    for row in _with_progress(to_run, len(to_run), "reading the data of"):
        try:
            prepare(
                training_flags(row),
                world_size=nproc,
                ranks_per_node=nproc,
                load_forecast=lambda: for_runs,
            )
        except UserError as error:
            row.state, row.reason = "refused", str(error)
    if to_run and all(row.state == "refused" for row in to_run):
        raise UserError(str(to_run[0].reason))


def _with_progress(items: Iterable[T], count: int, doing: str) -> Iterator[T]:
    """Yield the items, printing progress to stderr if there are many."""
    said_s = -math.inf
    for number, item in enumerate(items):
        if count > SILENT_CELLS and time.monotonic() - said_s >= SAY_EVERY_S:
            said_s = time.monotonic()
            so_far = f", {number:,} done" if number else ""
            print(f"sweep: {doing} {count:,} cells{so_far}", file=sys.stderr, flush=True)
        yield item


def not_default(config: RunConfig) -> Values:
    """Return the flat values that differ from RunConfig's defaults."""
    defaults = RunConfig().flat()
    return {k: v for k, v in config.flat().items() if k not in OURS and defaults.get(k) != v}


def expand_strategy(choice: str, values: Mapping[str, Any]) -> Values:
    """Expand `zero3+cpu` into flags. `values` may hold `replicate` for fsdp-hybrid."""
    name, _, target = choice.partition("+")
    variant = VARIANTS.get(name)
    if variant is None:  # `zero`, whose stage is another axis
        return {"strategy": name} | ({"offload_optimizer": target} if target else {})
    flags = dict(variant.fields)
    if variant.replicates:
        flags["replicate"] = values.get("replicate", HYBRID_GROUPS)
    if target:
        flags["offload_optimizer"] = target
        if variant.shards_parameters:
            flags["offload_param"] = target
    return flags


def label(key: str, value: Any) -> str:
    """Abbreviate a value for a cell's name: `mb8`, `zero2`, `bf16`, `nockpt`."""
    if key == "activation_checkpointing":
        return "nockpt" if value == "none" else _safe(str(value))
    word = key.replace("_", "-")
    if str(value) in ("True", "False"):
        return word if str(value) == "True" else f"no-{word}"
    prefix = ABBREVIATIONS.get(key, word if is_number(str(value), float) else word + "-")
    text = Path(str(value)).name if key in ("data", "tokenizer", "deepspeed") else str(value)
    return prefix + _safe(_safe(text)[-LONGEST_VALUE:])


def _combinations(grid: SweepGrid) -> Iterator[tuple[str, Values]]:
    """Yield name and values of each cell; equal names get a number."""
    used: set[str] = set()
    for row, combination in itertools.product(
        grid.rows or [{}], itertools.product(*grid.axes.values())
    ):
        values = {k: v for k, v in row.items() if k != "name"}
        axes = dict(zip(grid.axes, combination, strict=True))
        own = [_safe(str(row["name"]))] if "name" in row else [label(*i) for i in values.items()]
        stem = "-".join([*own, *(label(*item) for item in axes.items())])[:LONGEST_STEM] or "run"
        name = next(n for i in itertools.count(1) if (n := stem + (f"-{i}" * (i > 1))) not in used)
        used.add(name)
        yield name, {**values, **axes}


def _without_superseded(base: Values, newer: Values) -> Values:
    """Drop from `base` what `newer` supersedes, such as the stage of another strategy."""
    gone = {other for key in newer for other in SUPERSEDES.get(key, ())} - newer.keys()
    return {key: value for key, value in base.items() if key not in gone}


def _cell(
    name: str, values: Values, base: Values, nproc: int, choose_device: ChooseDevice
) -> SweepRow:
    unavailable = values.pop("unavailable", None)
    flags = {**_without_superseded(base, values), **values}
    if unavailable is not None:
        return SweepRow(name=name, flags=flags, state="unavailable", reason=str(unavailable))
    choice = str(flags.get("strategy", ""))
    meant = expand_strategy(choice, flags) if choice else {}
    variant = VARIANTS.get(choice.partition("+")[0])
    try:
        # fsdp+cpu means offload_param cpu, too, which a cell may set otherwise
        for key in meant.keys() & flags.keys() - {"strategy"}:
            if str(flags[key]) != str(meant[key]):
                raise UserError(f"{choice} means {flag(key)} {meant[key]}, not {flags[key]}")
        flags |= meant
        config = parse_run_config(flags_of(flags), world_size=nproc)
        device_type = choose_device(config.loop.device, nproc)
        resolved = resolve(config, world_size=nproc, device_type=device_type)
        if config.loop.resume is None:
            check_init_from(resolved)
        if variant and variant.replicates and config.sharding.replicate == nproc:
            raise UserError(
                f"{variant.label} with --replicate {nproc} on {nproc} processes has one process "
                "per group and shards nothing: use more processes"
            )
    except UserError as error:
        return SweepRow(name=name, flags=flags, state="refused", reason=str(error))
    asked, flags = flags.get("tokenizer"), not_default(config)
    if asked is not None and tokenizer_of(config.model.model) is not None:
        flags["tokenizer"] = config.data.tokenizer  # else the model's own takes a default's place
    if config.data.global_batch is not None:  # else the plan of each cell would choose its own
        flags.setdefault("micro_batch", int(resolved.config.data.micro_batch))
    return SweepRow(name=name, flags=flags)


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-.")
