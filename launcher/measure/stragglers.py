"""Which rank keeps the others waiting."""

import statistics
from dataclasses import dataclass

STRAGGLES_FROM = 1.5  # times the median of the other ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """The rank that keeps the others waiting."""

    rank: int
    times_median: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """Figures by rank since the last logged step."""

    alone_s: list[float]
    used_gib: list[float]

    def straggler(self) -> Straggler | None:
        """The rank that keeps the others waiting, if one clearly does."""
        if len(self.alone_s) < 2:
            return None
        slowest = max(range(len(self.alone_s)), key=self.alone_s.__getitem__)
        others = self.alone_s[:slowest] + self.alone_s[slowest + 1 :]
        ratio = self.alone_s[slowest] / statistics.median(others)
        return Straggler(rank=slowest, times_median=ratio) if ratio > STRAGGLES_FROM else None
