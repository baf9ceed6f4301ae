"""Plans on GPUs that can be rented, ranked by cost."""

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from launcher.config.arguments import parse_run_config
from launcher.forecast.assess import Assessment
from launcher.forecast.candidates import given_fields
from launcher.forecast.cluster import choices_on, find_cluster
from launcher.forecast.evaluation import Search, evaluate
from launcher.forecast.order import best_first
from launcher.forecast.plan_answer import ProgressLine
from launcher.forecast.plan_cli import parse_options
from launcher.measure.hardware import gpu_named
from launcher.tools.rent.prices import OWN, Offer, Prices, read_prices
from launcher.util.errors import ExitCode, UserError
from launcher.util.flags import without
from launcher.util.tables import MUST, Column, print_table, say

TIED: Final = "="
_COLUMNS: Final = (
    Column(title="GPUs", rank=MUST),
    Column(title="cost", rank=MUST, right=True),
    Column(title="hours", rank=MUST, right=True),
    Column(title="provider", rank=MUST),
    Column(title="sharding", rank=2),
    Column(title="kWh", rank=3, right=True),
    Column(title="dearest", rank=4, right=True),
    Column(title="deadline", rank=1),
)


class Rental(NamedTuple):
    """A number of GPUs, and a training on them: ranges are (least, most)."""

    gpu: str
    gpus: int
    offers: tuple[Offer, ...]
    """The cheapest first."""
    sharding: str
    used_bytes: int
    hours: tuple[float, float]
    cost: tuple[float, float]
    """At the cheapest offer."""
    most_kwh: float | None
    """With all GPUs at their board power."""

    @property
    def middle(self) -> float:
        """Return the middle of the cost, by which offers are ranked."""
        return sum(self.cost) / 2

    def in_time(self, deadline_hours: float | None) -> str:
        """Say whether it ends before the deadline."""
        if deadline_hours is None or self.hours[1] <= deadline_hours:
            return "in time"
        return "may be late" if self.hours[0] <= deadline_hours else "late"


