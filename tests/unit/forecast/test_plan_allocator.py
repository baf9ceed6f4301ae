"""The allocator's model against cases worked by hand from the published rules."""

import random

import pytest

from launcher.forecast.allocator import AllocatorUse, CachingAllocator, replay
from launcher.forecast.allocator_blocks import EMPTY_CACHE
from launcher.util.sizes import rounded_bytes, segment_bytes

MIB = 2**20


def held(use: AllocatorUse) -> tuple[int, int]:
    return use.allocated_bytes, use.reserved_bytes


@pytest.mark.parametrize(
    ("requested", "occupied", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),  # the largest small request
        (MIB + 1, MIB + 512, 20 * MIB),  # the smallest large one
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),  # from here on: a segment of its own
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 22 * MIB),
    ],
)
def test_sizes_are_rounded(requested: int, occupied: int, segment: int) -> None:
    assert rounded_bytes(requested) == occupied
    assert segment_bytes(occupied) == segment
    assert held(replay([(0, requested)])) == (occupied, segment)


def test_small_requests_share_a_segment_of_2_mib() -> None:
    two = [(0, MIB), (1, MIB)]
    assert held(replay(two)) == (2 * MIB, 2 * MIB)
    assert held(replay([*two, (2, 1)])) == (2 * MIB + 512, 4 * MIB)


def test_a_small_request_never_uses_the_large_pool() -> None:
    # 19 MiB of the 20 MiB segment are free, but only for requests above 1 MiB.
    assert held(replay([(0, MIB + 512), (1, 512)])) == (MIB + 1024, 22 * MIB)


def test_a_small_block_is_split_when_512_bytes_remain() -> None:
    # 2 MiB - 512 are taken and 512 remain: enough for one more block, then nothing is left.
    events = [(0, MIB), (1, MIB - 512), (2, 512)]
    assert held(replay(events)) == (2 * MIB, 2 * MIB)


def test_a_large_block_is_split_only_when_more_than_1_mib_remains() -> None:
    # Of a segment of 12 MiB, 11 leave exactly 1 MiB: not split, so all 12 are occupied.
    assert held(replay([(0, 11 * MIB)])) == (12 * MIB, 12 * MIB)
    # 512 bytes less, and more than 1 MiB remains: split.
    assert held(replay([(0, 11 * MIB - 512)])) == (11 * MIB - 512, 12 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    # Free: 40 MiB and 30 MiB. Were the first that fits taken for 30 MiB, 40 would need a segment.
    events = [(0, 40 * MIB), (1, 30 * MIB), (0, 0), (1, 0), (2, 29 * MIB), (3, 40 * MIB)]
    assert held(replay(events)) == (70 * MIB, 70 * MIB)  # 29 MiB leave only 1 MiB: not split


def test_of_equal_blocks_the_one_at_the_lowest_address_is_taken() -> None:
    # The segment [a: 9 MiB][b: 2 MiB][c: 9 MiB]: with a and c free, the request goes into a. Then
    # b and c merge to 11 MiB, which they could not do had c been taken.
    events = [(0, 9 * MIB), (1, 2 * MIB), (2, 9 * MIB), (0, 0), (2, 0), (3, 9 * MIB), (1, 0)]
    assert held(replay([*events, (4, 11 * MIB)])) == (20 * MIB, 20 * MIB)


def test_freed_neighbours_merge_on_both_sides() -> None:
    parts = [(number, 5 * MIB) for number in range(4)]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2]):
        events = [*parts, *((number, 0) for number in order), (9, 20 * MIB)]
        assert held(replay(events)) == (20 * MIB, 20 * MIB)


def test_blocks_of_two_segments_do_not_merge() -> None:
    events = [(0, 20 * MIB), (1, 20 * MIB), (0, 0), (1, 0), (2, 40 * MIB)]
    assert held(replay(events)) == (40 * MIB, 80 * MIB)


def test_cached_segments_are_given_back_before_running_out() -> None:
    events = [(0, 20 * MIB), (1, 20 * MIB), (0, 0), (1, 0), (2, 40 * MIB)]
    use = replay(events, limit_bytes=60 * MIB)
    assert held(use) == (40 * MIB, 40 * MIB)
    assert (use.peak_reserved_bytes, use.retries, use.out_of_memory) == (40 * MIB, 1, False)


def test_a_segment_that_is_used_in_part_is_not_given_back() -> None:
    # 15 of 20 MiB are free, but the segment stays: 20 + 30 exceed the limit.
    events = [(0, 5 * MIB), (1, 5 * MIB), (1, 0), (2, 30 * MIB)]
    use = replay(events, limit_bytes=48 * MIB)
    assert use.out_of_memory
    assert held(use) == (5 * MIB, 20 * MIB)
    assert not replay(events, limit_bytes=50 * MIB).out_of_memory


def test_the_limit_counts_whole_segments() -> None:
    assert replay([(0, 2 * MIB)], limit_bytes=19 * MIB).out_of_memory
    assert not replay([(0, 2 * MIB)], limit_bytes=20 * MIB).out_of_memory


