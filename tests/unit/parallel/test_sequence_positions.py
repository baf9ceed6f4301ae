"""Which tokens a rank holds of a sequence that is cut over ranks."""

from itertools import chain

import pytest

from launcher.config.sharding import ContextParallelMethod
from launcher.parallel.mesh import ContextRank


def held(seq_len: int, ranks: int, method: ContextParallelMethod) -> list[list[int]]:
    found = [ContextRank(size=ranks, index=index, method=method) for index in range(ranks)]
    return [list(chain.from_iterable(rank.local_ranges(seq_len))) for rank in found]


@pytest.mark.parametrize("method", ["ulysses", "ring"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("chunk", [1, 5])
def test_every_token_has_one_rank(ranks: int, chunk: int, method: ContextParallelMethod) -> None:
    seq_len = 2 * ranks * chunk
    parts = held(seq_len, ranks, method)
    assert sorted(chain.from_iterable(parts)) == list(range(seq_len))
    assert all(part == sorted(part) and len(part) == 2 * chunk for part in parts)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_in_a_ring_every_rank_has_as_much_to_see(ranks: int) -> None:
    seq_len = 2 * ranks * 5
    pairs = [sum(position + 1 for position in part) for part in held(seq_len, ranks, "ring")]
    assert pairs == [seq_len * (seq_len + 1) // 2 // ranks] * ranks


def test_ulysses_takes_them_in_order_and_a_ring_an_early_and_a_late_piece() -> None:
    assert held(12, 3, "ulysses")[1] == [4, 5, 6, 7]
    assert held(12, 3, "ring")[1] == [2, 3, 8, 9]
