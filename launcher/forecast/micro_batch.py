"""`--micro-batch auto`: the largest that runs, by the plan's estimate and real steps around it."""

import bisect
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from launcher.config.arguments import parse_run_config, with_micro_batch
from launcher.config.resolve import Resolved, resolve
from launcher.config.schema import RunConfig
from launcher.forecast.budget import within_budget
from launcher.forecast.fit import Room, needed_bytes
from launcher.forecast.found_sizes import FoundSizes, free_on_gpus
from launcher.forecast.trials import Trials
from launcher.measure.host_memory import available_host_bytes
from launcher.util.sizes import MIB, gib, parse_bytes

LARGEST: Final = 2**17
GROWTH: Final = 1.25
FASTEST_GROWTH: Final = 2.0
PRECISION: Final = 1.03
"""The next size that is known to fail is at most this much above the one that is taken."""
HOST_SHARE: Final = 0.9
"""Of the host's available memory, where nothing limits a run on the CPU: beyond it the kernel
kills processes, not only this one's."""
HEADROOM_BYTES: Final = MIB
"""What trials on a CPU get less than the run: a process still grows after its second step, by up
to half of that as measured."""
IDLE_RANK_BYTES: Final = 350 * MIB
"""Resident set of a rank with torch loaded, before its model."""


def find_micro_batch(argv: Sequence[str], resolved: Resolved, *, ranks: int) -> list[str]:
    """The same arguments with the largest micro-batch that runs in place of `auto`.

    Tried in processes of their own, which are gone afterwards, so that the run itself starts with
    all memory unfragmented. Where not even the smallest runs, that is taken: the run will say
    where it fails.

    Args:
        resolved: what `argv` asks for, at the smallest micro-batch.

    Raises:
        UserError: a trial fails for another reason than memory.
    """
    started_s = time.monotonic()
    asked = parse_run_config(argv, world_size=ranks)
    room = room_of(asked, resolved.config.loop.device, ranks)
    found = FoundSizes(asked, room.gpu, ranks)
    if known := found.get(room.size_bytes):
        size, date = known
        _say(f"--micro-batch auto: {size}, as found on {date} for this configuration")
        return with_micro_batch(argv, size)
    sizes = sizes_of(asked, ranks)
    start = _planned(asked, sizes, room, ranks)
    with Trials.of(_limited(argv, asked, room), ranks=ranks) as trials:

        def fits(size: int) -> bool:
            ran = trials.run(size)
            _say(f"micro-batch {size}: {'fits' if ran else 'out of memory'}")
            return ran

        most = largest(sizes, start, fits)
    spent_s = time.monotonic() - started_s
    if most is None:
        _say(
            f"--micro-batch auto: not even {sizes[0]} fits; starting anyway, so that the "
            "out-of-memory report shows the shortfall"
        )
        return with_micro_batch(argv, sizes[0])
    _say(f"--micro-batch auto: {most}, found with {trials.count} trials in {spent_s:.0f} s")
    found.keep(most, room.size_bytes)
    return with_micro_batch(argv, most)


def largest(sizes: Sequence[int], start: int, fits: Callable[[int], bool]) -> int | None:
    """The largest of the growing `sizes` that fits, within `PRECISION`; None when none does.

    From the one next to `start` up (or down) by a quarter, then by more, until one fits and a
    larger one does not; then by halving what is between.
    """
    low: int | None = None
    high: int | None = None
    size: int | None = sizes[max(0, bisect.bisect_right(sizes, start) - 1)]
    growth = GROWTH
    while size is not None:
        if fits(size):
            low = size
        else:
            high = size
        size = _next_size(sizes, low, high, growth)
        growth = min(growth**2, FASTEST_GROWTH)
    return low


