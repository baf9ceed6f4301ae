"""Fit the constants of `launcher/forecast/efficiency.py` to measured seconds.

    python bench/published_fit.py [--rounds N]

Takes those rows of `published_rows.py` alone that its rule gives for fitting, and by the same rule
runs of `bench/gpu/plan.py` on an H200. Moves one constant after the other by a few percent while
that brings predictions closer. Prints the constants, to be written into efficiency.py by hand, and
how far off the rows are then.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from gpu_planned import resolved_of, seconds_of
from gpu_results import measured
from published_plan import run_of, time_of
from published_rows import Row, published_rows, to_fit

from launcher.config.resolve import Resolved
from launcher.forecast import efficiency, on_gpu, timing
from launcher.forecast.efficiency import Architecture
from launcher.forecast.work import passes_work

# Without published runs to tell them apart, the other constants keep their sources' values.
OF_ARCHITECTURES: Final[dict[Architecture, tuple[str, ...]]] = {
    "ampere": ("matmul", "attention", "elementwise"),
    "hopper": ("matmul", "attention", "elementwise", "operator_s"),
    "volta": ("elementwise", "operator_s"),
    "blackwell": ("matmul", "attention"),
}
OF_ALL: Final = (
    *("FUSED_RATE", "RING_ATTENTION", "FP8_GAIN", "CONTENTION"),
    *("FETCH_HOOK_OPERATORS", "GRADIENT_HOOK_OPERATORS"),
)
OPTIMISM: Final = 1.5
"""A run that takes longer than predicted counts so much more than one that takes less."""
OTHERS_WEIGHT: Final = 4.0
"""Of a row that is not one of llm-foundry's: about as much for all of them as for its 112."""


HOST_BOUND: Final = frozenset(
    {
        *("default/small", "default/small-eager", "decoders/phi3-selective"),
        *("decoders/mixtral-default", "decoders/mixtral-fsdp", "decoders/mixtral-zero3"),
        *("decoders/gpt_oss-default", "strategies/zero2", "strategies/zero3", "strategies/fsdp"),
        "strategies/optimizer-offloaded",
    }
)
"""Runs on the H200 that its slow host bounds, or small kernels; named with their times in view."""


class Fitted(NamedTuple):
    """A measured step, and what is predicted for it."""

    predict: Callable[[], float]
    measured_s: float
    weight: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    runs = list(fitted_runs())
    # They depend on no constant.
    vars(timing)["passes_work"] = _by_identity(passes_work)
    loss = total_loss(runs)
    print(f"{len(runs)} runs: loss {loss:.4f}")
    for number in range(options.rounds):
        for change in (1.15, 1.05) if number == 0 else (1.06, 1.02):
            loss = one_round(runs, loss, change)
        print(f"round {number + 1}: loss {loss:.4f}", flush=True)
    for architecture, value in efficiency.EFFICIENCIES.items():
        print(architecture, value)
    for constant in OF_ALL:
        print(constant, getattr(efficiency, constant))
    others = (run.measured_s / run.predict() for run in runs if run.weight > 1.0)
    tenths = statistics.quantiles(others, n=10)
    print(
        f"measured over predicted, without llm-foundry's: one in ten below {tenths[0]:.2f}, "
        f"one in ten above {tenths[-1]:.2f}"
    )


def fitted_runs() -> Iterator[Fitted]:
    """Runs to fit with: published ones, and our own."""
    for row in published_rows():
        if row.fits_constants and row.step_s is not None and not row.unlike_seconds:
            weight = 1.0 if row.key.startswith("mpt-") else OTHERS_WEIGHT
            yield Fitted(partial(_published_s, row, run_of(row)), row.step_s, weight)
    for record in measured():
        if to_fit(record["part"]) and record["part"] not in HOST_BOUND:
            run = resolved_of(record)
            yield Fitted(partial(seconds_of, run), record["step_s"], OTHERS_WEIGHT)


def _published_s(row: Row, run: Resolved) -> float:
    return time_of(row, run).total_s


def one_round(runs: Sequence[Fitted], loss: float, change: float) -> float:
    """Move each constant up or down while that helps."""
    for architecture, fields in OF_ARCHITECTURES.items():
        for field in fields:
            loss = moved(runs, loss, change, partial(_scale, architecture, field))
    for name in OF_ALL:
        loss = moved(runs, loss, change, partial(_scale_constant, name))
    return loss


def moved(
    runs: Sequence[Fitted], loss: float, change: float, scale: Callable[[float], None]
) -> float:
    """The least loss along one constant."""
    for factor in (change, 1 / change):
        while True:
            scale(factor)
            now = total_loss(runs)
            if now >= loss - 1e-6:
                scale(1 / factor)
                break
            loss = now
    return loss


def total_loss(runs: Sequence[Fitted]) -> float:
    """Mean of the logarithms' distances."""
    if max(efficiency.CONTENTION, efficiency.FUSED_RATE) > 1.0:
        return math.inf  # shares
    total = 0.0
    for predict, measured_s, weight in runs:
        off = math.log(predict() / measured_s)
        total += weight * (off if off > 0 else -OPTIMISM * off)
    return total / sum(run.weight for run in runs)


def _scale(architecture: Architecture, field: str, factor: float) -> None:
    known = efficiency.EFFICIENCIES
    value = factor * getattr(known[architecture], field)
    known[architecture] = dataclasses.replace(known[architecture], **{field: value})


def _scale_constant(name: str, factor: float) -> None:
    value = factor * getattr(efficiency, name)
    for module in (efficiency, on_gpu, timing):
        if hasattr(module, name):
            setattr(module, name, value)


def _by_identity(function: Callable[[Resolved], Any]) -> Callable[[Resolved], Any]:
    known: dict[int, Any] = {}

    def remembered(run: Resolved) -> Any:
        if id(run) not in known:
            known[id(run)] = function(run)
        return known[id(run)]

    return remembered


if __name__ == "__main__":
    main()
