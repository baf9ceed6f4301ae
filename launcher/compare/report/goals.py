"""Who is best at what, of runs that can be compared; where no difference shows, all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launcher.compare.report.analysis import MEMORY_KINDS, Figures, pareto_points
from launcher.compare.report.columns import Kind, shown
from launcher.compare.report.runs import Run
from launcher.util.sizes import GIB

Values = dict[str, Any]
MOST_NAMED = 3
# What must fit into a card is all that the device uses; the allocator's own figures come next.
_FITS_BY = ("device_used_bytes", "reserved_peak_bytes", "allocated_peak_bytes")
_CPU_KINDS = ("tracked_live_bytes", "resident_set_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """One figure of a goal."""

    value: float
    kind: Kind
    of: str

    @property
    def text(self) -> str:
        """As it is shown everywhere."""
        return f"{shown(self.value, self.kind)} {self.of}"


def best_by_goal(
    runs: Sequence[Run], known: Mapping[str, Figures], budget_bytes: int
) -> list[Values]:
    """The runs that are best at something, of the completed ones of one setting; several where no
    difference shows."""
    done = [run for run in runs if run.completed]
    if not done:
        return []
    on_gpu = done[0].on_gpu
    of_all = _reached(done, known, ("allocated_peak_bytes",) if on_gpu else _CPU_KINDS)
    fits_by = _reached(done, known, _FITS_BY if on_gpu else _CPU_KINDS)
    fitting = {name: both for name, both in fits_by.items() if both[0].value <= budget_bytes}
    learned = {
        run.name: [Reached(value=p, kind="loss", of="on the test split")]
        for run in done
        if (p := known[run.name].perplexity) is not None
    }
    goals = [
        _goal("least memory", of_all, by=0, sign=1),
        _goal("fastest", of_all, by=1, sign=-1),
        _goal(f"fastest under {budget_bytes / GIB:g} GiB", fitting, by=1, sign=-1),
    ]
    return [*goals, _goal("lowest perplexity", learned, by=0, sign=1)] if learned else goals


def _reached(
    runs: Sequence[Run], known: Mapping[str, Figures], kinds: Sequence[str]
) -> dict[str, list[Reached]]:
    """(memory, tokens/s) of the runs that have both; memory of the first kind that most have."""
    kind = max(kinds, key=lambda k: sum(known[run.name].memory[k] is not None for run in runs))
    return {
        name: [
            Reached(value=memory, kind="bytes", of=MEMORY_KINDS[kind]),
            Reached(value=rate, kind="rate", of="tokens/s"),
        ]
        for name, (memory, rate) in pareto_points(runs, known, kind).items()
    }


def _goal(goal: str, table: Mapping[str, Sequence[Reached]], *, by: int, sign: int) -> Values:
    """Who is best by one of the figures: all whose figure reads the same.

    `figures` are what all of them have; `text` is as in `zero2 (11.7 MiB resident set, 5,391
    tokens/s)`.
    """
    order = sorted(table, key=lambda name: sign * table[name][by].value)
    tied = [name for name in order if table[name][by].text == table[order[0]][by].text]
    shared = [
        figures[0]
        for figures in zip(*(table[name] for name in tied), strict=True)
        if len({figure.text for figure in figures}) == 1
    ]
    text = "none of these runs"
    if tied:
        names, more = ", ".join(tied[:MOST_NAMED]), len(tied) - MOST_NAMED
        names += f" and {more} more" if more > 0 else ""
        told = ", ".join(figure.text for figure in shared)
        text = f"{names} ({'a tie: ' if len(tied) > 1 else ''}{told})"
    return {"goal": goal, "runs": tied, "figures": [asdict(f) for f in shared], "text": text}
