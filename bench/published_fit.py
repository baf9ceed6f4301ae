"""Fit the constants of `launcher/forecast/efficiency.py` to published seconds.

    python bench/published_fit.py [--rounds N]

Takes those rows of `published_rows.py` alone that its rule gives for fitting, and moves one
constant after the other by a few percent while that brings predictions closer. Prints the
constants, to be written into efficiency.py by hand, and how far off the rows are then.
"""

import argparse
import dataclasses
import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from published_plan import run_of, time_of
from published_rows import Row, published_rows

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
    *("COMPILED_ELEMENTWISE", "RING_ATTENTION", "FP8_GAIN", "CONTENTION"),
    *("FETCH_HOOK_OPERATORS", "GRADIENT_HOOK_OPERATORS"),
)
OPTIMISM: Final = 1.5
"""A run that takes longer than predicted counts so much more than one that takes less."""
OTHERS_WEIGHT: Final = 4.0
"""Of a row that is not one of llm-foundry's: about as much for all of them as for its 112."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    runs = fitted_runs()
    # They depend on no constant.
    vars(timing)["passes_work"] = _by_identity(passes_work)
    loss = total_loss(runs)
    print(f"{len(runs)} rows: loss {loss:.4f}")
    for number in range(options.rounds):
        for change in (1.15, 1.05) if number == 0 else (1.06, 1.02):
            loss = one_round(runs, loss, change)
        print(f"round {number + 1}: loss {loss:.4f}", flush=True)
    for architecture, value in efficiency.EFFICIENCIES.items():
        print(architecture, value)
    for constant in OF_ALL:
        print(constant, getattr(efficiency, constant))
    others = [(row, run) for row, run in runs if not row.key.startswith("mpt-")]
    tenths = statistics.quantiles((there / said for said, there in pairs(others)), n=10)
    print(
        f"published over predicted, without llm-foundry's: one in ten below {tenths[0]:.2f}, "
        f"one in ten above {tenths[-1]:.2f}"
    )


def fitted_runs() -> list[tuple[Row, Resolved]]:
    """Rows to fit with, and the runs that they are."""
    return [
        (row, run_of(row))
        for row in published_rows()
        if row.fits_constants and row.step_s is not None and not row.unlike_seconds
    ]


def one_round(runs: list[tuple[Row, Resolved]], loss: float, change: float) -> float:
    """Move each constant up or down while that helps."""
    for architecture, fields in OF_ARCHITECTURES.items():
        for field in fields:
            loss = moved(runs, loss, change, partial(_scale, architecture, field))
    for name in OF_ALL:
        loss = moved(runs, loss, change, partial(_scale_constant, name))
    return loss


def moved(
    runs: list[tuple[Row, Resolved]], loss: float, change: float, scale: Callable[[float], None]
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


def total_loss(runs: list[tuple[Row, Resolved]]) -> float:
    """Mean of the logarithms' distances."""
    total = weights = 0.0
    for (row, _), (said, published) in zip(runs, pairs(runs), strict=True):
        weight = 1.0 if row.key.startswith("mpt-") else OTHERS_WEIGHT
        off = math.log(said / published)
        total += weight * (off if off > 0 else -OPTIMISM * off)
        weights += weight
    return total / weights


def pairs(runs: list[tuple[Row, Resolved]]) -> list[tuple[float, float]]:
    """(predicted, published) seconds."""
    return [(time_of(row, run).total_s, row.step_s or 0.0) for row, run in runs]


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
