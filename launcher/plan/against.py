"""Plan against run: what was predicted for a run, beside what it has measured."""

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from launcher.config.resolve import Resolved
from launcher.errors import UserError
from launcher.measure.hardware import find_gpu
from launcher.measure.limit import lift_limit
from launcher.measure.phases import PhaseTimes
from launcher.measure.records import WARMUP_STEPS
from launcher.memory.ledger import CATEGORIES, Ledger
from launcher.parallel.world import World
from launcher.plan.calibration import Calibration
from launcher.plan.machine import Machine
from launcher.plan.predict import by_category, predict
from launcher.plan.timing import step_seconds
from launcher.sizes import gib
from launcher.strategies import variant_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Against:
    """One rank's peak of live tensors in a step, both ways; bytes."""

    period: str
    predicted: dict[str, int]
    """By category, and in all (`peak`)."""
    measured: dict[str, int]
    predicted_step_s: float | None = None
    measured_step_s: float | None = None
    ledger: Ledger
    """The predicted one, for the rank's records."""

    @property
    def off(self) -> float:
        """Predicted over measured, less 1: positive where too much was predicted."""
        return self.predicted["peak"] / self.measured["peak"] - 1

    def lines(self) -> list[str]:
        """For the end of a run."""
        by_category = ", ".join(
            f"{name} {self.predicted[name] / 2**20:,.1f} / {self.measured[name] / 2**20:,.1f}"
            for name in CATEGORIES
            if self.predicted[name] or self.measured[name]
        )
        return [
            f"predicted {gib(self.predicted['peak'])}, measured {gib(self.measured['peak'])} "
            f"({self.off:+.1%})",
            f"predicted / measured in MiB: {by_category}",
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class NotPredicted:
    """The planner has nothing to say about a run."""

    reason: str

    def lines(self) -> list[str]:
        """For the end of a run."""
        return [f"predicted n/a ({self.reason})"]


def against_run(
    resolved: Resolved,
    world: World,
    peak: Ledger,
    times: Sequence[PhaseTimes],
    *,
    resumed: bool,
) -> Against | NotPredicted:
    """Predict a run that is over, and on a GPU remember what it has taught.

    Nothing that goes wrong in here is worth a run that went well: it is told as the reason.

    Args:
        peak: the measured ledger at the highest moment of a step.
        times: of all steps.
        resumed: the first step found the optimizer's states, which others bring forth.
    """
    period = "first_step" if peak.step == 1 and not resumed else "steady"
    step_times_s = [time.duration_s for time in times[WARMUP_STEPS:]]
    lift_limit(world.device)
    try:
        # A trace of live tensors would count the planner's own.
        with _disable_current_modes():
            return _against(resolved, world, peak, step_times_s, period)
    except UserError as error:
        return NotPredicted(reason=str(error))
    except Exception as error:
        return NotPredicted(reason=f"{type(error).__name__}: {error}".splitlines()[0])


def as_record(outcome: Against | NotPredicted) -> dict[str, Any]:
    """For `summary.json`."""
    values = asdict(outcome)
    if isinstance(outcome, Against):
        values["off"] = outcome.off
        del values["ledger"]  # stands among the records
    return values


def _against(
    resolved: Resolved, world: World, peak: Ledger, step_times_s: Sequence[float], period: str
) -> Against:
    on_gpu = world.device.type == "cuda"
    gpu = torch.cuda.get_device_name(world.device) if on_gpu else None
    prediction = predict(
        resolved,
        world_size=world.size,
        device_type=world.device.type,
        rank=world.rank,
        gpu=find_gpu(gpu),
    )
    measured_step_s = statistics.median(step_times_s) if step_times_s else None
    predicted_step_s = None
    if gpu is not None:
        if known := find_gpu(gpu):
            predicted_step_s = step_seconds(
                resolved,
                world_size=world.size,
                gpus_per_node=world.local_size,
                machine=Machine.of_gpu(known.name, ranks_per_node=world.local_size),
            ).total_s
        _learn(resolved, world, gpu, peak, measured_step_s, predicted_step_s)
    ledger = prediction.peak if period == "steady" else prediction.first_step
    highest = max(size for (when, _), size in prediction.peaks.items() if when == period)
    return Against(
        period=period,
        predicted=by_category(ledger) | {"peak": highest},
        measured=by_category(peak) | {"peak": sum(by_category(peak).values())},
        predicted_step_s=predicted_step_s,
        measured_step_s=measured_step_s,
        ledger=ledger,
    )


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
        outside = context + rest  # in use on the device, less what the allocator has reserved
        calibration.learn_fixed_bytes(gpu, grouped=world.size > 1, size_bytes=outside)
    if measured_s is not None and predicted_s is not None:
        precision = resolved.config.optim.precision
        calibration.learn_time(
            gpu, precision, variant_of(resolved.config).label, ratio=measured_s / predicted_s
        )
    with contextlib.suppress(OSError):  # a cache that cannot be written is no fault of the run
        calibration.save()
