"""Who is best at what, of runs that can be compared; where no difference shows, all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launcher.compare.report.analysis import MEMORY_KINDS, Figures, memory_kind, pareto_points
from launcher.compare.report.columns import Kind, shown
from launcher.compare.report.runs import Run
from launcher.sizes import GIB

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """The runs that are best at something, within runs that can be compared.

    Several where no difference shows. `figures` are what all of them have.
    """

    goal: str
    runs: Sequence[str]
    figures: Sequence[Reached]

    @property
    def text(self) -> str:
        """`zero2 (11.7 MiB resident set, 5,391 tokens/s)`."""
        if not self.runs:
            return "none of these runs"
        told = ", ".join(figure.text for figure in self.figures)
        names = ", ".join(self.runs[:MOST_NAMED])
        more = len(self.runs) - MOST_NAMED
        names += f" and {more} more" if more > 0 else ""
        return f"{names} ({'a tie: ' if len(self.runs) > 1 else ''}{told})"


def best_by_goal(
    runs: Sequence[Run], known: Mapping[str, Figures], budget_bytes: int
) -> list[Goal]:
    """The best completed runs of one setting."""
    done = [run for run in runs if run.completed]
    if not done:
        return []
    on_gpu = done[0].on_gpu
    kind = memory_kind(done, known, ("allocated_peak_bytes",) if on_gpu else _CPU_KINDS)
    fits_by = memory_kind(done, known, _FITS_BY if on_gpu else _CPU_KINDS)
    points = pareto_points(done, known, kind)
    fitting = {
        name: point
        for name, point in pareto_points(done, known, fits_by).items()
        if point[0] <= budget_bytes
    }
    budget = f"{budget_bytes / GIB:g} GiB"

    def reached(by: str, table: Mapping[str, tuple[float, float]]) -> dict[str, list[Reached]]:
        return {
            name: [
                Reached(value=memory, kind="bytes", of=MEMORY_KINDS[by]),
                Reached(value=rate, kind="rate", of="tokens/s"),
            ]
            for name, (memory, rate) in table.items()
        }

    of_all, of_fitting = reached(kind, points), reached(fits_by, fitting)
    learned = {
        run.name: [Reached(value=p, kind="loss", of="on the test split")]
        for run in done
        if (p := known[run.name].perplexity) is not None
    }
    goals = [
        _goal("least memory", of_all, decides=0, sign=1),
        _goal("fastest", of_all, decides=1, sign=-1),
        _goal(f"fastest under {budget}", of_fitting, decides=1, sign=-1),
    ]
    return [*goals, _goal("lowest perplexity", learned, decides=0, sign=1)] if learned else goals


def _goal(goal: str, table: Mapping[str, Sequence[Reached]], *, decides: int, sign: int) -> Goal:
    """Who is best by one of the figures: all whose figure reads the same."""
    if not table:
        return Goal(goal=goal, runs=(), figures=())
    order = sorted(table, key=lambda name: sign * table[name][decides].value)
    best = table[order[0]]
    tied = [name for name in order if table[name][decides].text == best[decides].text]
    shared = [
        figure
        for i, figure in enumerate(best)
        if all(table[name][i].text == figure.text for name in tied)
    ]
    return Goal(goal=goal, runs=tied, figures=shared)
