"""Does it fit, by how much, and how fast: one run on one machine."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.forecast.answers import Answers
from launcher.forecast.calibration import Calibration
from launcher.forecast.candidates import Choice, run_of
from launcher.forecast.fit import TIGHT_FROM, Verdict, verdict, within
from launcher.forecast.machine import Machine
from launcher.forecast.order import Merit, simplicity
from launcher.forecast.predict import Prediction, by_category
from launcher.forecast.timing import StepTime, step_seconds
from launcher.strategies import variant_of
from launcher.strategies.ledger import Ledger

CLEARLY_FITS: Final = 0.75
"""Share of the memory up to which live bytes fit whatever an allocator makes of them."""
NEXT_FAILS: Final = 1.01
"""Where nothing bounds the micro-batch: the next one that is known not to fit is at most this much
above the largest that does."""


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
    def merit(self) -> Merit:
        """What it is ranked by."""
        return Merit(
            verdict=self.verdict,
            tokens_per_s=self.time.tokens_per_s,
            used_bytes=self.used_bytes,
            simplicity=simplicity(self.run.config),
        )

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


def assess(choice: Choice, place: Place, *, largest: bool = False) -> Assessment:
    """The fastest micro-batch of a choice that fits, or the `largest`; the smallest one where none
    does."""
    on_gpu = place.machine.device == "cuda"
    answers = Answers(
        choice.runs[0],
        world_size=place.world_size,
        gpu=place.machine.name if on_gpu else None,
        memory_bytes=place.memory_bytes,
    )
    try:
        return _assess(choice, place, answers, largest=largest)
    finally:
        answers.keep()


def _assess(choice: Choice, place: Place, answers: Answers, *, largest: bool) -> Assessment:
    sizes = _Sizes(choice, place, answers)
    running = sizes.with_verdict(("fits", "tight"))
    if not running:
        return _replayed(sizes.at(0), place, answers)
    safe = sizes.with_verdict(("fits",))
    if largest and safe:
        best = found = sizes.at(safe[-1])
        if choice.unbounded is not None:
            best = found = sizes.between(choice.unbounded, safe[-1], safe[-1] + 1)
    else:
        fastest = max(
            safe or running[:1], key=lambda index: tokens_per_s(choice.runs[index], place)
        )
        best, found = sizes.at(fastest), sizes.at(running[-1])
    return dataclasses.replace(
        _replayed(best, place, answers), largest_micro_batch=found.run.config.data.micro_batch
    )


class _Sizes:
    """One choice at the micro-batches that are asked for, each predicted once."""

    def __init__(self, choice: Choice, place: Place, answers: Answers) -> None:
        self._choice, self._place, self._answers = choice, place, answers
        self._known: dict[int, Assessment] = {}

    def at(self, index: int) -> Assessment:
        """That of the choice's runs."""
        if index not in self._known:
            self._known[index] = self._assess(self._choice.runs[index])
        return self._known[index]

    def with_verdict(self, verdicts: tuple[Verdict, ...]) -> list[int]:
        """The indices with such a verdict, by halving: larger micro-batches need more, but for the
        one that leaves nothing to accumulate, which may do without whole gradients."""
        runs = self._choice.runs
        found = []
        for accumulates in (True, False):
            indices = [n for n, run in enumerate(runs) if (run.accumulation > 1) == accumulates]
            failing = bisect.bisect_left(
                indices, True, key=lambda index: self.at(index).verdict not in verdicts
            )
            found += indices[:failing]
            found += [index for index, _ in self._above(indices[failing:], self.at, verdicts)]
        return found

    def _above(
        self, sizes: Iterable[int], at: Callable[[int], Assessment], verdicts: tuple[Verdict, ...]
    ) -> Iterator[tuple[int, Assessment]]:
        """Those of `sizes`, the first of which fails, that have such a verdict all the same.

        Live bytes grow with the micro-batch, but reserved ones fall in places, by up to 6%. Two
        failures in a row end it, or live bytes that fail alone.
        """
        failures = 0
        for size in sizes:
            tried = at(size)
            if tried.verdict in verdicts:
                failures = 0
                yield size, tried
                continue
            failures += 1
            live_bytes = self._place.fixed_bytes + tried.prediction.peak_bytes
            if failures == 2 or verdict(live_bytes, tried.memory_bytes) not in verdicts:
                return

    def between(self, asked: RunConfig, fitting: int, above_it: int) -> Assessment:
        """The largest between a run that fits and the one above it, which does not or hardly; where
        there is none, by doubling first. Then along a straight line."""

        @functools.cache
        def sized(size: int) -> Assessment:
            place = self._place
            return self._assess(run_of(asked, size, place.world_size, place.machine.device))

        low = self.at(fitting)
        high = self.at(above_it) if above_it < len(self._choice.runs) else None
        while True:
            size, low_bytes = low.run.config.data.micro_batch, low.used_bytes
            if high is None:
                wanted = 2 * size
            else:
                above = high.run.config.data.micro_batch
                if above - size <= 1 or above <= NEXT_FAILS * size:
                    later = self._above(itertools.count(above), sized, ("fits",))
                    return [low, *(assessment for _, assessment in later)][-1]
                slope = (high.used_bytes - low_bytes) / (above - size)
                room_bytes = TIGHT_FROM * self._place.memory_bytes - low_bytes
                line = size + room_bytes / max(slope, 1)
                # Not too near to either, or the other would never move.
                near = max(1, (above - size) // 8)
                wanted = min(max(round(line), size + near), above - near)
            tried = sized(wanted)
            low, high = (tried, high) if tried.verdict == "fits" else (low, tried)

    def _assess(self, run: Resolved) -> Assessment:
        return _assess_run(self._choice, run, self._place, self._answers)


def _assess_run(choice: Choice, run: Resolved, place: Place, answers: Answers) -> Assessment:
    """One choice at one micro-batch: enough to say whether it fits.

    Live bytes stand in for reserved ones where it clearly fits with them: replaying takes as long
    as predicting.
    """
    on_gpu = place.machine.device == "cuda"
    prediction = answers.prediction(run)
    used = prediction.peak_bytes
    if on_gpu:
        limit = place.memory_bytes - place.fixed_bytes
        used = place.fixed_bytes + prediction.peak_bytes
        if CLEARLY_FITS * place.memory_bytes < used <= place.memory_bytes:
            used = place.fixed_bytes + within(answers.use(run, limit_bytes=limit), limit)
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


def _replayed(a: Assessment, place: Place, answers: Answers) -> Assessment:
    """The same with what the allocator really holds: within the memory there is, and with room."""
    limit = place.memory_bytes - place.fixed_bytes
    if place.machine.device == "cpu" or a.prediction.peak_bytes > limit:
        return a  # there is no allocator, or nothing that it could do
    use = here = answers.use(a.run, limit_bytes=limit)
    if here.retries:
        use = answers.use(a.run, limit_bytes=None)
    held = use if here.out_of_memory else here
    return dataclasses.replace(
        a,
        used_bytes=held.peak_reserved_bytes + place.fixed_bytes,
        with_room_bytes=use.peak_reserved_bytes + place.fixed_bytes,
    )


def tokens_per_s(run: Resolved, place: Place) -> float:
    """Of all ranks."""
    return _time(run, place).tokens_per_s


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
