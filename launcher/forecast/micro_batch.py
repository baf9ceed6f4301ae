"""The largest micro-batch: by the plan, or under `--micro-batch auto` by trial runs around that."""

import bisect
import math
import time
from collections.abc import Callable, Sequence
from typing import Final

from launcher.config.arguments import parse_run_config, with_micro_batch
from launcher.config.schema import RunConfig
from launcher.forecast.candidates import run_of
from launcher.forecast.fit import Room, needed_bytes
from launcher.forecast.micro_batch_cache import MicroBatchCache, free_on_gpus
from launcher.forecast.trials import Trials
from launcher.measure.host_memory import available_host_bytes
from launcher.run.prepare import Prepared
from launcher.util.errors import tell
from launcher.util.sizes import MIB, gib, parse_bytes

LARGEST: Final = 2**17
PRECISION: Final = 1.03
"""Precision of the search: a size that fails is at most this much above the result."""
GROWTHS: Final = (PRECISION, 1.25, 1.6)
FASTEST_GROWTH: Final = 2.0
"""Steps away from the plan's estimate. It is mostly right, and then the first step ends the
search."""
HOST_SHARE: Final = 0.9
"""Share of the host's available memory for a CPU run without a limit: beyond it the kernel kills
processes, not only this one's."""
HEADROOM_BYTES: Final = MIB
"""Trials on a CPU get this much less than the run: a process still grows after its second step, by
up to half of it as measured."""
IDLE_RANK_BYTES: Final = 350 * MIB
"""Resident set of a rank with torch loaded, before its model."""
PLANNED_SHARE: Final = 0.95
"""Share of a GPU's free memory that a micro-batch may take by the plan, where none is tried."""


def plan_micro_batch(argv: Sequence[str], *, ranks: int) -> list[str]:
    """Return the arguments with the plan's largest micro-batch on this node's GPUs, where they give
    a global batch alone: any divisor of a rank's share trains the same.

    The default, if the plan has no estimate.
    """
    asked = parse_run_config(argv, world_size=ranks)
    sizes = sizes_of(asked, ranks)
    try:
        room = room_of(asked, "cuda", ranks)
        limit_bytes, needed = int(PLANNED_SHARE * room.size_bytes), _needed(asked, room, ranks)
        most = estimate(sizes, limit_bytes, needed)
        # Bytes bend where another phase has the peak, and then the estimate is beyond the limit.
        smaller = (n for n in reversed(sizes) if n <= most)
        fitting = next((n for n in smaller if needed(n) <= limit_bytes), None)
        size = sizes[0] if fitting is None else fitting
    except Exception as error:  # a run that trains is better than one that does not start
        size = max(n for n in sizes if n <= asked.data.micro_batch)
        why = f"the plan has no estimate ({type(error).__name__}: {error})"
    else:
        fails, fits = "by the plan not even that fits", "the largest planned to fit"
        found = fails if fitting is None else fits
        why = f"{found} in {gib(room.size_bytes)} (--micro-batch N takes another, auto tries)"
    tell(f"micro-batch {size} of {sizes[-1]} sequences per rank: {why}")
    return with_micro_batch(argv, size)


def find_micro_batch(argv: Sequence[str], prepared: Prepared, *, ranks: int) -> list[str]:
    """Return the arguments with the largest micro-batch that runs in place of `auto`.

    Trials are separate processes, so that the run itself starts with unfragmented memory. If not
    even the smallest runs, it is taken all the same: the run will report the shortfall.

    Args:
        prepared: the run of `argv` at the smallest micro-batch.

    Raises:
        UserError: a trial fails for another reason than memory.
    """
    started_s = time.monotonic()
    asked = parse_run_config(argv, world_size=ranks)
    resolved, train = prepared.resolved, prepared.corpus.train
    room = room_of(asked, resolved.config.loop.device, ranks)
    sizes = sizes_of(asked, ranks, train.sequence_count(resolved.seq_len))
    cache = MicroBatchCache(asked, room.gpu, ranks, sizes[-1])
    if known := cache.get(room.size_bytes):
        size, date = known
        tell(f"--micro-batch auto: {size}, as found on {date} for this configuration")
        return with_micro_batch(argv, size)
    start = _planned(asked, sizes, room, ranks)
    with Trials.of(_limited(argv, asked, room), ranks=ranks) as trials:

        def fits(size: int) -> bool:
            ran = trials.run(size)
            tell(f"micro-batch {size}: {'fits' if ran else 'out of memory'}")
            return ran

        most = largest(sizes, start, fits)
    spent_s = time.monotonic() - started_s
    if most is None:
        tell(
            f"--micro-batch auto: not even {sizes[0]} fits; starting anyway, so that the "
            "out-of-memory report shows the shortfall"
        )
        return with_micro_batch(argv, sizes[0])
    tried = "1 trial" if trials.count == 1 else f"{trials.count} trials"
    tell(f"--micro-batch auto: {most}, found with {tried} in {spent_s:.0f} s")
    cache.save(most, room.size_bytes)
    return with_micro_batch(argv, most)