def print_rentals(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Plan on each offer and print them by cost; return an exit code."""
    prices = read_prices(options.prices or OWN)
    places = _places(prices, rest)
    found, left_out = _planned(places, prices, options, rest)
    late = [each for each in found if each.in_time(options.deadline_hours) == "late"]
    ranked = [each for each in found if each not in late]
    if options.json:
        print(json.dumps([_record(each, prices, options) for each in ranked], indent=2))
    else:
        _print(ranked, prices, options)
        _print_rest(late, left_out)
    return ExitCode.DONE if ranked else ExitCode.NOTHING_FITS


def _places(prices: Prices, rest: Sequence[str]) -> list[tuple[str, int]]:
    """Return the GPUs and numbers that are offered, in the order of the file.

    Raises:
        UserError: there is none; with those that are offered of that GPU, or other GPUs.
    """
    words = [part for token in rest for part in token.split("=", 1)]
    given = {
        name: words[words.index(name) + 1] for name in ("--gpu", "--gpus") if name in words[:-1]
    }
    gpu = gpu_named(given["--gpu"]).name if "--gpu" in given else None
    offered = dict.fromkeys((offer.gpu, n) for offer in prices.offers for n in offer.gpus)
    found = [
        (name, count)
        for name, count in offered
        if gpu in (None, name) and given.get("--gpus") in (None, str(count))
    ]
    if found:
        return found
    counts = sorted(count for name, count in offered if name == gpu)
    names = dict.fromkeys(name for name, _ in offered)
    others = f"--gpus {' or '.join(map(str, counts))}" if counts else ", ".join(names)
    asked = " ".join(f"{name} {value}" for name, value in given.items())
    raise UserError(f"{asked}: --prices {prices.path.name} has no such offer: it has {others}")


def _planned(
    places: Sequence[tuple[str, int]],
    prices: Prices,
    options: argparse.Namespace,
    rest: Sequence[str],
) -> tuple[list[Rental], dict[str, list[str]]]:
    """Return the rentals by cost, and those that are none by the reason.

    Raises:
        UserError: of all of them, the flags allow none.
    """
    found, left_out, refused = [], dict[str, list[str]](), list[UserError]()
    flags = without(rest, "--gpu", "--gpus")
    with contextlib.closing(ProgressLine()) as line:
        for number, (gpu, count) in enumerate(places):
            line(number, len(places))
            why = "does not fit with room"
            try:
                best = _best([*flags, "--gpu", gpu, "--gpus", str(count)])
            except UserError as error:  # too few GPUs for --tensor-parallel, for example
                refused.append(error)
                best, why = None, str(error)
            if best is None or best.verdict != "fits" or best.time is None:
                left_out.setdefault(why, []).append(f"{count} x {gpu}")
                continue
            found.append(_rental(best, gpu, count, prices, options.tokens))
    if len(refused) == len(places):
        raise refused[0]
    return sorted(found, key=lambda each: each.middle), left_out


def _best(argv: Sequence[str]) -> Assessment | None:
    """Return the fastest way on these GPUs; None where there is none."""
    options, training = parse_options(argv)
    cluster, _ = find_cluster(options)
    config = parse_run_config(training, cluster.world_size)
    search = Search(cluster=cluster, goal="fastest", evaluate_all=False, best_only=True)
    candidates = choices_on(cluster, config, given_fields(training, config))
    assessed, _ = evaluate(candidates, search, lambda *_: None)
    order = best_first([each.merit for each in assessed])
    return assessed[order[0]] if order else None


def _rental(best: Assessment, gpu: str, count: int, prices: Prices, tokens: float) -> Rental:
    assert best.time is not None
    time = best.time
    hours = (tokens / time.most_tokens_per_s / 3600, tokens / time.least_tokens_per_s / 3600)
    fitting = [offer for offer in prices.offers if offer.gpu == gpu and count in offer.gpus]
    offers = tuple(sorted(fitting, key=lambda offer: offer.per_gpu_hour))
    per_hour = count * offers[0].per_gpu_hour
    power = prices.power_w.get(gpu)
    return Rental(
        gpu=gpu,
        gpus=count,
        offers=offers,
        sharding=best.choice.label,
        used_bytes=best.used_bytes,
        hours=hours,
        cost=(per_hour * hours[0], per_hour * hours[1]),
        most_kwh=None if power is None else count * power * hours[1] / 1000,
    )


def _print(ranked: Sequence[Rental], prices: Prices, options: argparse.Namespace) -> None:
    say(
        f"{options.tokens:g} tokens; prices of {prices.dates} in {prices.currency}, on demand, of "
        f"the GPUs alone, from {prices.path.name}: --prices FILE for your own"
    )
    if not ranked:
        return
    rows = []
    for each in ranked:
        tied = each.cost[0] <= ranked[0].cost[1]
        dearest = each.offers[-1].per_gpu_hour / each.offers[0].per_gpu_hour
        rows.append(
            [
                f"{each.gpus} x {each.gpu}",
                _range(each.cost) + (TIED if tied else " "),
                _range(each.hours),
                f"{each.offers[0].provider} {each.offers[0].per_gpu_hour:.2f}",
                each.sharding,
                "-" if each.most_kwh is None else f"{each.most_kwh:,.3g}",
                "-" if len(each.offers) == 1 else f"{dearest:.1f} x",
                each.in_time(options.deadline_hours),
            ]
        )
    print_table(_COLUMNS, rows, otherwise="--json has them all")
    if any(each.most_kwh for each in ranked):
        say("kWh: at most, with every GPU at its board power for the longer time")
    if sum(each.cost[0] <= ranked[0].cost[1] for each in ranked) > 1:
        say(f"{TIED} the range overlaps the cheapest one's: a tie")


def _print_rest(late: Sequence[Rental], left_out: Mapping[str, Sequence[str]]) -> None:
    if late:
        names = ", ".join(f"{each.gpus} x {each.gpu} ({_range(each.hours)} h)" for each in late)
        say(f"later than the deadline: {names}")
    for reason, places in left_out.items():
        say(f"{', '.join(places)}: {reason}")


def _range(values: tuple[float, float]) -> str:
    return f"{_three(values[0])}-{_three(values[1])}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _record(each: Rental, prices: Prices, options: argparse.Namespace) -> dict[str, Any]:
    return each._asdict() | {
        "currency": prices.currency,
        "deadline": each.in_time(options.deadline_hours),
        "offers": [offer._asdict() for offer in each.offers],
    }
