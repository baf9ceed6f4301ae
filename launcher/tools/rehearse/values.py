"""Values that a rehearsed program read, as lines of its report."""

from collections.abc import Iterator, Mapping
from typing import Any

from launcher.tools.rehearse.stage import Stage
from launcher.tools.watch.tables import from_here, table

MOST_LOGGED = 4


def value_lines(stage: Stage) -> Iterator[str]:
    """Yield the values that no kernel has computed and the program read, with their answers."""
    reads = [event for rank in stage.ranks[:1] for event in rank.events("value_read")]
    if not reads:
        return
    # Numbers that a library reads are what it logs; what decides its way are the others.
    logged = [one for one in reads if one["library"] and isinstance(one["answer"], float)]
    left_out = logged if len(logged) > MOST_LOGGED else []
    rows = [
        (
            *(_line(one["place"], one["library"]), _tail(one["library"]), one["call"]),
            *(f"{one['times']:,}", ", ".join(map(str, _given(one)))),
        )
        for one in reads
        if one not in left_out
    ]
    yield "Values that no kernel has computed were read here (--answer FILE:LINE=VALUE sets one):"
    yield from table(("line", "in", "call", "times", "answer"), rows)
    if left_out:
        yield f"    {len(left_out):,} more lines of libraries read numbers (--json lists them)"


def _line(place: str, library: str | None) -> str:
    """Return the file and line; autograd's own threads, and those of libraries, have none."""
    if place == "backward:0":
        return "in backward"
    return "in a library's thread" if place == library else from_here(place)


def _tail(place: str | None) -> str:
    """Return the last two parts of a library's path and line."""
    return "" if place is None else "/".join(place.split("/")[-2:])


def _given(read: Mapping[str, Any]) -> list[Any]:
    """Return the first answer, and where the next ones go."""
    return [read["answer"], *([read["trend"]] if "trend" in read else [])]