def largest(sizes: Sequence[int], start: int, fits: Callable[[int], bool]) -> int | None:
    """Find the largest of the ascending `sizes` that fits, within `PRECISION`; None if none does.

    Starts next to `start` and steps up (or down) by little, then by more, until one fits and a
    larger one does not; then bisects.
    """
    low, high = -1, len(sizes)  # indices: the largest known to fit, the smallest known not to
    tried = max(0, bisect.bisect_right(sizes, start) - 1)
    growths = iter(GROWTHS)
    while low + 1 < high:
        if fits(sizes[tried]):
            low = tried
        else:
            high = tried
        growth = next(growths, FASTEST_GROWTH)
        if high == len(sizes):
            wanted = bisect.bisect_left(sizes, sizes[low] * growth, low + 1)
        elif low < 0:
            wanted = bisect.bisect_right(sizes, sizes[high] / growth, 0, high) - 1
        elif sizes[high - 1] <= PRECISION * sizes[low]:
            break
        else:  # the geometric mean, since the precision is relative
            wanted = bisect.bisect_left(sizes, math.sqrt(sizes[low] * sizes[high]), low + 1, high)
        tried = min(max(wanted, low + 1), high - 1)
    return None if low < 0 else sizes[low]


def estimate(sizes: Sequence[int], room_bytes: int, needed: Callable[[int], int]) -> int:
    """Estimate the largest of the ascending `sizes` that fits, by linear extrapolation.

    The line goes through the first size, by doubling, that takes more than half of the memory
    left by the smallest, and the size before: sizes far beyond the limit are slow to trace.
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


def sizes_of(asked: RunConfig, ranks: int, epoch: int = LARGEST) -> Sequence[int]:
    """Return the possible micro-batches: the divisors of a rank's share of the global batch, or
    any up to its share of the `epoch` sequences to train on, which a larger one would repeat."""
    total, data_ranks = asked.data.global_batch, asked.sharding.data_ranks(ranks)
    if total is None:
        return range(1, min(LARGEST, max(1, epoch // data_ranks)) + 1)
    share = total // data_ranks
    return [n for n in range(1, share + 1) if share % n == 0]


def room_of(asked: RunConfig, device_type: str, ranks: int) -> Room:
    """Return the memory of each rank: --memory-limit, else what is free on the fullest GPU, else a
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


def _planned(asked: RunConfig, sizes: Sequence[int], room: Room, ranks: int) -> int:
    """Return the plan's estimate of the largest; the smallest if the plan has none."""
    try:
        start = estimate(sizes, room.size_bytes, _needed(asked, room, ranks))
    except Exception as error:  # only a starting point: trial runs decide
        tell(f"micro-batch: the plan has no estimate ({type(error).__name__}: {error})")
        return sizes[0]
    tell(
        f"micro-batch: the plan's largest for {gib(room.size_bytes)} is {start}: trying from there"
    )
    return start


def _needed(asked: RunConfig, room: Room, ranks: int) -> Callable[[int], int]:
    def needed(size: int) -> int:
        run = run_of(asked, size, ranks, room.device_type, elsewhere=False)
        return needed_bytes(run, room)

    return needed


def _limited(argv: Sequence[str], asked: RunConfig, room: Room) -> list[str]:
    """Give trials on a CPU a limit: without one the kernel's OOM killer would choose its victim."""
    if room.gpu is not None:
        return list(argv)
    less = HEADROOM_BYTES if asked.measure.memory_limit is not None else 0
    return [*argv, f"--memory-limit={max(MIB, room.size_bytes - less)}"]
