"""Winners of a comparison: the Pareto front, and the best runs by memory, speed and perplexity."""

from collections.abc import Mapping, Sequence
from typing import Any

from launcher.compare.report.analysis import MEMORY_KINDS
from launcher.compare.report.columns import Compared, shown
from launcher.util.sizes import GIB

Reached = tuple[float, str]
"""A figure, and its text."""
MOST_NAMED = 3
NONE = "none of these runs"
# A run fits a card by what the device uses; the allocator's own figures come second.
_FITS_BY = ("device_used_bytes", "reserved_peak_bytes", "allocated_peak_bytes")
_CPU_KINDS = ("tracked_live_bytes", "resident_set_bytes")


def pareto_points(runs: Sequence[Compared], kind: str) -> dict[str, tuple[float, float]]:
    """Return name -> (memory, tokens/s) of the completed runs that have both."""
    points = {}
    for one in runs:
        memory, rate = one.figures.memory[kind], one.figures.tokens_per_s
        if one.run.completed and memory is not None and rate is not None:
            points[one.run.name] = (float(memory), float(rate))
    return points


def pareto(points: Mapping[str, tuple[float, float]]) -> set[str]:
    """Return the names of the (memory, throughput) points that no other point dominates."""
    front, best = set(), (0.0, float("-inf"))
    for name, point in sorted(points.items(), key=lambda p: (p[1][0], -p[1][1])):
        if point[1] > best[1] or point == best:  # equal points do not dominate each other
            front.add(name)
            best = point
    return front


def best_by_goal(runs: Sequence[Compared], budget_bytes: int) -> list[dict[str, Any]]:
    """Rank the completed runs of one setting by each goal; a tie names all its winners."""
    done = [one for one in runs if one.run.completed]
    if not done:
        return []
    on_gpu = done[0].run.on_gpu
    all_runs = _speed_and_memory(done, ("allocated_peak_bytes",) if on_gpu else _CPU_KINDS)
    fits_by = _speed_and_memory(done, _FITS_BY if on_gpu else _CPU_KINDS)
    fitting = {name: both for name, both in fits_by.items() if both[0][0] <= budget_bytes}
    learned = {
        one.run.name: [(perplexity, f"{shown(perplexity, 'loss')} on the test split")]
        for one in done
        if (perplexity := one.figures.perplexity) is not None
    }
    goals = [
        _goal("least memory", all_runs, by=0, sign=1),
        _goal("fastest", all_runs, by=1, sign=-1),
        _goal(f"fastest under {budget_bytes / GIB:g} GiB", fitting, by=1, sign=-1),
    ]
    return [*goals, _goal("lowest perplexity", learned, by=0, sign=1)] if learned else goals


def _speed_and_memory(runs: Sequence[Compared], kinds: Sequence[str]) -> dict[str, list[Reached]]:
    """Return memory and tokens/s of the runs with both; memory of the first kind that most have."""
    kind = max(kinds, key=lambda k: sum(one.figures.memory[k] is not None for one in runs))
    return {
        name: [
            (memory, f"{shown(memory, 'bytes')} {MEMORY_KINDS[kind]}"),
            (rate, f"{shown(rate, 'rate')} tokens/s"),
        ]
        for name, (memory, rate) in pareto_points(runs, kind).items()
    }


def _goal(
    goal: str, table: Mapping[str, Sequence[Reached]], *, by: int, sign: int
) -> dict[str, Any]:
    """Find the winners by figure `by`: every run whose figure reads like the best one's.

    `text` is `zero2 (11.7 MiB resident set, 5,391 tokens/s)`: the figures that all winners share.
    """
    order = sorted(table, key=lambda name: sign * table[name][by][0])
    tied = [name for name in order if table[name][by][1] == table[order[0]][by][1]]
    if not tied:
        return {"goal": goal, "runs": [], "winners": "\u2013", "figures": NONE, "text": NONE}
    shared = [
        figures[0][1]
        for figures in zip(*(table[name] for name in tied), strict=True)
        if len({text for _, text in figures}) == 1
    ]
    more = len(tied) - MOST_NAMED
    winners = ", ".join(tied[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    figures = ("a tie: " if len(tied) > 1 else "") + ", ".join(shared)
    text = f"{winners} ({figures})"
    return {"goal": goal, "runs": tied, "winners": winners, "figures": figures, "text": text}
