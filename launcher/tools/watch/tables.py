"""Tables of what a watched program needed, per phase and per rank."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.measure.records import Status
from launcher.tools.watch.folder import WatchedRank
from launcher.util.sizes import counted, gib

_PERIODS = ("init", "first_step", "steady", "evaluation", "save")
_NAMES = {"init": "load", "first_step": "first step", "steady": "later steps"}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table; the first column is text, the others are right-aligned."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def from_here(file: str) -> str:
    """Return a file's path from the current folder, if it lies below."""
    return file.removeprefix(f"{os.getcwd()}/")


def headline(rank: WatchedRank, ranks: int, status: Status) -> str:
    """Return one line: program, ranks, steps, and how it ended."""
    run, steps = rank.run, len(rank.of_kind("step"))
    several = counted(ranks, "rank")
    ended = {"completed": "ended well", "oom": "out of memory"}.get(status.state, status.reason)
    place = run.get("device_name") or str(run.get("device", "")).upper()
    return f"{rank.label}, {run.get('precision')}; {several} on {place}; {steps} steps; {ended}"


def phase_rows(rank: WatchedRank) -> list[tuple[str, str, str, str]]:
    """Return period and phase, allocated peak, reserved peak, seconds."""
    records = sorted(rank.of_kind("phase"), key=lambda r: _PERIODS.index(r["period"]))
    return [
        (
            phase_name(record["period"], record["phase"]),
            gib(record.get("peak_bytes")),
            gib(record.get("reserved_peak_bytes")),
            _seconds(record.get("mean_s")),
        )
        for record in records
    ]


def phase_name(period: str, phase: str) -> str:
    """Return a phase of a period as tables name it."""
    if period == "init" and phase not in ("build", "load"):
        return f"before the first step: {phase}"
    name = _NAMES.get(period, period)
    return name if period in ("init", "evaluation", "save") else f"{name}: {phase}"


def _content_rows(rank: WatchedRank) -> list[tuple[str, str]]:
    peaks = [ledger for ledger in rank.of_kind("ledger") if ledger["moment"] == "peak"]
    if not peaks:
        return [("(not recorded: the program records its own history)", "n/a")]
    largest = max(peaks, key=lambda ledger: int(ledger["device"]["used_bytes"]))
    lines = sorted(largest["device"].items(), key=lambda item: -item[1])
    return [(name.removesuffix("_bytes"), gib(size)) for name, size in lines if size]


def _seconds(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def summary_lines(folder: Path, ranks: Sequence[WatchedRank], status: Status) -> Iterator[str]:
    """Yield what is printed when the program has ended."""
    first = ranks[0]
    yield headline(first, len(ranks), status)
    if first.on_gpu:
        yield from table(("rank 0", "allocated", "reserved", "s"), phase_rows(first))
        yield from table(("rank 0 at the peak of a step", "bytes"), _content_rows(first))
    else:
        yield from table(
            ("rank 0", "s"), [(name, seconds) for name, _, _, seconds in phase_rows(first)]
        )
    rows = [
        (
            f"rank {rank.number}",
            gib(rank.allocated_peak_bytes if rank.on_gpu else None),
            gib(rank.reserved_peak_bytes),
            gib(rank.highest("memory_used_bytes")),
            gib(rank.highest("host_rss_bytes")),
        )
        for rank in ranks
    ]
    yield from table(("peaks", "allocated", "reserved", "device used", "resident set"), rows)
    if status.state == "oom" and status.detail.get("place"):
        place = status.detail["place"]
        line = f"{from_here(place['file'])}:{place['line']}"
        yield f"out of memory in {status.phase} at {line}: {place['code']}"
    yield f"run folder {folder}: shardscale report {folder}"