def test_most_allocated_and_most_reserved_may_be_different_moments() -> None:
    use = replay([(0, 20 * MIB), (0, 0), (1, 30 * MIB), (1, 0)])
    assert held(use) == (0, 50 * MIB)
    assert (use.peak_allocated_bytes, use.peak_reserved_bytes) == (30 * MIB, 50 * MIB)


def test_an_expandable_segment_grows_by_pages_instead_of_fragmenting() -> None:
    # 40 MiB after two freed blocks of 20: the one segment has them side by side.
    events = [(0, 20 * MIB), (1, 20 * MIB), (0, 0), (1, 0), (2, 40 * MIB)]
    assert held(replay(events, expandable_segments=True)) == (40 * MIB, 40 * MIB)
    # 21 MiB need two pages of 20; the 19 left are the start of the next 39, which need one more.
    assert held(replay([(0, 21 * MIB)], expandable_segments=True)) == (21 * MIB, 40 * MIB)
    events = [(0, 21 * MIB), (1, 39 * MIB)]
    assert held(replay(events, expandable_segments=True)) == (60 * MIB, 60 * MIB)
    # The small pool has a segment of its own, with pages of 2 MiB.
    events = [(0, MIB), (1, MIB), (2, MIB)]
    assert held(replay(events, expandable_segments=True)) == (3 * MIB, 4 * MIB)


def test_an_expandable_large_block_is_split_down_to_512_bytes() -> None:
    # 19 of 20 MiB leave 1 MiB, which an ordinary segment would not split off.
    assert held(replay([(0, 19 * MIB)], expandable_segments=True)) == (19 * MIB, 20 * MIB)
    assert held(replay([(0, 19 * MIB)])) == (20 * MIB, 20 * MIB)


def test_best_fit_prefers_any_block_to_the_one_that_can_grow() -> None:
    # Free: 8 MiB at the end (can grow) and 16 MiB at the start. 8 MiB go into the 16.
    events = [(0, 16 * MIB), (1, 16 * MIB), (0, 0), (2, 8 * MIB)]
    # Then the end has 8 MiB plus what it grows by: 24 MiB take one new page of 20.
    use = replay([*events, (3, 24 * MIB)], expandable_segments=True)
    assert held(use) == (48 * MIB, 60 * MIB)


def test_free_pages_of_an_expandable_segment_are_given_back() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    # [0: 10 MiB][1: 40 MiB][2: 10 MiB]: of the free 40, one whole page [20, 40) can be unmapped.
    allocator.replay([(0, 10 * MIB), (1, 40 * MIB), (2, 10 * MIB), (1, 0)])
    allocator.release_cached()
    assert held(allocator.use()) == (20 * MIB, 40 * MIB)
    # The hole is the lowest place where 30 MiB fit, with the free 10 MiB before it and after it.
    assert held(allocator.replay([(3, 30 * MIB)])) == (50 * MIB, 60 * MIB)
    # 41 MiB find no room before the end: what is left of the hole stays unused.
    assert held(allocator.replay([(4, 41 * MIB)])) == (91 * MIB, 120 * MIB)


@pytest.mark.parametrize("expandable", [False, True])
def test_an_emptied_cache_leaves_no_segment_to_reuse(expandable: bool) -> None:
    # 60 MiB are cached; once they are given back, 40 are all that is reserved again.
    cached = [(0, 60 * MIB), (0, 0)]
    emptied = [*cached, (EMPTY_CACHE, 0)]
    assert replay(cached, expandable_segments=expandable).reserved_bytes == 60 * MIB
    assert replay(emptied, expandable_segments=expandable).reserved_bytes == 0
    use = replay([*emptied, (1, 40 * MIB)], expandable_segments=expandable)
    assert held(use) == (40 * MIB, 40 * MIB)


@pytest.mark.parametrize(("expandable", "reserved"), [(False, 24 * MIB), (True, 40 * MIB)])
def test_a_block_serves_no_other_stream_than_its_own(expandable: bool, reserved: int) -> None:
    events = [(0, 12 * MIB), (0, 0), (1, 12 * MIB)]
    first = segment_bytes(12 * MIB) if not expandable else 20 * MIB
    assert held(replay(events, expandable_segments=expandable)) == (12 * MIB, first)
    apart = replay(events, {0: "gather"}, expandable_segments=expandable)
    assert held(apart) == (12 * MIB, reserved)


@pytest.mark.parametrize("expandable", [False, True])
def test_nothing_is_lost_in_a_random_sequence(expandable: bool) -> None:
    rng = random.Random(0)
    allocator = CachingAllocator(expandable_segments=expandable, limit_bytes=600 * MIB)
    live: dict[int, int] = {}
    for number in range(4000):
        if live and rng.random() < 0.5:
            storage = rng.choice(list(live))
            allocator.free(storage)
            del live[storage]
        else:
            size = rng.choice((rng.randint(1, MIB), rng.randint(1, 30 * MIB)))
            if not allocator.allocate(number, size):
                break
            live[number] = size
        use = allocator.use()
        assert sum(map(rounded_bytes, live.values())) <= use.allocated_bytes <= use.reserved_bytes
        assert use.reserved_bytes <= 600 * MIB
    for storage in live:
        allocator.free(storage)
    allocator.release_cached()
    assert held(allocator.use()) == (0, 0)
