"""The page of plan_from_rehearsals.py."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return results/plan_from_rehearsals.md."""
    return "\n".join(_lines(rows)) + "\n"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table of trainers: how far plans are off."""
    lines = ["| trainer | configs | median | worst |", "|---|---:|---:|---:|"]
    for name in (*dict.fromkeys(row["trainer"] for row in rows), "all"):
        chosen = [row for row in rows if name in (row["trainer"], "all") and row["ratio"]]
        misses = [abs(row["ratio"] - 1) for row in chosen]
        if misses:
            middle = statistics.median(misses)
            lines.append(f"| {name} | {len(misses)} | {middle:.1%} | {max(misses):.1%} |")
    return "\n".join(lines)


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Configs of other trainers, planned and rehearsed"
    yield ""
    yield "Allocated peak of the worst rank: planned from the config's file, and rehearsed with the"
    yield "trainer itself, unchanged; real allocator, no kernels run. By"
    yield "`bench/plan_from_rehearsals.py`."
    yield ""
    yield summary(rows)
    yield ""
    yield "| run | config | planned | rehearsed | | s |"
    yield "|---|---|---:|---:|---:|---:|"
    for row in rows:
        plan, rehearsal = row["plan"], row["rehearsal"]
        off = f"{row['ratio'] - 1:+.1%}" if row["ratio"] else ""
        cells = [
            *(row["key"], _words(row["chosen"]), _gib(plan.get("allocated_bytes"))),
            *(_gib(rehearsal.get("allocated_bytes")), off, f"{rehearsal.get('seconds', 0):.0f}"),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## Causes and refusals"
    yield ""
    for row in rows:
        if row["cause"]:
            yield f"- {row['key']}: {row['cause']}"
        if row["plan"].get("refused"):
            yield f"- {row['key']} is refused: {row['plan']['refused']}"
        if row["rehearsal"].get("failed"):
            why = " ".join(str(row["rehearsal"]["failed"]).split())
            yield f"- {row['key']} failed: {why[:120]}"
    yield ""
    yield "## Versions"
    yield ""
    for name in dict.fromkeys(row["trainer"] for row in rows):
        one = next(row for row in rows if row["trainer"] == name)["rehearsal"]["versions"]
        yield f"- {name}: {', '.join(f'{what} {version}' for what, version in one.items())}"


def _words(chosen: dict[str, Any]) -> str:
    words = [str(chosen["model"]).rpartition("/")[2]]
    for name, value in chosen.items():
        if name == "model" or value in (False, "", None):
            continue
        text = "/".join(str(v) for v in value if v) if isinstance(value, list | tuple) else value
        words.append(name if value is True else f"{name} {text}")
    return ", ".join(words)


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.3f} GiB"
