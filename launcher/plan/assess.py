"""Does it fit, by how much, and how fast: one run on one machine."""

import bisect
import dataclasses
import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.cores import usable_cores
from launcher.measure.hardware import find_gpu
from launcher.memory.ledger import Ledger
from launcher.model.sizes import NAMED
from launcher.orphans import die_with
from launcher.plan.calibration import Calibration
from launcher.plan.candidates import PRECISIONS, Choice, choices
from launcher.plan.fit import Verdict, replayed, reserved_bytes, verdict
from launcher.plan.machine import Machine
from launcher.plan.predict import Prediction, by_category, predict
from launcher.plan.timing import StepTime, rated_type, step_seconds
from launcher.strategies import variant_of

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized
CLEARLY_FITS: Final = 0.75
"""Share of the memory up to which live bytes fit whatever an allocator makes of them."""
_done: "Synchronized[int]"
"""In a process of the pool: how many choices all of them have assessed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where it would run."""

    machine: Machine
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    """Of each device."""
    calibration: Calibration | None = None
    """Corrections of times learnt from finished runs on such machines."""
    fixed_bytes: int
    """What a process takes of it beside tensors: context, NCCL, what kernels take for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """One choice at one micro-batch."""

    choice: Choice
    run: Resolved
    prediction: Prediction
    used_bytes: int
    """Of the device, at the highest moment: what the allocator reserves, context, NCCL."""
    with_room_bytes: int
    """What it would use of a device with room for all that the allocator likes to keep."""
    memory_bytes: int
    time: StepTime
    largest_micro_batch: int | None
    """The largest that fits; None when not even the smallest does."""

    @property
    def verdict(self) -> Verdict:
        """Whether it would run."""
        return verdict(self.used_bytes, self.memory_bytes)

    @property
    def margin_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.memory_bytes - self.used_bytes

    @property
    def why_not(self) -> str:
        """Where it is highest and what takes most there."""
        (period, phase), _ = max(self.prediction.peaks.items(), key=lambda item: item[1])
        lines = by_category(self.highest)
        name, size_bytes = max(lines.items(), key=lambda item: item[1])
        share = size_bytes / max(1, sum(lines.values()))
        when = {"steady": "later steps"}.get(period, period.replace("_", " "))
        return f"{phase} of {when}: {share:.0%} is {name}"

    @property
    def highest(self) -> Ledger:
        """The ledger of the highest moment."""
        first, later = self.prediction.first_step, self.prediction.peak
        used = [ledger.device.used_bytes or 0 for ledger in (first, later)]
        return first if used[0] > used[1] else later


def plan(
    config: RunConfig,
    fixed: set[str],
    place: Place,
    *,
    goal: str,
    progress: Callable[[int, int], None],
) -> list[Assessment]:
    """Every choice, best first.

    Raises:
        UserError: no choice is valid.
    """
    models = [config]
    if goal == "largest-model":
        names = sorted(NAMED, key=lambda name: -NAMED[name].parameter_count)
        models = [config.replace(model=name) for name in names]
    for candidate in models:
        seen = fixed | {"model"}
        found = assess_all(
            choices(
                candidate,
                seen,
                world_size=place.world_size,
                ranks_per_node=place.ranks_per_node,
                device_type=place.machine.device,
                precisions=[p for p in PRECISIONS if p in place.machine.matmul_flops_per_s],
            ),
            place,
            progress,
        )
        if any(a.verdict == "fits" for a in found):
            break
    return ranked(found, goal)


def assess_all(
    candidates: Sequence[Choice], place: Place, progress: Callable[[int, int], None]
) -> list[Assessment]:
    """All of them, on all cores; what has one trace in common stays on one core.

    `progress` is told how many are done, of how many.

    Raises:
        UserError: the machine has no rate for a precision.
    """
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in candidates:
        rated_type(choice.runs[0], place.machine)  # rather than refused after a minute
        groups.setdefault((choice.precision, choice.checkpointing), []).append(choice)
    workers = min(len(groups), usable_cores())
    context = multiprocessing.get_context("fork")  # so that nothing is imported again
    done = context.Value("i", 0)
    with context.Pool(workers, _start_worker, (done, os.getpid())) as pool:
        tasks = [(group, place) for group in groups.values()]
        result = pool.starmap_async(_assess_group, tasks, chunksize=1)
        while not result.ready():
            progress(done.value, len(candidates))
            result.wait(0.2)
    return [assessment for group in result.get() for assessment in group]


def _start_worker(done: "Synchronized[int]", parent: int) -> None:
    global _done
    _done = done
    die_with(parent)


def _assess_group(group: Sequence[Choice], place: Place) -> list[Assessment]:
    torch.set_num_threads(1)
    gc.disable()  # which would walk over millions of events again and again; this process is short
    found = []
    for choice in group:
        a = assess(choice, place)
        # The events have served; they are long to send.
        prediction = dataclasses.replace(a.prediction, events=[], streams={})
        found.append(dataclasses.replace(a, prediction=prediction))
        with _done.get_lock():
            _done.value += 1
    return found


def assess(choice: Choice, place: Place) -> Assessment:
    """The fastest micro-batch of a choice that fits; the smallest one where none does."""
    known: dict[int, Assessment] = {}

    def at(index: int) -> Assessment:
        if index not in known:
            known[index] = _assess_run(choice, choice.runs[index], place)
        return known[index]

    # Larger micro-batches need more, so the largest that fits is found by halving.
    runs = range(len(choice.runs))
    largest = bisect.bisect_left(runs, True, key=lambda i: at(i).verdict == "does not fit") - 1
    if largest < 0:
        return _replayed(at(0), place)
    safe = bisect.bisect_left(runs, True, key=lambda i: at(i).verdict != "fits") - 1
    speeds = [_time(run, place).tokens_per_s for run in choice.runs[: max(safe, 0) + 1]]
    best = at(max(range(len(speeds)), key=speeds.__getitem__))
    return dataclasses.replace(
        _replayed(best, place),
        largest_micro_batch=choice.runs[largest].config.data.micro_batch,
    )


def _assess_run(choice: Choice, run: Resolved, place: Place) -> Assessment:
    """One choice at one micro-batch: enough to say whether it fits.

    Live bytes stand in for reserved ones where it clearly fits with them: replaying takes as long
    as predicting.
    """
    on_gpu = place.machine.device == "cuda"
    prediction = predict(
        run,
        world_size=place.world_size,
        device_type=place.machine.device,
        gpu=find_gpu(place.machine.name) if on_gpu else None,
    )
    used = prediction.peak_bytes
    if on_gpu:
        limit = place.memory_bytes - place.fixed_bytes
        used = place.fixed_bytes + prediction.peak_bytes
        if used > CLEARLY_FITS * place.memory_bytes:
            used = place.fixed_bytes + reserved_bytes(
                prediction,
                limit_bytes=limit,
                expandable_segments=run.config.loop.expandable_segments,
            )
    return Assessment(
        choice=choice,
        run=run,
        prediction=prediction,
        used_bytes=used,
        with_room_bytes=used,
        memory_bytes=place.memory_bytes,
        time=_time(run, place),
        largest_micro_batch=None,
    )


def _replayed(a: Assessment, place: Place) -> Assessment:
    """The same with what the allocator really holds: within the memory there is, and with room."""
    limit = place.memory_bytes - place.fixed_bytes
    if place.machine.device == "cpu" or a.prediction.peak_bytes > limit:
        return a  # there is no allocator, or nothing that it could do
    segments = a.run.config.loop.expandable_segments
    use = within = replayed(a.prediction, limit_bytes=limit, expandable_segments=segments)
    if within.retries:
        use = replayed(a.prediction, limit_bytes=None, expandable_segments=segments)
    held = use if within.out_of_memory else within
    return dataclasses.replace(
        a,
        used_bytes=held.peak_reserved_bytes + place.fixed_bytes,
        with_room_bytes=use.peak_reserved_bytes + place.fixed_bytes,
    )


def _time(run: Resolved, place: Place) -> StepTime:
    time = step_seconds(
        run,
        world_size=place.world_size,
        gpus_per_node=place.ranks_per_node,
        machine=place.machine,
    )
    ratio = place.calibration and place.calibration.time_ratio(
        place.machine.name, run.config.optim.precision, variant_of(run.config).label
    )
    if not ratio:
        return time
    phases = ("forward_s", "backward_s", "step_s")
    return dataclasses.replace(time, **{name: ratio * getattr(time, name) for name in phases})


def ranked(assessments: Sequence[Assessment], goal: str) -> list[Assessment]:
    """Best first: what fits, then what is tight, then the rest by how much is missing."""
    order = {"fits": 0, "tight": 1, "does not fit": 2}

    def key(a: Assessment) -> tuple[float, ...]:
        if a.verdict == "does not fit":
            return (order[a.verdict], a.used_bytes)
        by_goal = {
            "fastest": (-a.time.tokens_per_s, a.used_bytes),
            "least-memory": (a.used_bytes, -a.time.tokens_per_s),
            "largest-batch": (-(a.largest_micro_batch or 0), -a.time.tokens_per_s),
            "largest-model": (-a.time.tokens_per_s, a.used_bytes),
        }
        return (order[a.verdict], *by_goal[goal])

    return sorted(assessments, key=key)
