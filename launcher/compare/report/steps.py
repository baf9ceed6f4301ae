"""Step records -> arrays, fast: a report may read millions of them.

The writer puts the fields in the order of the dataclass, so one regular expression takes a file
apart about twice as fast as a JSON parser does; a file with a line of another shape still goes
through JSON, where damaged lines are told from sound ones.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.compare.report.records import LARGEST, sound_record
from launcher.measure.records import WARMUP_STEPS, StepRecord

Floats = NDArray[np.float64]

PHASES = ("data", "forward", "backward", "step")
FEWEST = 5  # steps of which quartiles say something
STEP_PREFIX = b'{"kind": "step", '
_KEPT = (
    *("step", "loss", "tokens", "duration_s", "data_s", "forward_s", "backward_s", "step_s"),
    *("allocated_peak_bytes", "reserved_peak_bytes", "device_used_bytes"),
)
_VALUE = r"[-+.\de]+|null|true|false"


def _pattern(field: dataclasses.Field[Any]) -> str:
    value = f"({_VALUE})" if field.name in _KEPT else f"(?:{_VALUE})"
    entry = f', "{field.name}": {value}'
    return f"(?:{entry})?" if field.default is None else entry


_STEP_LINE = re.compile(
    "^"
    + re.escape(STEP_PREFIX.decode().removesuffix(", "))
    + "".join(map(_pattern, dataclasses.fields(StepRecord)))
    + r"\}$",
    re.MULTILINE,
)
_IN_ORDER = [f.name for f in dataclasses.fields(StepRecord) if f.name in _KEPT]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeries:
    """What a report needs of one rank's steps, in step order, each step once.

    `step` and `loss` are arrays of one length. The means (seconds per step, by phase, and global
    tokens/s) are over the `steady_steps`, those after the warm-up, and None when there are none;
    `other` is what no phase claims. `rate_quartiles` are a quarter, a half and three quarters of
    the tokens/s of single steps, None where there are too few steps to say.
    """

    step: NDArray[np.int64]
    loss: Floats
    step_time_s: float | None
    phases_s: Mapping[str, float] | None
    tokens_per_s: float | None
    steady_steps: int
    rate_quartiles: tuple[float, float, float] | None
    first_step_s: float
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    device_used_bytes: int | None


def read_steps(text: str) -> tuple[StepSeries | None, int]:
    """All step records in the text of a `rank<N>.jsonl`.

    Returns:
        The series, None when no step was finished; and how many step lines were damaged.
    """
    matches = _STEP_LINE.findall(text)
    expected = text.count("\n" + STEP_PREFIX.decode()) + text.startswith(STEP_PREFIX.decode())
    columns = _columns(matches) if len(matches) == expected else None
    damaged = 0
    if columns is None:
        columns, damaged = _through_json(text)
    if not columns or not len(columns["step"]):
        return None, damaged
    return _series(columns), damaged


def _columns(matches: Sequence[Sequence[str]]) -> dict[str, Floats] | None:
    """The matches as columns; None when a value is not of its column."""
    try:
        columns = dict(zip(_IN_ORDER, map(_floats, zip(*matches, strict=True)), strict=False))
    except ValueError:
        return None
    sound = all(not np.isinf(values).any() for values in columns.values())
    step = columns.get("step", np.zeros(0))
    sound &= bool(np.all((np.mod(step, 1) == 0) & (np.abs(step) < LARGEST[int])))
    return columns if sound else None


def _floats(values: Sequence[str]) -> Floats:
    first = values[0]
    # Parsing is what takes the time, and counts, bytes and unknowns mostly repeat themselves.
    if values.count(first) == len(values):
        return np.full(len(values), _float(first))
    return np.fromiter(map(_float, values), float, len(values))


def _float(text: str) -> float:
    return float(text) if text not in ("null", "") else math.nan


def _through_json(text: str) -> tuple[dict[str, Floats], int]:
    lines = [line for line in text.split("\n") if line.startswith(STEP_PREFIX.decode())]
    rows = [row for row in map(sound_record, lines) if row is not None]
    damaged = len(lines) - len(rows)
    return {name: np.array([_number(row.get(name)) for row in rows]) for name in _KEPT}, damaged


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _series(columns: dict[str, Floats]) -> StepSeries:
    # A step that was repeated after a restart counts once: its last record is the one that stands.
    backwards = columns["step"][::-1]
    _, last = np.unique(backwards, return_index=True)
    columns = {name: values[::-1][last] for name, values in columns.items()}
    duration_s = columns["duration_s"]
    steady = slice(WARMUP_STEPS, None)
    total_s = float(np.sum(duration_s[steady]))
    phases_s = None
    if total_s > 0:
        phases_s = {name: float(np.mean(columns[f"{name}_s"][steady])) for name in PHASES}
        phases_s["other"] = max(0.0, float(np.mean(duration_s[steady])) - sum(phases_s.values()))
        if not all(map(math.isfinite, phases_s.values())):
            phases_s = None
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = (columns["tokens"] / duration_s)[steady]
    rates = rates[np.isfinite(rates)]
    quartiles = np.quantile(rates, (0.25, 0.5, 0.75)).tolist() if len(rates) >= FEWEST else None
    return StepSeries(
        step=columns["step"].astype(np.int64),
        loss=columns["loss"],
        step_time_s=float(np.mean(duration_s[steady])) if total_s > 0 else None,
        phases_s=phases_s,
        tokens_per_s=float(np.sum(columns["tokens"][steady])) / total_s if total_s > 0 else None,
        steady_steps=len(rates),
        rate_quartiles=None if quartiles is None else (quartiles[0], quartiles[1], quartiles[2]),
        first_step_s=float(duration_s[0]),
        allocated_peak_bytes=_highest(columns["allocated_peak_bytes"]),
        reserved_peak_bytes=_highest(columns["reserved_peak_bytes"]),
        device_used_bytes=_highest(columns["device_used_bytes"]),
    )


def _highest(values: Floats) -> int | None:
    known = values[np.isfinite(values)]
    return int(known.max()) if len(known) else None


def thin(x: NDArray[Any], y: Floats, points: int) -> tuple[list[float], list[float | None]]:
    """A curve of at most about `points` points that keeps every bucket's extremes.

    Non-finite values become None, a gap. The first and the last point always stay.
    """
    if len(x) > points:
        edges = np.linspace(0, len(x), points // 2 + 1).astype(int)
        keep = {0, len(x) - 1}
        for start, end in itertools.pairwise(edges):
            part = y[start:end]
            if np.isfinite(part).any():
                keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
            else:
                keep.add(int(start))
        chosen = sorted(keep)
        x, y = x[chosen], y[chosen]
    return x.tolist(), [value if math.isfinite(value) else None for value in y.tolist()]
