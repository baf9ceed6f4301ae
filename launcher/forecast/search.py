"""Evaluate candidate configurations in parallel and rank them."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.config.schema import RunConfig
from launcher.forecast import LARGEST_BATCH, LARGEST_MODEL
from launcher.forecast.assess import Assessment
from launcher.forecast.bounds import most_recomputed
from launcher.forecast.candidates import Choice
from launcher.forecast.cluster import choices_on
from launcher.forecast.evaluation import (
    Failed,
    Progress,
    Search,
    any_fits,
    evaluate,
    exceeds_host_memory,
)
from launcher.forecast.order import VERDICTS, best_first
from launcher.forecast.predict import by_category
from launcher.model.sizes import NAMED
from launcher.util.errors import Failure, UserError

ADAPTER_RANK: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """Ranked candidates."""

    best_first: list[Assessment]
    choices: int
    """Number of candidates, pruned ones included."""
    adapters: Assessment | None = None
    """The best candidate that trains adapters only, where nothing else fits."""
    failed: Sequence[Failed] = ()


def plan(config: RunConfig, fixed: set[str], search: Search, *, progress: Progress) -> SearchResult:
    """Rank all candidates of a config, best first.

    Args:
        fixed: fields that keep the config's value.

    Raises:
        UserError: no candidate is valid.
        Failure: none could be evaluated.
    """
    largest = search.goal == LARGEST_MODEL
    until_one_fits = dataclasses.replace(search, any_fit=True)
    for model, candidates in _models(config, fixed, search):  # noqa: B007  # read below
        leanest = _evaluate_leanest(candidates, until_one_fits, progress) if largest else []
        if largest and not any_fits(leanest, search.cluster):
            continue
        assessed, failed = evaluate(candidates, search, progress)
        if not largest or any_fits(assessed, search.cluster):
            break
    else:  # the smallest one shows what is missing
        assessed, failed = evaluate(candidates, search, progress)
    if not assessed:
        raise Failure(
            f"the planner failed on all {len(failed)} choices, on the first with "
            f"{failed[0].reason}: this is a bug, please report it with the command"
        )
    fits = any(a.verdict != VERDICTS[-1] for a in assessed)
    return SearchResult(
        best_first=ranked(assessed, search),
        choices=len(candidates),
        adapters=None
        if fits or not any(map(_adapters_may_fit, assessed))
        else _with_adapters(model, fixed, search, progress),
        failed=failed,
    )


def _models(
    config: RunConfig, fixed: set[str], search: Search
) -> Iterator[tuple[RunConfig, list[Choice]]]:
    """Yield the model, or every named size from the largest on, with the candidates that the given
    flags allow it.

    Raises:
        UserError: they allow no candidate of any.
    """
    models = [config]
    if search.goal == LARGEST_MODEL:
        names = sorted(NAMED, key=lambda name: -NAMED[name].parameter_count)
        models = [config.replace(model=name) for name in names]
    refused: list[UserError] = []
    for model in models:
        try:
            candidates = choices_on(search.cluster, model, fixed | {"model"})
        except UserError as error:  # such as heads that a cut does not divide
            refused.append(error)
            if len(refused) == len(models):
                raise refused[0] from None  # the smallest may lack more than was asked about
        else:
            yield model, candidates


def _adapters_may_fit(a: Assessment) -> bool:
    """Return whether less of weights, gradients and states may be enough: frozen weights leave
    activations and temporary tensors about as large. Twice as much is beyond doubt."""
    device = by_category(a.prediction.peak)
    return device["activations"] + device["temporary"] < 2 * a.memory_bytes


def _with_adapters(
    config: RunConfig, fixed: set[str], search: Search, progress: Progress
) -> Assessment | None:
    """Best candidate with frozen weights, or else with weights in 4 bits, that trains adapters."""
    if config.model.lora_rank is not None:
        return None
    for quantized in ("none", "nf4"):
        changed = config.replace(lora_rank=ADAPTER_RANK, quantize_base=quantized)
        with contextlib.suppress(UserError):  # adapters do not go with another flag
            candidates = choices_on(search.cluster, changed, fixed | {"model", "quantize_base"})
            # Frozen weights are kept in the precision that computes.
            low = [choice for choice in candidates if choice.precision != "fp32"]
            best = ranked(_evaluate_leanest(low or candidates, search, progress), search)[:1]
            if best and best[0].verdict != VERDICTS[-1]:
                return best[0]
    return None


def _evaluate_leanest(
    candidates: Sequence[Choice], search: Search, progress: Progress
) -> list[Assessment]:
    """Evaluate what shows if anything fits at all: those with most recomputation, at their smallest
    micro-batch."""
    most = most_recomputed(candidates)
    leanest = [
        dataclasses.replace(choice, runs=choice.runs[:1], unbounded=None)
        for choice in candidates
        if choice.checkpointing == most
    ]
    assessed, _ = evaluate(leanest, dataclasses.replace(search, best_only=True), progress)
    return assessed


def ranked(assessments: Sequence[Assessment], search: Search) -> list[Assessment]:
    """Sort best first: by the goal, and where it ties as in `launcher.forecast.order`."""
    by_goal: dict[str, Callable[[Assessment], int]] = {
        "least-memory": lambda a: a.used_bytes,
        LARGEST_BATCH: lambda a: -(a.largest_micro_batch or 0),
    }
    wanted = by_goal.get(search.goal, lambda a: 0)

    def key(a: Assessment) -> tuple[int, ...]:
        fits = a.verdict != VERDICTS[-1]
        crowded = search.goal == LARGEST_MODEL and exceeds_host_memory(a, search.cluster)
        return (crowded or not fits, VERDICTS.index(a.verdict), wanted(a) if fits else 0)

    numbers = best_first([a.merit for a in assessments])
    return sorted((assessments[number] for number in numbers), key=key)
