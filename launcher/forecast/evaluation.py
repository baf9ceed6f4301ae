"""Evaluation of candidates by forked workers, which prune what cannot be the best."""

import dataclasses
import operator
import traceback
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.forecast import LARGEST_BATCH, LARGEST_MODEL
from launcher.forecast.assess import Assessment, assess
from launcher.forecast.bounds import (
    activations_key,
    may_fit,
    most_recomputed,
    most_tokens_per_s,
    traced_tokens_per_s,
)
from launcher.forecast.candidates import Choice
from launcher.forecast.cluster import Cluster
from launcher.forecast.forked import count_one, in_workers
from launcher.forecast.order import VERDICTS, Simplicity, outdone, simplicity
from launcher.forecast.prediction_cache import PredictionCache, remove_oldest_files
from launcher.forecast.timing import rated_type
from launcher.forecast.work import import_for_recording
from launcher.strategies import strategy_of, variant_of
from launcher.util.errors import one_line

_BY_SPEED: Final = ("fastest", LARGEST_MODEL)
"""Goals under which a candidate that is slower than another one that fits cannot be the best."""
_LONGEST_REASON: Final = 120
HOST_MEMORY_BYTES: Final = 2 * 2**40
"""Host memory of a DGX H100, taken as the upper bound per node: with unlimited offload every model
would "fit"."""
_PACKAGE: Final = str(Path(__file__).parents[1])
Progress = Callable[[int, int], None]
"""Called with the number of evaluated candidates and the number of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """Goal of a search, and the machine to search for."""

    cluster: Cluster
    goal: str
    evaluate_all: bool
    """Evaluate all candidates instead of the best per strategy."""
    best_only: bool = False
    """Prune whatever cannot be the best of all, instead of the best per strategy."""
    any_fit: bool = False
    """With `best_only`: end with the first that fits."""

    @property
    def prunes(self) -> bool:
        """Return whether slow candidates may be skipped."""
        return not self.evaluate_all and self.goal in _BY_SPEED


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """A candidate that raised an error, through a fault of the planner."""

    choice: Choice
    reason: str
    """The error, and the innermost line of ours that it came through."""

    @classmethod
    def by(cls, error: Exception, choice: Choice) -> "Failed":
        """Keep what a report of the fault needs."""
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename.startswith(_PACKAGE)]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        text = f"{type(error).__name__}: {str(error).strip()} ({where})"
        return cls(choice=choice, reason=one_line(text, _LONGEST_REASON))


def evaluate(
    candidates: Sequence[Choice], search: Search, progress: Progress
) -> tuple[list[Assessment], list[Failed]]:
    """Evaluate candidates on all cores, less those that are pruned.

    Raises:
        UserError: the machine has no rate for a precision.
    """
    for choice in candidates:
        rated_type(choice.runs[0], search.cluster.machine)  # refuses now instead of in a minute
    groups = _groups(candidates, search)
    if any(PredictionCache(group[0].runs[0], search.cluster).is_empty for group in groups):
        import_for_recording([run for choice in candidates for run in choice.runs])
    # The longest first, so that no core is left with it at the end.
    tasks = [(group, search) for group in sorted(groups, key=len, reverse=True)]
    results = in_workers(_evaluate_group, tasks, lambda done: progress(done, len(candidates)))
    remove_oldest_files()
    return [a for each, _ in results for a in each], [f for _, each in results for f in each]


def _groups(candidates: Sequence[Choice], search: Search) -> list[list[Choice]]:
    """Candidates that share recorded traces, to be evaluated by one worker.

    When pruning, all candidates that are compared belong to one group: those of one label, or all
    where only the best is asked for.
    """
    if search.best_only:
        return [list(candidates)]
    traces = [_trace_kind(choice) for choice in candidates]
    keys: list[Hashable] = [*traces]
    if search.prunes:
        of_label: dict[str, set[Hashable]] = defaultdict(set)
        for choice, kind in zip(candidates, traces, strict=True):
            of_label[choice.label].add(kind)
        # labels with the same kinds of traces share a worker, which then records each once
        keys = [frozenset(of_label[choice.label]) for choice in candidates]
    groups: dict[Hashable, list[Choice]] = defaultdict(list)
    for choice, key in zip(candidates, keys, strict=True):
        groups[key].append(choice)
    return list(groups.values())


def _trace_kind(choice: Choice) -> Hashable:
    """Equal for candidates whose decoder computes alike on one rank."""
    config = choice.runs[0].config
    types, sharding = strategy_of(config).dtypes(config), config.sharding
    return (
        *(choice.precision, choice.checkpointing),
        types.autocast is None
        and config.optim.arithmetic.computed != "fp32",  # low-precision copies
        variant_of(config).fetches_by_module,
        *sharding.model_parallel.values(),
    )


def _evaluate_group(
    group: Sequence[Choice], search: Search
) -> tuple[list[Assessment], list[Failed]]:
    evaluation = _GroupEvaluation(group, search)
    for bound, choice in _fastest_first(group, search):
        if search.best_only and (
            evaluation.is_too_large(choice) or not may_fit(choice, search.cluster)
        ):
            pass  # leaves no result: it cannot be the best
        elif not search.prunes or (
            evaluation.is_wanted(choice, bound) and evaluation.is_wanted_as_traced(choice)
        ):
            evaluation.add(choice)
            if search.any_fit and any_fits(evaluation.assessed, search.cluster):
                break
        count_one()
    return evaluation.assessed, evaluation.failed


def any_fits(assessed: Sequence[Assessment], cluster: Cluster) -> bool:
    """Return whether a candidate fits, in the host memory of a node, too."""
    return any(a.verdict == "fits" and not exceeds_host_memory(a, cluster) for a in assessed)


def exceeds_host_memory(a: Assessment, cluster: Cluster) -> bool:
    """Return whether the ranks of a node need more host memory than a node has."""
    return cluster.ranks_per_node * a.prediction.host_bytes > HOST_MEMORY_BYTES


class _GroupEvaluation:
    """Results of one group, and what they say about its other candidates."""

    def __init__(self, group: Sequence[Choice], search: Search) -> None:
        self._search = search
        self.assessed: list[Assessment] = []
        self.failed: list[Failed] = []
        self._added: set[int] = set()
        self._fitting: dict[str, list[tuple[float, Simplicity]]] = defaultdict(list)
        of_key: dict[tuple[str, str], list[Choice]] = defaultdict(list)
        for choice in group:
            of_key[choice.label, choice.precision].append(choice)
        modes = {key: most_recomputed(each) for key, each in of_key.items()}
        self._leanest = {
            key: next(choice for choice in each if choice.checkpointing == modes[key])
            for key, each in of_key.items()
        }
        self._largest: dict[tuple[str, str], int] = {}
        """(precision, checkpointing) -> largest micro-batch of the latest candidate with it."""
        self._nothing_fits: set[tuple[str, str]] = set()
        self._doubtful = False
        self._too_large: list[Choice] = []
        """Candidates whose micro-batch alone takes more than the memory."""

    def is_wanted(self, choice: Choice, most_tokens_per_s: float) -> bool:
        """Return whether a candidate may still be the best; evaluate the leanest one to know."""
        cluster, key = self._search.cluster, (choice.label, choice.precision)
        fitting = self._fitting[self._rivals(choice)]
        if outdone(most_tokens_per_s, simplicity(choice.runs[0].config), fitting):
            return False
        if not fitting and (self._doubtful or not may_fit(choice, cluster)):
            # Where others did not fit, most recomputation comes first: if even that does not fit,
            # milder ones need not be recorded.
            leanest = self._leanest[key]
            if id(leanest) not in self._added:
                self.add(leanest)
        return key not in self._nothing_fits and id(choice) not in self._added

    def is_wanted_as_traced(self, choice: Choice) -> bool:
        """Return the same by the bound that needs a trace, which none is recorded for in vain."""
        if not self._fitting[self._rivals(choice)]:
            return True
        return self.is_wanted(choice, traced_tokens_per_s(choice, self._search.cluster))

    def add(self, choice: Choice) -> None:
        """Evaluate a candidate and keep its result."""
        self._added.add(id(choice))
        try:
            a = assess(
                choice,
                self._search.cluster,
                largest=self._search.goal == LARGEST_BATCH,
                expected=self._expected(choice),
            )
        except Exception as error:  # the other candidates are still worth an answer
            self.failed.append(Failed.by(error, choice))
            return
        if a.largest_micro_batch is not None:
            # Activations dominate, which are alike for all strategies of a group.
            self._largest[choice.precision, choice.checkpointing] = a.largest_micro_batch
        if a.verdict == "fits":
            merit = a.merit
            self._fitting[self._rivals(choice)].append((merit.tokens_per_s, merit.simplicity))
        elif a.verdict == VERDICTS[-1]:
            self._doubtful = True
            if a.prediction.micro_batch_bytes > a.memory_bytes:
                self._too_large.append(choice)
            if choice is self._leanest[choice.label, choice.precision]:
                self._nothing_fits.add((choice.label, choice.precision))
        # Events are long to send, and no longer needed.
        prediction = dataclasses.replace(a.prediction, events=(), streams={})
        self.assessed.append(dataclasses.replace(a, prediction=prediction))

    def _expected(self, choice: Choice) -> int:
        """Return the largest micro-batch that a similar candidate had; 0 after failures, and the
        smallest before anything is known, since one that does not fit may end the search."""
        known = self._largest.get((choice.precision, choice.checkpointing))
        return known or (0 if self._doubtful else 1)

    def is_too_large(self, choice: Choice) -> bool:
        """Return whether the micro-batch of one that has no more activations is too large."""
        own = activations_key(choice)
        return any(
            known.checkpointing == choice.checkpointing
            and all(map(operator.le, activations_key(known), own))
            for known in self._too_large
        )

    def _rivals(self, choice: Choice) -> str:
        return "" if self._search.best_only else choice.label


def _fastest_first(group: Sequence[Choice], search: Search) -> list[tuple[float, Choice]]:
    """Pairs of (upper bound of tokens per second, candidate)."""
    if not search.prunes and not search.best_only:
        return [(0.0, choice) for choice in group]
    bounds = [most_tokens_per_s(choice, search.cluster) for choice in group]

    def first(pair: tuple[float, Choice]) -> tuple[float, ...]:
        # Where nothing may fit, what has the fewest activations says so first.
        return (*(activations_key(pair[1]) if search.best_only else ()), -pair[0])

    return sorted(zip(bounds, group, strict=True), key=first)
