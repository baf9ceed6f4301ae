"""Boards that show a run's figures while it trains, and its texts: TensorBoard, W&B, MLflow.

Each is written by a thread of its own, so a slow network or disk holds up no step. One that fails
is said once and left out from then on: training does not depend on who looks on. What nobody could
measure has no tag.
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
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from launcher.measure.phases import PhaseTimes
from launcher.measure.records import GpuRecord
from launcher.util.errors import UserError
from launcher.util.packages import how_to_install
from launcher.util.sizes import GIB

PROJECT = "shardscale"
CLOSE_WAIT_S = 30.0  # what is not sent by then is left behind


class Board(Protocol):
    """Where figures go, made of the run folder and what the run is; any method may fail."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by tag."""

    def text(self, step: int, tag: str, text: str) -> None:
        """What the model has written after a step."""

    def close(self) -> None:
        """Send what is left."""


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
        # Indented, it is no Markdown.
        shown = "\n".join(f"    {line}" for line in text.splitlines())
        self._opened(step).add_text(tag, shown, step)

    def _opened(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Later points are an earlier attempt's.
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
            settings=wandb.Settings(console="off"),  # the console is ours
        )
        self._run.config.update(dict(config), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # Their own step must grow, but an evaluation comes after the figures of the same step.
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
            # A parameter is written once; an earlier attempt may have, with other --steps.
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


BOARDS: dict[str, Callable[[Path, Mapping[str, Any]], Board]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
}


def require_boards(names: Sequence[str]) -> None:
    """Refuse before anything starts.

    Raises:
        UserError: the package of a board is not installed.
    """
    for name in names:
        spec = importlib.util.find_spec(name)
        # A folder `wandb` or `mlflow`, which these leave behind, is not the package.
        if spec is None or spec.origin is None:
            raise UserError(f"--board {name}: {name} is not installed: {how_to_install(name)}")


def _kept_id(path: Path, new: Callable[[], str]) -> str:
    """The id under which an earlier attempt of the run went to this board, or a new one."""
    if not path.exists():
        path.write_text(new(), encoding="utf-8")
    return path.read_text(encoding="utf-8")


class Boards:
    """All boards of a run; on every rank but the main one there are none."""

    def __init__(self, folder: Path, names: Sequence[str], config: Mapping[str, Any]) -> None:
        self._writers = [_Writer(name, folder, config) for name in names]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by tag, to every board; what is not finite is left out."""
        finite = {tag: value for tag, value in values.items() if math.isfinite(value)}
        for writer in self._writers:
            writer.put(lambda board: board.scalars(step, finite))

    def text(self, step: int, tag: str, text: str) -> None:
        """What the model has written after a step, to every board."""
        for writer in self._writers:
            writer.put(lambda board: board.text(step, tag, text))

    def close(self) -> None:
        """Send what is left, for as long as that may take."""
        for writer in self._writers:
            writer.put(None)
        deadline_s = time.monotonic() + CLOSE_WAIT_S
        for writer in self._writers:
            writer.wait(max(0.0, deadline_s - time.monotonic()))

    def failures(self) -> dict[str, str]:
        """Board -> why it is left out; each is told once."""
        return {w.name: told for w in self._writers if (told := w.take_failure()) is not None}


_Showing = Callable[[Board], None]


class _Writer:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self._folder = folder
        self._config = config
        self._failure: str | None = None
        self._left: queue.SimpleQueue[_Showing | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=f"board-{name}", daemon=True)
        self._thread.start()

    def put(self, showing: _Showing | None) -> None:
        if self._thread.is_alive():  # it ends when it fails
            self._left.put(showing)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failure = f"did not end within {CLOSE_WAIT_S:.0f} s"

    def take_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def _write(self) -> None:
        try:
            showing = self._left.get()
            if showing is None:
                return  # nobody had anything to show
            board = BOARDS[self.name](self._folder, self._config)
            while showing is not None:
                showing(board)
                showing = self._left.get()
            board.close()
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or [""]
            self._failure = f"{type(error).__name__}: {lines[0]:.200}"


def of_time(times: Sequence[PhaseTimes]) -> dict[str, float]:
    """Seconds of a step and of its phases on the main rank, mean since the last logged step."""
    spent = [asdict(step) for step in times]
    means = {name: fmean(step[name] for step in spent) for name in spent[0]}
    return {"step_s": means.pop("duration_s")} | {f"phase/{n}": s for n, s in means.items()}


def of_flops(flops_per_s: float, peak_flops_per_s: float | None) -> dict[str, float]:
    """Per device, where the device's peak is known."""
    if peak_flops_per_s is None:
        return {}
    return {"tflops_per_device": flops_per_s / 1e12, "mfu": flops_per_s / peak_flops_per_s}


def of_memory(
    live_peaks: Sequence[int | None], reserved: int | None, used_bytes: int
) -> dict[str, float]:
    """The main rank's peaks, and what the worst device (on a CPU: process) uses."""
    # Only a GPU has reserved memory.
    live, used = ("allocated_peak", "device_used") if reserved else ("live_peak", "resident_set")
    live_peak = max((peak for peak in live_peaks if peak is not None), default=None)
    sizes = {live: live_peak, "reserved_peak": reserved, used: used_bytes}
    return _gib({f"memory/{name}_gib": size for name, size in sizes.items()})


def of_sample(sample: GpuRecord | None) -> dict[str, float]:
    """The main rank's GPU at the newest sample."""
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
