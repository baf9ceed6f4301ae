"""Prices of GPUs by the hour, from a file with their sources and dates."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from launcher.config.yaml_file import read_yaml
from launcher.measure.hardware import GPUS
from launcher.util.errors import UserError, one_line

OWN: Final = Path(__file__).with_name("prices.yaml")
MOST_OFFERS: Final = 500
MOST_PRICE: Final = 1e5
MOST_GPUS: Final = 1024
MOST_WATTS: Final = 1e5
_TEXTS: Final = ("provider", "read", "source")


class Offer(NamedTuple):
    """GPUs of one machine at one provider."""

    gpu: str
    provider: str
    per_gpu_hour: float
    gpus: tuple[int, ...]
    read: str
    source: str


class Prices(NamedTuple):
    """All offers of a file."""

    path: Path
    currency: str
    offers: tuple[Offer, ...]
    power_w: Mapping[str, float]

    @property
    def dates(self) -> str:
        """From the oldest to the newest price."""
        dates = sorted({offer.read for offer in self.offers})
        return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"


def read_prices(path: Path) -> Prices:
    """Read a file of prices.

    Raises:
        UserError: it is none, or an offer in it is not one, by its number.
    """
    content = read_yaml(path)
    offers = content.get("offers") if isinstance(content, dict) else None
    if not isinstance(offers, list) or not 0 < len(offers) <= MOST_OFFERS:
        raise UserError(f"--prices {path}: has no list of offers: see {OWN}")
    power = content.get("power_w") or {}
    if not isinstance(power, dict) or not all(_is_number(w, MOST_WATTS) for w in power.values()):
        raise UserError(f"--prices {path}: power_w must have watts per GPU: see {OWN}")
    return Prices(
        path=path,
        currency=one_line(str(content.get("currency", "USD")), 8),
        offers=tuple(_offer(path, n, each) for n, each in enumerate(offers, 1)),
        power_w={str(name): float(watts) for name, watts in power.items()},
    )


def _offer(path: Path, number: int, entry: Any) -> Offer:
    place = f"--prices {path}: offer {number}"
    if not isinstance(entry, dict):
        raise UserError(f"{place} is {entry!r:.40}, but must have gpu, provider, per_gpu_hour ...")
    name, counts = str(entry.get("gpu")), entry.get("gpus", [1])
    if name not in {gpu.name for gpu in GPUS}:
        raise UserError(f"{place}: gpu {name:.40} is not known: use a name of `plan --help`")
    if not _is_number(entry.get("per_gpu_hour"), MOST_PRICE):
        raise UserError(f"{place}: per_gpu_hour must be a price above 0")
    counts = counts if isinstance(counts, list) else [counts]
    if not counts or not all(type(n) is int and 0 < n <= MOST_GPUS for n in counts):
        raise UserError(f"{place}: gpus must be a list of numbers of GPUs, as [1, 8]")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(entry.get("read"))):
        raise UserError(f"{place}: read must be the day of the price, as 2026-09-20")
    texts = {key: one_line(str(entry.get(key, "?")), 60) for key in _TEXTS}
    return Offer(gpu=name, per_gpu_hour=float(entry["per_gpu_hour"]), gpus=tuple(counts), **texts)


def _is_number(value: Any, most: float) -> bool:
    return isinstance(value, int | float) and value is not True and 0 < value <= most
