"""The search: every choice that can still be the best of its way of sharding, on all cores."""

import contextlib
import dataclasses
import gc
import math
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from launcher.config.schema import RunConfig
from launcher.forecast.answers import forget_oldest
from launcher.forecast.assess import Assessment, Place, assess, tokens_per_s
from launcher.forecast.candidates import CHECKPOINTING, PRECISIONS, Choice, choices
from launcher.forecast.failures import Failed, Outcome, all_failed
from launcher.forecast.machine import Machine
from launcher.forecast.order import VERDICTS, Simplicity, best_first, outdone, simplicity
from launcher.forecast.predict import states_bytes
from launcher.forecast.timing import rated_type
from launcher.model.sizes import NAMED
from launcher.strategies import strategy_of, variant_of
from launcher.util.command import deaf_children
from launcher.util.cores import usable_cores
from launcher.util.errors import Failure, UserError
from launcher.util.orphans import die_with

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

LARGEST_BATCH: Final = "largest-batch"
LARGEST_MODEL: Final = "largest-model"
HOST_BYTES: Final = 2 * 2**40
"""Host memory of a DGX H100, the most per node: with unlimited offload every model would fit."""
GOALS: Final = ("fastest", "least-memory", LARGEST_BATCH, LARGEST_MODEL)
ADAPTER_RANK: Final = 8
_BY_SPEED: Final = ("fastest", LARGEST_MODEL)
"""What is slower than another that fits cannot be the best then."""
_done: "Synchronized[int]"
"""In a process of the pool: how many choices all of them are through with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search has come to."""

    best_first: list[Assessment]
    choices: int
    """How many there were, with those that were not assessed."""
    adapters: Assessment | None = None
    """Where nothing fits: what would, if adapters alone were trained."""
    failed: Sequence[Failed] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """What is looked for, and where."""

    place: Place
    goal: str
    every: bool
    """Whether all choices are wanted, and not only the best of each way of sharding."""

    @property
    def prunes(self) -> bool:
        """Whether a choice may be left out for being slow."""
        return not self.every and self.goal in _BY_SPEED


def plan(
    config: RunConfig,
    fixed: set[str],
    search: Search,
    *,
    progress: Callable[[int, int], None],
) -> Found:
    """The choices, best first.

    Raises:
        UserError: no choice is valid.
        Failure: not one could be assessed.
    """
    models = [config]
    if search.goal == LARGEST_MODEL:
        names = sorted(NAMED, key=lambda name: -NAMED[name].parameter_count)
        models = [config.replace(model=name) for name in names]
    for candidate in models:
        candidates = _choices(candidate, fixed | {"model"}, search.place)
        last = candidate is models[-1]
        if not last:
            least = [c for c in _leanest(candidates) if _states_fit(c, search.place)]
            if not least or not _any_fits(assess_all(least, search, progress), search.place):
                continue
        outcome = assess_all(candidates, search, progress)
        if last or _any_fits(outcome, search.place):
            break
    if not outcome.assessed:
        raise Failure(all_failed(outcome.failed))
    fits = any(a.verdict != "does not fit" for a in outcome.assessed)
    return Found(
        best_first=ranked(outcome.assessed, search),
        choices=len(candidates),
        adapters=None if fits else _with_adapters(candidate, fixed, search, progress),
        failed=outcome.failed,
    )


def _with_adapters(
    config: RunConfig, fixed: set[str], search: Search, progress: Callable[[int, int], None]
) -> Assessment | None:
    """What fits if weights are frozen, or else are kept in 4 bits, and adapters are trained."""
    if config.model.lora_rank is not None:
        return None
    for quantized in ("none", "nf4"):
        changed = config.replace(lora_rank=ADAPTER_RANK, quantize_base=quantized)
        with contextlib.suppress(UserError):  # something else that is asked for is in the way
            candidates = _choices(changed, fixed | {"model", "quantize_base"}, search.place)
            outcome = assess_all(_leanest(candidates), search, progress)
            if any(a.verdict != VERDICTS[-1] for a in outcome.assessed):
                return ranked(outcome.assessed, search)[0]
    return None


def _choices(config: RunConfig, fixed: set[str], place: Place) -> list[Choice]:
    return choices(
        config,
        fixed,
        world_size=place.world_size,
        ranks_per_node=place.ranks_per_node,
        device_type=place.machine.device,
        precisions=_precisions(place.machine),
    )


def _precisions(machine: Machine) -> list[str]:
    """What is tried: fp16 only where there is no bf16, since it may skip steps."""
    rated = machine.matmul_flops_per_s
    known = [precision for precision in PRECISIONS if precision in rated]
    return ["fp16", *known] if "fp16" in rated and "bf16" not in rated else known


def _leanest(candidates: Sequence[Choice]) -> list[Choice]:
    """Those that need least, at their smallest micro-batch."""
    least = _most_recomputed(candidates)
    return [
        dataclasses.replace(choice, runs=choice.runs[:1], unbounded=None)
        for choice in candidates
        if choice.checkpointing == least
    ]


def _most_recomputed(candidates: Sequence[Choice]) -> str:
    """The mode of checkpointing that needs least."""
    modes = {choice.checkpointing for choice in candidates}
    return max(modes, key=(*CHECKPOINTING, *modes).index)


def _any_fits(outcome: Outcome, place: Place) -> bool:
    return any(a.verdict == "fits" and not _crowds_host(a, place) for a in outcome.assessed)


def _crowds_host(a: Assessment, place: Place) -> bool:
    return place.ranks_per_node * a.prediction.host_bytes > HOST_BYTES


