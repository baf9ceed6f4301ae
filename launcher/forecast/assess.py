"""Memory and speed of one candidate on one machine, at the micro-batch that suits it best."""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from launcher.config.resolve import Resolved
from launcher.config.schema import RunConfig
from launcher.forecast.candidates import Choice, run_of
from launcher.forecast.cluster import Cluster
from launcher.forecast.fit import TIGHT_FROM, Verdict, verdict, within
from launcher.forecast.order import Merit, simplicity
from launcher.forecast.predict import Prediction, by_category
from launcher.forecast.prediction_cache import PredictionCache
from launcher.forecast.timing import StepTime, step_seconds
from launcher.strategies.ledger import Ledger
from launcher.util.errors import UserError

CLEARLY_FITS: Final = 0.75
"""Share of the memory up to which live tensors fit with any fragmentation of the allocator."""
NEXT_FAILS: Final = 1.01
"""Precision of an unbounded search: the next larger micro-batch that is known not to fit is at most
this much above the result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """One candidate at one micro-batch."""

    choice: Choice
    run: Resolved
    prediction: Prediction
    used_bytes: int
    """Peak of the device: reserved by the allocator, CUDA context, NCCL."""
    with_room_bytes: int
    """The same on a device with unlimited memory, where the allocator keeps more freed blocks."""
    memory_bytes: int
    time: StepTime | None
    """None where it does not fit."""
    largest_micro_batch: int | None
    """The largest that fits; None when not even the smallest does."""

    @property
    def verdict(self) -> Verdict:
        """Return whether it would run: one of `VERDICTS`."""
        return verdict(self.used_bytes, self.memory_bytes)

    @property
    def merit(self) -> Merit:
        """Criteria of the ranking."""
        return Merit(
            verdict=self.verdict,
            tokens_per_s=0.0 if self.time is None else self.time.tokens_per_s,
            used_bytes=self.used_bytes,
            simplicity=simplicity(self.run.config),
        )

    @property
    def margin_bytes(self) -> int:
        """Memory left; negative where it does not fit."""
        return self.memory_bytes - self.used_bytes

    @property
    def highest_in(self) -> str:
        """Name the phase of the peak, and the largest category there."""
        (period, phase), _ = max(self.prediction.peaks.items(), key=lambda item: item[1])
        lines = by_category(self.highest)
        name, size_bytes = max(lines.items(), key=lambda item: item[1])
        share = size_bytes / max(1, sum(lines.values()))
        when = {"steady": "later steps"}.get(period, period.replace("_", " "))
        return f"{phase} of {when}: {share:.0%} is {name}"

    @property
    def highest(self) -> Ledger:
        """The ledger at the peak."""
        first, later = self.prediction.first_step, self.prediction.peak
        used = [ledger.device.used_bytes or 0 for ledger in (first, later)]
        return first if used[0] > used[1] else later


def assess(
    choice: Choice, cluster: Cluster, *, largest: bool = False, expected: int | None = None
) -> Assessment:
    """Evaluate a candidate at its fastest micro-batch that fits, or its `largest`; at its smallest
    one where none fits.

    Args:
        expected: where the search for the largest begins; a good guess saves predictions.
    """
    sizes = MicroBatches(choice, cluster, expected)
    try:
        return sizes.best(largest=largest)
    finally:
        sizes.cache.save()


class MicroBatches:
    """One candidate at several micro-batches, each predicted once."""

    def __init__(self, choice: Choice, cluster: Cluster, expected: int | None = None) -> None:
        self._choice, self._cluster, self._expected = choice, cluster, expected
        self.cache = PredictionCache(choice.runs[0], cluster)
        self._known: dict[int, Assessment] = {}

    def best(self, *, largest: bool) -> Assessment:
        """Evaluate the fastest micro-batch that fits, the `largest` one, or else the smallest."""
        runs = self._choice.runs
        # with these the search begins at the smallest size, so that this evaluates nothing in vain
        if self._expected in (0, 1) and _exceeds_at_any_size(self.at(0)):
            return self.at(0)
        running = self.with_verdict(("fits", "tight"))
        if not running:
            return self._with_allocator(self.at(0))
        safe = self.with_verdict(("fits",))
        if largest and safe:
            best = found = self.at(safe[-1])
            if self._choice.unbounded is not None:
                best = found = self._between(self._choice.unbounded, safe[-1], safe[-1] + 1)
        else:
            speeds = {index: tokens_per_s(runs[index], self._cluster) for index in running}
            wanted = sorted(safe or running[:1], key=lambda index: -speeds[index])
            # Bisection has not seen all, and the allocator may keep much beside few live bytes.
            sure = (self.at(i) for i in wanted if not safe or self.at(i).verdict == "fits")
            replayed = map(self._with_allocator, sure)
            fastest = next(replayed)
            fit = (a for a in itertools.chain([fastest], replayed) if a.verdict == "fits")
            best, found = next(fit, fastest), self.at(running[-1])
        return dataclasses.replace(
            self._with_allocator(best), largest_micro_batch=found.run.config.data.micro_batch
        )

    def at(self, index: int) -> Assessment:
        """Evaluate one of the candidate's runs."""
        if index not in self._known:
            self._known[index] = self._evaluate(self._choice.runs[index])
        return self._known[index]

    def with_verdict(self, verdicts: tuple[Verdict, ...]) -> list[int]:
        """Indices of the runs with such a verdict, by bisection.

        Larger micro-batches need more memory, except for the largest one: without accumulation a
        strategy may need no buffer of whole gradients.
        """
        found = []
        for accumulates in (True, False):
            indices = [
                number
                for number, run in enumerate(self._choice.runs)
                if (run.accumulation > 1) == accumulates
            ]
            failing = self._first_failing(indices, verdicts)
            found += indices[:failing]
            found += [index for index, _ in self._above(indices[failing:], self.at, verdicts)]
        return found

    def _first_failing(self, indices: Sequence[int], verdicts: tuple[Verdict, ...]) -> int:
        """Bisect for the first position without such a verdict, around the expected one first."""
        least, most = 0, len(indices)
        sizes = [self._choice.runs[index].config.data.micro_batch for index in indices]
        expected = None if self._expected is None else bisect.bisect_right(sizes, self._expected)
        guesses = [] if expected is None else [expected - 1, expected]
        while least < most:
            inside = [guess for guess in guesses if least <= guess < most]
            middle = inside[0] if inside else (least + most) // 2
            if self.at(indices[middle]).verdict in verdicts:
                least = middle + 1
            else:
                most = middle
        return least

    def _above(
        self, sizes: Iterable[int], at: Callable[[int], Assessment], verdicts: tuple[Verdict, ...]
    ) -> Iterator[tuple[int, Assessment]]:
        """Yield those of `sizes` with such a verdict, beyond a first one that fails.

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
            live_bytes = self._cluster.fixed_bytes + tried.prediction.peak_bytes
            if failures == 2 or verdict(live_bytes, tried.memory_bytes) not in verdicts:
                return

    def _between(self, asked: RunConfig, fitting: int, above_it: int) -> Assessment:
        """Find the largest micro-batch between a run that fits and the next one, which does not.

        Without a next one, by doubling first. Then by linear interpolation.
        """
        cluster, low = self._cluster, self.at(fitting)

        @functools.cache
        def sized(size: int) -> Assessment:
            try:
                run = run_of(asked, size, cluster.world_size, cluster.machine.device)
            except UserError:  # a budget of activations that is too small for so many
                run = dataclasses.replace(low.run, config=asked.replace(micro_batch=size))
                return dataclasses.replace(low, run=run, used_bytes=cluster.memory_bytes + 1)
            return self._evaluate(run)

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
                room_bytes = TIGHT_FROM * cluster.memory_bytes - low_bytes
                line = size + room_bytes / max(slope, 1)
                # Not too near to either, or the other would never move.
                near = max(1, (above - size) // 8)
                wanted = min(max(round(line), size + near), above - near)
            tried = sized(wanted)
            low, high = (tried, high) if tried.verdict == "fits" else (low, tried)

    def _evaluate(self, run: Resolved) -> Assessment:
        """Predict one run, just well enough to say whether it fits.

        Live bytes stand in for reserved ones where the run clearly fits: replaying the allocator
        takes as long as predicting.
        """
        cluster = self._cluster
        prediction = self.cache.prediction(run)
        used = prediction.peak_bytes
        if cluster.gpu is not None:
            limit = cluster.memory_bytes - cluster.fixed_bytes
            used = cluster.fixed_bytes + prediction.peak_bytes
            if CLEARLY_FITS * cluster.memory_bytes < used <= cluster.memory_bytes:
                used = cluster.fixed_bytes + within(self.cache.use(run, limit_bytes=limit), limit)
        return Assessment(
            choice=self._choice,
            run=run,
            prediction=prediction,
            used_bytes=used,
            with_room_bytes=used,
            memory_bytes=cluster.memory_bytes,
            time=_step_time(run, cluster) if used <= cluster.memory_bytes else None,
            largest_micro_batch=None,
        )

    def _with_allocator(self, a: Assessment) -> Assessment:
        """Replace live bytes by what the allocator reserves, within this memory and without end."""
        limit = self._cluster.memory_bytes - self._cluster.fixed_bytes
        if self._cluster.gpu is None or a.prediction.peak_bytes > limit:
            return a  # no caching allocator, or no memory for it to manage
        use = here = self.cache.use(a.run, limit_bytes=limit)
        if here.retries:
            use = self.cache.use(a.run, limit_bytes=None)
        # out of memory: what it would take with unlimited memory shows the shortfall
        held = use if here.out_of_memory else here
        used = held.peak_reserved_bytes + self._cluster.fixed_bytes
        return dataclasses.replace(
            a,
            time=a.time if used <= a.memory_bytes else None,
            used_bytes=used,
            with_room_bytes=use.peak_reserved_bytes + self._cluster.fixed_bytes,
        )


def _exceeds_at_any_size(smallest: Assessment) -> bool:
    """Return whether larger micro-batches, too, exceed the memory: they have no less of this,
    though an unaccumulated one may have no buffer of whole gradients."""
    lines = by_category(smallest.prediction.peak)
    return sum(lines[n] for n in ("params", "optimizer", "activations")) > smallest.memory_bytes


def tokens_per_s(run: Resolved, cluster: Cluster) -> float:
    """Predicted tokens per second of all ranks."""
    return _step_time(run, cluster).tokens_per_s


def _step_time(run: Resolved, cluster: Cluster) -> StepTime:
    time = step_seconds(
        run,
        gpus_per_node=cluster.ranks_per_node,
        machine=cluster.machine,
    )
    ratio = cluster.learnt_ratio(run)
    seconds = {k: ratio * v for k, v in dataclasses.asdict(time).items() if k.endswith("_s")}
    return dataclasses.replace(time, **seconds)
