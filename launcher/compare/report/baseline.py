"""A baseline: bytes and speeds of runs in a small JSON file, and what has become worse since."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from launcher.compare.report.analysis import MEMORY_KINDS
from launcher.util.errors import WHY, UserError, refused
from launcher.util.files import replace_text
from launcher.util.json_file import read_json
from launcher.util.sizes import gib

VERSION: Final = 1
MOST_GROWTH: Final = 0.01
"""Relative growth of memory that is no failure."""
MEMORY: Final = ("allocated_peak_bytes", "reserved_peak_bytes", "tracked_live_bytes")
"""Those that repeat from run to run; a process's resident set and a device's use do not."""
_QUARTILES: Final = ("tokens_per_s_p25", "tokens_per_s_median", "tokens_per_s_p75")
_KEPT: Final = (*MEMORY, *_QUARTILES)
_FEWEST_STEPS: Final = 5
"""Timed steps from which their quartiles say something of the noise."""
Row = Mapping[str, Any]


def check_replaceable(path: Path) -> None:
    """Refuse to write a baseline over a file that is none.

    Raises:
        UserError: the file holds something else.
    """
    said = f"--write-baseline {path}: exists and is no baseline: choose another file"
    if path.exists():
        with refused(UserError, said):
            read_baseline(path)


def write_baseline(path: Path, rows: Sequence[Row], hosts: Mapping[str, Any]) -> None:
    """Write the baseline of the completed runs among a report's rows.

    Raises:
        UserError: none is completed, or the file cannot be written.
    """
    runs = _entries(rows, hosts)
    if not runs:
        raise UserError(f"--write-baseline {path}: no run is completed: give one that is")
    content = {"version": VERSION, "runs": runs}
    with refused(OSError, f"--write-baseline {path}: {WHY}: choose another file"):
        replace_text(path, json.dumps(content, indent=1, sort_keys=True) + "\n")


def _entries(rows: Sequence[Row], hosts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return run -> what a baseline keeps of it, of the completed ones."""
    runs = {}
    for row in rows:
        if row["state"] == "completed":
            kept = _KEPT if (row.get("steady_steps") or 0) >= _FEWEST_STEPS else MEMORY
            # without 0: a program that is watched may leave the GPU alone
            runs[row["run"]] = {name: row[name] for name in kept if row.get(name)}
            runs[row["run"]]["machine"] = row.get("device_name") or hosts.get(row["run"])
    return runs


def read_baseline(path: Path) -> dict[str, dict[str, Any]]:
    """Return run -> its figures.

    Raises:
        UserError: no file that `write_baseline` has written.
    """
    what = "a file of `report --write-baseline`"
    content = read_json(path, what=what)
    runs = content.get("runs")
    if content.get("version") != VERSION or not isinstance(runs, dict) or not runs:
        raise UserError(f"--against {path}: has no runs of version {VERSION}: give {what}")
    for name, entry in runs.items():
        figures = [entry.get(key, 1) for key in _KEPT] if isinstance(entry, dict) else [""]
        if not all(isinstance(value, int | float) and value > 0 for value in figures):
            raise UserError(
                f"--against {path}: the figures of {name!r:.60} are damaged: give {what}"
            )
    return runs


def worse_than(
    before: Mapping[str, Row], rows: Sequence[Row], hosts: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return sentences on what is worse than the baseline, and notes on the rest."""
    states = {row["run"]: row["state"] for row in rows}
    now = _entries(rows, hosts)
    worse: list[str] = []
    notes: list[str] = []
    for name, old in before.items():
        if name not in states:
            worse.append(f"{name} is in the baseline and not among these runs")
        elif name not in now:
            worse.append(f"{name} was completed, and is {states[name]} now")
        else:
            for is_worse, sentence in _memory_changes(name, old, now[name]):
                (worse if is_worse else notes).append(sentence)
    slow, said = _slower(before, {name: now[name] for name in before if name in now})
    notes += [f"{name} is new and not in the baseline" for name in states if name not in before]
    return [*worse, *slow], [*notes, *said]


def _memory_changes(name: str, old: Row, new: Row) -> Iterator[tuple[bool, str]]:
    """Yield whether memory is worse, and the sentence on it."""
    for kind in filter(old.get, MEMORY):
        what, before = f"{name}: {MEMORY_KINDS[kind]}", old[kind]
        if kind not in new:
            yield True, f"{what} is in the baseline and was not measured now"
            continue
        change, sizes = new[kind] / before - 1, f"from {gib(before)} to {gib(new[kind])}"
        if new[kind] > (1 + MOST_GROWTH) * before:
            yield True, f"{what} grew by {change:.1%}, {sizes}"
        elif new[kind] < (1 - MOST_GROWTH) * before:
            yield False, f"{what} fell by {-change:.1%}: --write-baseline keeps it"


def _slower(before: Mapping[str, Row], now: Mapping[str, Row]) -> tuple[list[str], list[str]]:
    """Compare speeds: tokens/s on the same machine, else those relative to the first run.

    A run is slower where even its faster quartile of steps is below the baseline's slower one.
    """
    timed = [n for n in now if _QUARTILES[0] in now[n] and _QUARTILES[0] in before[n]]
    if not timed:
        return [], ["speeds are not compared: fewer than 5 timed steps"] if now else []
    same = all(before[n].get("machine") == now[n].get("machine") for n in timed)
    first = timed[0]
    found = []
    for name in timed if same else timed[1:]:
        old, new = before[name], now[name]
        if not same:
            old, new = _relative(old, before[first]), _relative(new, now[first])
        if new["tokens_per_s_p75"] < old["tokens_per_s_p25"]:
            change = 1 - new["tokens_per_s_median"] / old["tokens_per_s_median"]
            unit = "tokens/s" if same else f"of {first}'s tokens/s"
            found.append(
                f"{name} is {change:.1%} slower, beyond the noise of its steps: "
                f"{_range(new)} {unit}, before {_range(old)}"
            )
    notes = []
    if not same and len(timed) == 1:
        notes = ["speeds are not compared: another machine, and a single run"]
    elif not same:
        notes = [f"another machine: speeds are compared relative to {first}"]
    return found, notes


def _relative(figures: Row, reference: Row) -> dict[str, float]:
    low, middle, high = _QUARTILES
    return {
        # the widest range of the quotient
        low: figures[low] / reference[high],
        middle: figures[middle] / reference[middle],
        high: figures[high] / reference[low],
    }


def _range(figures: Row) -> str:
    return f"{figures[_QUARTILES[0]]:.4g} to {figures[_QUARTILES[2]]:.4g}"
