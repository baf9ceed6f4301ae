"""Does it fit, by how much, and how fast: one run on one machine."""

import bisect
import dataclasses
import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from launcher.measure.records import Ledger
from launcher.orphans import die_with
from launcher.plan.allocator import replay
from launcher.plan.calibration import Calibration
from launcher.plan.candidates import Choice
from launcher.plan.hardware import CONTEXT_BYTES, NCCL_GROUP_BYTES, find_gpu
from launcher.plan.machine import Machine
from launcher.plan.predict import Prediction, predict
from launcher.plan.timing import StepTime, step_seconds
from launcher.resolve import Resolved

Verdict = Literal["fits", "tight", "does not fit"]

TIGHT_FROM: Final = 0.95
"""Share of the memory above which a prediction that is a few percent off would not fit."""
CLEARLY_FITS: Final = 0.75
"""Share of the memory up to which live bytes fit whatever an allocator makes of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where it would run."""

    machine: Machine
    world_size: int
    ranks_per_node: int
    memory_bytes: int
    """Of each device."""
    calibration: Calibration | None = None
    """What runs on such machines have taught about times."""
    fixed_bytes: int
    """What a process takes of it before the first tensor: context, NCCL, workspaces."""

    @property
    def device_type(self) -> str:
        """`cuda` or `cpu`."""
        return self.machine.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """One choice at one micro-batch."""

    choice: Choice
    run: Resolved
    prediction: Prediction
    used_bytes: int
    """Of the device, at the highest moment: what the allocator reserves, context, NCCL."""
    reserved_bytes: int
    memory_bytes: int
    time: StepTime
    largest_micro_batch: int | None
    """The largest that fits; None when not even the smallest does."""

    @property
    def verdict(self) -> Verdict:
        """Whether it would run."""
        share = self.used_bytes / self.memory_bytes
        return "does not fit" if share > 1 else "tight" if share > TIGHT_FROM else "fits"

    @property
    def margin_bytes(self) -> int:
        """What is left; negative where it does not fit."""
        return self.memory_bytes - self.used_bytes

    @property
    def why_not(self) -> str:
        """Where it is highest and what takes most there."""
        (period, phase), _ = max(self.prediction.peaks.items(), key=lambda item: item[1])
        ledger = self.highest
        lines = Counter(
            {
                name.removesuffix("_bytes"): getattr(ledger.device, name) or 0
                for name in (
                    *("params_bytes", "master_bytes", "grads_bytes", "optimizer_bytes"),
                    *("buffers_bytes", "activations_bytes", "temporary_bytes"),
                )
            }
        )
        ((name, size_bytes),) = lines.most_common(1)
        share = size_bytes / max(1, sum(lines.values()))
        when = {"steady": "later steps"}.get(period, period.replace("_", " "))
        return f"{phase} of {when}: {share:.0%} is {name}"

    @property
    def highest(self) -> Ledger:
        """The ledger of the highest moment."""
        first, later = self.prediction.first_step, self.prediction.peak
        used = [ledger.device.used_bytes or 0 for ledger in (first, later)]
        return first if used[0] > used[1] else later


def fixed_bytes(machine: Machine, world_size: int) -> int:
    """Bytes of a GPU that no tensor accounts for; 0 on a CPU."""
    if machine.device == "cpu":
        return 0
    return CONTEXT_BYTES + (NCCL_GROUP_BYTES if world_size > 1 else 0)


def assess_all(choices: Sequence[Choice], place: Place) -> list[Assessment]:
    """All of them, on all cores; what has one trace in common stays on one core."""
    groups: dict[tuple[str, str], list[Choice]] = {}
    for choice in choices:
        groups.setdefault((choice.precision, choice.checkpointing), []).append(choice)
    workers = min(len(groups), len(os.sched_getaffinity(0)))
    # Forked, so that nothing is imported again.
    fork = multiprocessing.get_context("fork")
    with fork.Pool(workers, initializer=die_with, initargs=(os.getpid(),)) as pool:
        tasks = [(group, place) for group in groups.values()]
        found = pool.starmap(_assess_group, tasks, chunksize=1)
    return [assessment for group in found for assessment in group]


