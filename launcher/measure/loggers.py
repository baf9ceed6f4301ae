"""Experiment loggers: TensorBoard, Weights & Biases, MLflow.

A thread per logger writes, so that a slow network or disk never delays a step. A logger that fails
is reported once and dropped; training continues. Figures that were not measured get no tag.
"""

import contextlib
import importlib.util
import math
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from launcher.measure.phases import PhaseTimes
from launcher.measure.records import GpuRecord
from launcher.util.errors import UserError
from launcher.util.files import replace_text
from launcher.util.packages import how_to_install
from launcher.util.sizes import GIB

PROJECT = "shardscale"
CLOSE_WAIT_S = 30.0  # figures not sent by then are dropped
MOST_WAITING = 10_000  # entries of a logger that takes none any more, in bounded memory


class TensorBoard:
    """Event files in the run folder's `tb`."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder / "tb"
        self._config = "\n".join(f"    {name}: {value}" for name, value in config.items())
        self._writer: Any = None

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            self._opened(step).add_scalar(tag, value, step)

    def text(self, step: int, tag: str, text: str) -> None:
        # Indented text is not rendered as Markdown.
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._opened(step).add_text(tag, shown, step)

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Points from `step` on belong to an attempt that was rolled back.
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            self._writer.add_text("config", self._config, step)
        return self._writer

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of $WANDB_PROJECT; $WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            id=_kept_id(folder / "wandb_run_id", lambda: uuid.uuid4().hex),
            resume="allow",
            settings=wandb.Settings(console="off"),  # wandb would wrap stdout
        )
        self._run.config.update(dict(config), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # wandb's own step must increase, but an evaluation follows figures of the same step.
        self._run.log({**values, "step": step})

    def text(self, step: int, tag: str, text: str) -> None:
        self._run.log({tag: text, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of $MLFLOW_EXPERIMENT_NAME at $MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = _kept_id(
            folder / "mlflow_run_id",
            lambda: str(self._client.create_run(experiment, run_name=folder.name).info.run_id),
        )
        for name, value in config.items():
            # Parameters are write-once; an earlier attempt may have logged others.
            with contextlib.suppress(Exception):
                self._client.log_param(self._id, name, str(value)[:500])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        unix_ms = int(time.time() * 1000)
        metrics = [Metric(tag, value, unix_ms, step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, tag: str, text: str) -> None:
        self._client.log_text(self._id, text, f"{tag}/step-{step:08d}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._id)


Logger = TensorBoard | WeightsAndBiases | MLflow
"""A destination of figures, built from the run folder and the config: one step's figures by tag, a
text that the model generated after a step, and the end, which sends all. Any method may fail."""
LOGGERS: dict[str, Callable[[Path, Mapping[str, Any]], Logger]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def require_loggers(names: Sequence[str]) -> None:
    """Check that the package of each logger is installed.

    Raises:
        UserError: it is not.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # The folders `wandb` and `mlflow` that these write are namespace packages, without origin.
        if spec is None or spec.origin is None:
            raise UserError(f"--report-to {name}: {name} is not installed: {how_to_install(name)}")


def _kept_id(path: Path, new: Callable[[], str]) -> str:
    """Return the id that an earlier attempt stored in `path`, or store a new one."""
    known = path.read_text(encoding="utf-8") if path.exists() else ""
    if not known:  # a kill or a full disk left it empty before ids were written as a whole
        replace_text(path, known := new())
    return known


class Loggers:
    """All loggers of a run; empty on every rank but the main one."""

    def __init__(self, folder: Path, names: Sequence[str], config: Mapping[str, Any]) -> None:
        self._writers = [_Writer(name, folder, config) for name in names]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Log one step's finite figures by tag."""
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        for writer in self._writers:
            writer.put(lambda logger: logger.scalars(step, finite))

    def text(self, step: int, tag: str, text: str) -> None:
        """Log a text that the model generated after a step."""
        for writer in self._writers:
            writer.put(lambda logger: logger.text(step, tag, text))

    def close(self) -> None:
        """Send what is buffered, for at most CLOSE_WAIT_S."""
        for writer in self._writers:
            writer.put(None)
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        for writer in self._writers:
            writer.wait(max(0.0, deadline_s - time.monotonic()))

    def failures(self) -> dict[str, str]:
        """Return new failures, logger -> reason; each is returned once."""
        return {w.name: reason for w in self._writers if (reason := w.take_failure()) is not None}


_Entry = Callable[[Logger], None]


class _Writer:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self._folder = folder
        self._config = config
        self._failure: str | None = None
        self._is_full = False
        self._waiting: queue.Queue[_Entry | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._write, name=f"logger-{name}", daemon=True)
        self._thread.start()

    def put(self, entry: _Entry | None) -> None:
        if self._is_full or not self._thread.is_alive():  # the thread ends when it fails
            return
        try:
            self._waiting.put_nowait(entry)
        except queue.Full:
            self._is_full = True
            self._failure = f"{MOST_WAITING:,} entries wait to be sent"

    def wait(self, seconds: float) -> None:
        if self._is_full:
            return
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failure = f"did not end within {CLOSE_WAIT_S:.0f} s"

    def take_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def _write(self) -> None:
        try:
            entry = self._waiting.get()
            if entry is None:
                return  # nothing was logged
            logger = LOGGERS[self.name](self._folder, self._config)
            while entry is not None:
                entry(logger)
                entry = self._waiting.get()
            logger.close()
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or [""]
            self._failure = f"{type(error).__name__}: {lines[0]:.200}"


def time_scalars(times: Sequence[PhaseTimes]) -> dict[str, float]:
    """Return the main rank's mean seconds of a step and its phases since the last logged step."""
    means = {name: fmean(step[name] for step in times) for name in times[0]}
    return {"step_s": means.pop("duration_s")} | {f"phase/{n}": s for n, s in means.items()}


def flops_scalars(flops_per_s: float, peak_flops_per_s: float | None) -> dict[str, float]:
    """TFLOP/s per device and MFU; empty for a device without a known peak."""
    if peak_flops_per_s is None:
        return {}
    return {"tflops_per_device": flops_per_s / 1e12, "mfu": flops_per_s / peak_flops_per_s}


def memory_scalars(
    live_peaks: Sequence[int | None], reserved: int | None, used_bytes: int
) -> dict[str, float]:
    """Return the main rank's peaks, and the highest use of a device (on a CPU: process), in GiB."""
    # Only a GPU has reserved memory.
    live, used = ("allocated_peak", "device_used") if reserved else ("live_peak", "resident_set")
    live_peak = max((peak for peak in live_peaks if peak is not None), default=None)
    sizes = {live: live_peak, "reserved_peak": reserved, used: used_bytes}
    return _gib({f"memory/{name}_gib": size for name, size in sizes.items()})


def gpu_scalars(sample: GpuRecord | None) -> dict[str, float]:
    """Return the readings of the main rank's GPU in its newest sample."""
    if sample is None or sample.source != "nvml":
        return {}
    readings = {
        "gpu/utilization_percent": sample.gpu_utilization_percent,
        "gpu/power_w": sample.power_w,
        "gpu/temperature_c": sample.temperature_c,
    }
    sizes = {
        "gpu/memory_used_gib": sample.memory_used_bytes,
        "memory/resident_set_gib": sample.host_rss_bytes,
    }
    return {tag: value for tag, value in readings.items() if value is not None} | _gib(sizes)


def _gib(sizes: Mapping[str, int | None]) -> dict[str, float]:
    return {tag: size / GIB for tag, size in sizes.items() if size is not None}