def estimate(sizes: Sequence[int], room_bytes: int, needed: Callable[[int], int]) -> int:
    """The largest of the growing `sizes` that should fit, by a straight line.

    It goes through the first size, by doubling, that takes more than half of what the smallest
    leaves, and the one before. A trace takes as long as its loss has chunks: far beyond what fits,
    minutes.
    """
    size, size_bytes = sizes[0], needed(sizes[0])
    half = (room_bytes + size_bytes) // 2
    if size_bytes > room_bytes:
        return size
    while size_bytes <= half:
        before, before_bytes = size, size_bytes
        larger = bisect.bisect_left(sizes, 2 * size)
        if larger == len(sizes):
            return sizes[-1]
        size = sizes[larger]
        size_bytes = needed(size)
    slope = (size_bytes - before_bytes) / (size - before)
    wanted = before + (room_bytes - before_bytes) / slope
    return sizes[bisect.bisect_right(sizes, wanted) - 1]


def sizes_of(asked: RunConfig, ranks: int) -> Sequence[int]:
    """What the micro-batch can be: anything, or what divides a rank's share of the global batch."""
    total = asked.data.global_batch
    if total is None:
        return range(1, LARGEST + 1)
    share = total // ranks
    return [n for n in range(1, share + 1) if share % n == 0]


def room_of(asked: RunConfig, device_type: str, ranks: int) -> Room:
    """The memory of each rank: --memory-limit, else what is free on the fullest GPU, else each
    rank's share of the host.

    Raises:
        UserError: CUDA does not say what is free.
    """
    gpu, free_bytes = (None, None) if device_type == "cpu" else free_on_gpus()
    limit = asked.measure.memory_limit
    if limit is not None:
        return Room(size_bytes=parse_bytes(limit, "--memory-limit"), gpu=gpu, capped=True)
    if free_bytes is not None:
        return Room(size_bytes=free_bytes, gpu=gpu, capped=False)
    share = int(HOST_SHARE * available_host_bytes()) // ranks - IDLE_RANK_BYTES
    return Room(size_bytes=max(share, MIB), gpu=None, capped=False)


def _next_size(
    sizes: Sequence[int], low: int | None, high: int | None, growth: float
) -> int | None:
    """What to try next when `low` fits and `high` does not (None: not known yet)."""
    if high is None:
        assert low is not None
        larger = sizes[bisect.bisect_right(sizes, low) :]
        wanted = min(bisect.bisect_left(larger, low * growth), len(larger) - 1)
        return larger[wanted] if larger else None
    if low is None:
        smaller = sizes[: bisect.bisect_left(sizes, high)]
        wanted = max(bisect.bisect_right(smaller, high / growth) - 1, 0)
        return smaller[wanted] if smaller else None
    between = sizes[bisect.bisect_right(sizes, low) : bisect.bisect_left(sizes, high)]
    if not between or between[-1] <= PRECISION * low:
        return None
    middle = bisect.bisect_left(between, math.sqrt(low * high))
    return between[min(middle, len(between) - 1)]


def _planned(asked: RunConfig, sizes: Sequence[int], room: Room, ranks: int) -> int:
    """The plan's largest; the smallest where it has none."""

    def needed(size: int) -> int:
        run = resolve(
            asked.replace(micro_batch=size), world_size=ranks, device_type=room.device_type
        )
        return needed_bytes(within_budget(run, world_size=ranks), room, world_size=ranks)

    try:
        start = estimate(sizes, room.size_bytes, needed)
    except Exception as error:  # only a place to start from: real steps decide
        _say(f"micro-batch: the plan has no estimate ({type(error).__name__}: {error})")
        return sizes[0]
    _say(
        f"micro-batch: the plan's largest for {gib(room.size_bytes)} is {start}: trying from there"
    )
    return start


def _limited(argv: Sequence[str], asked: RunConfig, room: Room) -> list[str]:
    """On a host without a limit trials get one, or the kernel would choose whom to kill."""
    if room.gpu is not None:
        return list(argv)
    less = HEADROOM_BYTES if asked.measure.memory_limit is not None else 0
    return [*argv, f"--memory-limit={max(MIB, room.size_bytes - less)}"]


def _say(line: str) -> None:
    print(f"shardscale: {line}", file=sys.stderr, flush=True)
