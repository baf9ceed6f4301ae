"""The page of rehearsals.py: summary, rows, misses."""

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LARGE = 0.05
NEAR, OPTIMISTIC = 1.25, 1.15
"""Goals for seconds: within this factor of what is published; not below it by more than that."""
RESULT = Path(__file__).parent / "results" / "rehearsals.jsonl"


def by_program(_: Sequence[str]) -> str:
    """Return the table of docs/rehearse.md: how far each program's figures are off."""
    records = [json.loads(line) for line in RESULT.read_text(encoding="utf-8").splitlines()]
    records = [record for record in records if record["figure"] != "step"]
    lines = ["| program | figures | median | worst |", "|---|---:|---:|---:|"]
    for name in (*dict.fromkeys(record["program"] for record in records), "all"):
        chosen = [record for record in records if name in (record["program"], "all")]
        misses = [abs(miss) for record in chosen if (miss := _miss(record)) is not None]
        middle = statistics.median(misses)
        lines.append(f"| {name} | {len(misses)} | {middle:.1%} | {max(misses):.1%} |")
    return "\n".join(lines)


def steps_by_program(_: Sequence[str]) -> str:
    """Return the table of docs/rehearse.md: seconds of a step, published and rehearsed."""
    records = [json.loads(line) for line in RESULT.read_text(encoding="utf-8").splitlines()]
    return "\n".join(_steps([record for record in records if record["figure"] == "step"]))


def _steps(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| step of | GPU | published | rehearsed | ratio |"
    yield "|---|---|---:|---:|---:|"
    for record in records:
        found = record["rehearsed_s"]
        cells = [record["key"].removesuffix("-step"), record["gpu"]]
        cells += [f"{record['published_s']:.3f} s", "" if found is None else f"{found:.3f} s"]
        cells.append("" if found is None else f"{found / record['published_s']:.2f}")
        yield f"| {' | '.join(cells)} |"


def _summary_of_steps(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    ratios = [r["rehearsed_s"] / r["published_s"] for r in records if r["rehearsed_s"]]
    if not ratios:
        return
    near = sum(1 / NEAR <= ratio <= NEAR for ratio in ratios)
    below = sum(ratio < 1 / OPTIMISTIC for ratio in ratios)
    yield (
        f"- seconds of a step: {len(ratios)} figures, {near} within {NEAR}x of what is published, "
        f"{below} more than {OPTIMISTIC}x optimistic, ratios {min(ratios):.2f} to {max(ratios):.2f}"
    )


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Return results/rehearsals.md."""
    return "\n".join(_lines(records)) + "\n"


def _lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "# Published, rehearsed, planned"
    yield ""
    yield "Programs of other people, unchanged, on a machine without a GPU; real allocator, no"
    yield "kernels run. By `bench/rehearsals.py`."
    yield ""
    steps = [record for record in records if record["figure"] == "step"]
    records = [record for record in records if record["figure"] != "step"]
    yield from _summary("rehearsed against published, all", records, "rehearsed_bytes")
    for figure, words in (("peak", "peaks"), ("kept", "after a step"), ("reserved", "reserved")):
        chosen = [record for record in records if record["figure"] == figure]
        name = f"allocated, {words}" if figure != "reserved" else words
        yield from _summary(name, chosen, "rehearsed_bytes")
    both = [record for record in records if record["planned_bytes"] and _miss(record) is not None]
    yield from _summary("planned against published, where there is a plan", both, "planned_bytes")
    yield from _summary("rehearsed, the same rows", both, "rehearsed_bytes")
    yield from _summary_of_steps(steps)
    yield ""
    yield "| row | GPU | figure | published | rehearsed | | planned | | s |"
    yield "|---|---|---|---:|---:|---:|---:|---:|---:|"
    for record in records:
        result = record["result"]
        cells = [
            *(record["key"], record["gpu"], record["figure"], _gib(record["published_bytes"])),
            *(_gib(record["rehearsed_bytes"]), _percent(_miss(record))),
            *(_gib(record["planned_bytes"]), _percent(_miss(record, "planned_bytes"))),
            f"{result['seconds']:.0f}" if "seconds" in result else "",
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "## Seconds of a step"
    yield ""
    yield from _steps(steps)
    yield ""
    yield "## Misses and differences"
    yield ""
    for record in [*records, *steps]:
        if record["cause"]:
            yield f"- {record['key']}: {record['cause']}"
        if record["result"].get("failed"):
            why = " ".join(str(record["result"]["failed"]).split())
            yield f"- {record['key']} failed: {why[:120]}"
    yield ""
    yield "## Sources and versions"
    yield ""
    for program in dict.fromkeys(record["program"] for record in records):
        chosen = [record for record in records if record["program"] == program]
        versions = chosen[0]["result"].get("versions", {})
        sources = "; ".join(dict.fromkeys(record["source"] for record in chosen))
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        yield f"- {program}: {sources}. Rehearsed with {listed}."


def _summary(name: str, records: Sequence[dict[str, Any]], field: str) -> Iterator[str]:
    misses = [abs(found) for record in records if (found := _miss(record, field)) is not None]
    if misses:
        programs = len({record["program"] for record in records})
        yield (
            f"- {name}: {len(misses)} figures of {programs} programs, median "
            f"{statistics.median(misses):.2%}, worst {max(misses):.1%}, "
            f"{sum(miss > LARGE for miss in misses)} over {LARGE:.0%}"
        )


def _miss(record: dict[str, Any], field: str = "rehearsed_bytes") -> float | None:
    """Relative to what is published; what its digits cannot tell counts."""
    found = record[field]
    return None if found is None else found / record["published_bytes"] - 1


def _gib(size: float | None) -> str:
    return "" if size is None else f"{size / 2**30:.2f} GiB"


def _percent(miss: float | None) -> str:
    return "" if miss is None else f"{miss:+.1%}"


TABLES = {"rehearsals": by_program, "rehearsed-steps": steps_by_program}
"""Of docs/rehearse.md."""
