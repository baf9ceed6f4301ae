"""Plan against run: the prediction for a finished run beside its measurement."""

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from launcher.config.resolve import Resolved
from launcher.forecast.calibration import Calibration
from launcher.forecast.machine import Machine
from launcher.forecast.predict import by_category, predict
from launcher.forecast.timing import step_seconds
from launcher.measure.hardware import find_gpu
from launcher.measure.limit import lift_limit
from launcher.parallel.world import World
from launcher.strategies import variant_of
from launcher.strategies.ledger import CATEGORIES, Ledger
from launcher.util.errors import UserError
from launcher.util.sizes import gib


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """Predicted and measured peak of one rank's live tensors in a step, in bytes."""

    period: str
    predicted: dict[str, int]
    """By category, and the total (`peak`)."""
    measured: dict[str, int]
    periods: dict[str, dict[str, int]]
    """Peak bytes of each period known to both, `predicted` and `measured`."""
    predicted_step_s: float | None = None
    measured_step_s: float | None = None

    @property
    def off(self) -> float:
        """Predicted / measured - 1: positive for an overestimate."""
        predicted, measured = self._highest
        return predicted / measured - 1

    @property
    def _highest(self) -> tuple[int, int]:
        """Predicted and measured peak over all periods, or of the ledgers if no period is known."""
        ledgers = {"predicted": self.predicted["peak"], "measured": self.measured["peak"]}
        both = [*self.periods.values()] or [ledgers]
        return max(each["predicted"] for each in both), max(each["measured"] for each in both)

    def lines(self) -> list[str]:
        """Return the closing lines of a run."""
        by_category = ", ".join(
            f"{name} {self.predicted[name] / 2**20:,.1f} / {self.measured[name] / 2**20:,.1f}"
            for name in CATEGORIES
            if self.predicted[name] or self.measured[name]
        )
        predicted, measured = self._highest
        periods = ", ".join(
            f"{name.replace('_', ' ')} {each['predicted'] / 2**20:,.1f} / "
            f"{each['measured'] / 2**20:,.1f}"
            for name, each in self.periods.items()
        )
        return [
            f"predicted {gib(predicted)}, measured {gib(measured)} ({self.off:+.1%})"
            + (f"; peaks in MiB: {periods}" if periods else ""),
            f"predicted / measured in MiB: {by_category}",
        ]


def against_run(
    resolved: Resolved,
    world: World,
    peak: Ledger,
    step_times_s: Sequence[float],
    *,
    peaks: Mapping[tuple[str, str], int],
    resumed: bool,
) -> tuple[list[str], dict[str, Any], Ledger | None]:
    """Predict a finished run, and on a GPU update the calibration; return lines for the console,
    the entry of `summary.json`, and the predicted ledger.

    An error here does not fail a good run: it is the reason why there is no prediction.

    Args:
        peak: the measured ledger at the peak of a step.
        step_times_s: seconds of the latest steps after the warm-up.
        peaks: (period, phase) -> measured peak bytes.
        resumed: the first step did not allocate optimizer states, they were loaded.
    """
    period = "first_step" if peak.step == 1 and not resumed else "steady"
    lift_limit(world.device)
    try:
        # A measuring mode that is still active would count the planner's tensors.
        with _disable_current_modes():
            measured = _by_period(peaks, resumed=resumed)
            found, ledger = _against(resolved, world, peak, step_times_s, period, measured)
    except UserError as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        return found.lines(), asdict(found) | {"off": found.off}, ledger
    return [f"predicted n/a ({reason})"], {"reason": reason}, None


def _by_period(peaks: Mapping[tuple[str, str], int], *, resumed: bool) -> dict[str, int]:
    """Reduce to peaks per period, without a resumed run's first step, which no plan has."""
    found: dict[str, int] = {}
    for (period, _), size_bytes in peaks.items():
        if not (resumed and period == "first_step"):
            found[period] = max(size_bytes, found.get(period, 0))
    return found


def _against(
    resolved: Resolved,
    world: World,
    peak: Ledger,
    step_times_s: Sequence[float],
    period: str,
    peaks: Mapping[str, int],
) -> tuple[Against, Ledger]:
    on_gpu = world.device.type == "cuda"
    gpu = torch.cuda.get_device_name(world.device) if on_gpu else None
    memory_bytes = torch.cuda.get_device_properties(world.device).total_memory if on_gpu else None
    prediction = predict(
        resolved,
        rank=world.rank,
        gpu=find_gpu(gpu),
        memory_bytes=memory_bytes,
    )
    measured_step_s = statistics.median(step_times_s) if step_times_s else None
    predicted_step_s = None
    if gpu is not None:
        if known := find_gpu(gpu):
            predicted_step_s = step_seconds(
                resolved,
                gpus_per_node=world.local_size,
                machine=Machine.of_gpu(known.name, ranks_per_node=world.local_size),
            ).total_s
        _learn(resolved, world, gpu, peak, measured_step_s, predicted_step_s)
    ledger = prediction.peak if period == "steady" else prediction.first_step
    highest = max(size for (when, _), size in prediction.peaks.items() if when == period)
    planned = _by_period(prediction.peaks, resumed=False)
    found = Against(
        period=period,
        periods={
            name: {"predicted": planned[name], "measured": size_bytes}
            for name, size_bytes in peaks.items()
            if name in planned
        },
        predicted=by_category(ledger) | {"peak": highest},
        measured=by_category(peak) | {"peak": sum(by_category(peak).values())},
        predicted_step_s=predicted_step_s,
        measured_step_s=measured_step_s,
    )
    return found, ledger


def _learn(
    resolved: Resolved,
    world: World,
    gpu: str,
    peak: Ledger,
    measured_s: float | None,
    predicted_s: float | None,
) -> None:
    calibration = Calibration.load()
    context, rest = peak.device.context_bytes, peak.device.unexplained_bytes
    if context is not None and rest is not None:
        outside = context + rest  # used on the device beyond what the allocator reserves
        calibration.learn_fixed_bytes(gpu, grouped=world.size > 1, size_bytes=outside)
    if measured_s is not None and predicted_s is not None:
        precision = resolved.config.optim.precision
        calibration.learn_time(
            gpu, precision, variant_of(resolved.config).label, ratio=measured_s / predicted_s
        )
    with contextlib.suppress(OSError):  # a cache that cannot be written does not fail the run
        calibration.save()