def _assess_group(group: Sequence[Choice], place: Place) -> list[Assessment]:
    torch.set_num_threads(1)
    gc.disable()  # which would walk over millions of events again and again; this process is short
    found = [assess(choice, place) for choice in group]
    # The events have served; they are long to send.
    return [
        dataclasses.replace(a, prediction=dataclasses.replace(a.prediction, events=[]))
        for a in found
    ]


def assess(choice: Choice, place: Place) -> Assessment:
    """The fastest micro-batch of a choice that fits; the smallest one where none does."""
    known: dict[int, Assessment] = {}

    def at(index: int) -> Assessment:
        if index not in known:
            known[index] = assess_run(choice, choice.runs[index], place, replayed=False)
        return known[index]

    # Larger micro-batches need more, so the largest that fits is found by halving.
    runs = range(len(choice.runs))
    largest = bisect.bisect_left(runs, True, key=lambda i: at(i).verdict == "does not fit") - 1
    if largest < 0:
        return at(0)
    safe = bisect.bisect_left(runs, True, key=lambda i: at(i).verdict != "fits") - 1
    speeds = [_time(run, place).tokens_per_s for run in choice.runs[: max(safe, 0) + 1]]
    best = at(max(range(len(speeds)), key=speeds.__getitem__))
    reserved = _reserved_bytes(best.prediction, place)
    return dataclasses.replace(
        best,
        reserved_bytes=reserved,
        used_bytes=reserved + place.fixed_bytes,
        largest_micro_batch=choice.runs[largest].config.data.micro_batch,
    )


def assess_run(choice: Choice, run: Resolved, place: Place, *, replayed: bool = True) -> Assessment:
    """One choice at one micro-batch.

    Without `replayed`, live bytes stand in for reserved ones where it clearly fits with them:
    replaying takes as long as predicting.
    """
    prediction = predict(run, world_size=place.world_size, device_type=place.device_type)
    reserved = _reserved_bytes(prediction, place, replayed=replayed)
    return Assessment(
        choice=choice,
        run=run,
        prediction=prediction,
        used_bytes=reserved + place.fixed_bytes,
        reserved_bytes=reserved,
        memory_bytes=place.memory_bytes,
        time=_time(run, place),
        largest_micro_batch=None,
    )


def gpu_name(machine: Machine) -> str:
    """The name by which constants of a GPU are learnt."""
    known = find_gpu(machine.name)
    return machine.name if known is None else known.name


def _time(run: Resolved, place: Place) -> StepTime:
    time = step_seconds(
        run,
        world_size=place.world_size,
        gpus_per_node=place.ranks_per_node,
        machine=place.machine,
    )
    ratio = place.calibration and place.calibration.time_ratio(
        gpu_name(place.machine), run.config.optim.precision, run.strategy_label
    )
    if not ratio:
        return time
    return dataclasses.replace(
        time,
        forward_s=ratio * time.forward_s,
        backward_s=ratio * time.backward_s,
        step_s=ratio * time.step_s,
    )


def _reserved_bytes(prediction: Prediction, place: Place, *, replayed: bool = True) -> int:
    """What the allocator holds at the highest moment; live bytes where even they do not fit."""
    live = prediction.peak_bytes
    if place.device_type == "cpu":
        return live
    gpu = find_gpu(place.machine.name)
    workspace = 0 if gpu is None else gpu.cublas_workspace_bytes
    share = (live + workspace + place.fixed_bytes) / place.memory_bytes
    if share > 1 or (share < CLEARLY_FITS and not replayed):
        return live + workspace
    limit = place.memory_bytes - place.fixed_bytes
    use = replay([(-1, workspace), *prediction.events], limit_bytes=limit)
    return limit + 1 if use.out_of_memory else use.peak_reserved_bytes


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