def assess_all(
    candidates: Sequence[Choice], search: Search, progress: Callable[[int, int], None]
) -> Outcome:
    """All that count, on all cores; what has traces in common stays on one core.

    `progress` is told how many are done, of how many.

    Raises:
        UserError: the machine has no rate for a precision.
    """
    groups: dict[tuple[object, ...], list[Choice]] = {}
    for choice in candidates:
        rated_type(choice.runs[0], search.place.machine)  # rather than refused after a minute
        groups.setdefault(_kind(choice, search), []).append(choice)
    # The longest first, so that no core is left with it at the end.
    tasks = [(group, search) for group in sorted(groups.values(), key=len, reverse=True)]
    workers = min(len(groups), usable_cores())
    context = multiprocessing.get_context("fork")  # so that nothing is imported again
    done = context.Value("i", 0)
    with deaf_children():
        started = context.Pool(workers, _start_worker, (done, os.getpid()))
    with started as pool:
        result = pool.starmap_async(_assess_group, tasks, chunksize=1)
        while not result.ready():
            progress(done.value, len(candidates))
            result.wait(0.2)
    forget_oldest()
    return Outcome.of_all(result.get())


def _kind(choice: Choice, search: Search) -> tuple[object, ...]:
    """Choices of one kind have traces in common. Where the slower ones of a way of sharding may be
    left out, all of them are of one kind."""
    config = choice.runs[0].config
    types, sharding = strategy_of(config).dtypes(config), config.sharding
    copies = types.autocast is None and config.optim.precision != "fp32"
    kind = (
        variant_of(config).fetches_by_module,
        sharding.context_parallel,
        sharding.tensor_parallel,
    )
    if search.prunes:
        return (strategy_of(config).name, *kind)
    return (choice.precision, choice.checkpointing, copies, *kind)


def _start_worker(done: "Synchronized[int]", parent: int) -> None:
    global _done
    _done = done
    die_with(parent)


def _assess_group(group: Sequence[Choice], search: Search) -> Outcome:
    torch.set_num_threads(1)
    gc.disable()  # which would walk over millions of events again and again; this process is short
    found = Outcome(assessed=[], failed=[])
    fitting: dict[str, list[tuple[float, Simplicity]]] = {}
    in_vain = _in_vain(group, search.place) if search.prunes else []
    for bound, choice in _fastest_first(group, search):
        alike = fitting.setdefault(choice.label, [])
        slow = search.prunes and outdone(bound, simplicity(choice.runs[0].config), alike)
        if not slow and choice not in in_vain:
            try:
                a = assess(choice, search.place, largest=search.goal == LARGEST_BATCH)
            except Exception as error:  # the other choices are still worth an answer
                found.failed.append(Failed.by(error, choice))
            else:
                if a.verdict == "fits":
                    alike.append((a.time.tokens_per_s, a.merit.simplicity))
                # The events have served; they are long to send.
                prediction = dataclasses.replace(a.prediction, events=(), streams={})
                found.assessed.append(dataclasses.replace(a, prediction=prediction))
        with _done.get_lock():
            _done.value += 1
    return found


def _in_vain(group: Sequence[Choice], place: Place) -> list[Choice]:
    """Those whose weights and states alone are more than the memory, which checkpointing changes
    nothing about; but for the one that needs least, for what it says."""
    alike: dict[tuple[str, str], list[Choice]] = {}
    for choice in group:
        alike.setdefault((choice.label, choice.precision), []).append(choice)
    found: list[Choice] = []
    for modes in alike.values():
        if not _states_fit(modes[0], place):
            least = _most_recomputed(modes)
            found += [choice for choice in modes if choice.checkpointing != least]
    return found


def _states_fit(choice: Choice, place: Place) -> bool:
    """Whether weights and the optimizer's states leave anything."""
    run, device_type = choice.runs[0], place.machine.device
    try:
        size_bytes = states_bytes(run, world_size=place.world_size, device_type=device_type)
    except Exception:  # as assessing it will, which keeps the reason
        return True
    return place.fixed_bytes + size_bytes <= place.memory_bytes


def _fastest_first(group: Sequence[Choice], search: Search) -> list[tuple[float, Choice]]:
    """(tokens per second that a choice has at most, the choice)."""
    if not search.prunes:
        return [(0.0, choice) for choice in group]
    bounds = [_most_tokens_per_s(choice, search.place) for choice in group]
    return sorted(zip(bounds, group, strict=True), key=lambda pair: -pair[0])


def _most_tokens_per_s(choice: Choice, place: Place) -> float:
    try:
        return max(tokens_per_s(run, place) for run in choice.runs)
    except Exception:  # as assessing it will, which keeps the reason
        return math.inf


def ranked(assessments: Sequence[Assessment], search: Search) -> list[Assessment]:
    """Best first: by the goal, and where that says nothing as in `launcher.forecast.order`."""
    by_goal: dict[str, Callable[[Assessment], int]] = {
        "least-memory": lambda a: a.used_bytes,
        LARGEST_BATCH: lambda a: -(a.largest_micro_batch or 0),
    }
    wanted = by_goal.get(search.goal, lambda a: 0)

    def key(a: Assessment) -> tuple[int, ...]:
        if a.verdict == VERDICTS[-1]:
            return (True, VERDICTS.index(a.verdict))
        crowded = search.goal == LARGEST_MODEL and _crowds_host(a, search.place)
        return (crowded, VERDICTS.index(a.verdict), wanted(a))

    numbers = best_first([a.merit for a in assessments])
    return sorted((assessments[number] for number in numbers), key=key)
