"""Boards that show a run's figures while it trains: TensorBoard, Weights & Biases, MLflow.

Each is written by a thread of its own, so a slow network or disk holds up no step. One that fails
is said once and left out from then on: training does not depend on who looks on.
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
from typing import Any, Protocol

from launcher.errors import UserError
from launcher.extras import how_to_install

PROJECT = "shardscale"
CLOSE_WAIT_S = 30.0  # what is not sent by then is left behind


class Board(Protocol):
    """Where figures go; any method may fail."""

    def config(self, values: Mapping[str, Any]) -> None:
        """What the run is, before the first scalars."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Figures of one step, by tag."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files in the run folder's `tb`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tb"
        self._config = ""
        self._writer: Any = None

    def config(self, values: Mapping[str, Any]) -> None:
        self._config = "\n".join(f"    {name}: {value}" for name, value in values.items())

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # Later points are an earlier attempt's.
            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            self._writer.add_text("config", self._config, step)
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """A run of $WANDB_PROJECT; $WANDB_MODE=offline keeps it in the run folder."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            dir=str(folder),
            id=_kept_id(folder / "wandb_run_id", lambda: uuid.uuid4().hex),
            resume="allow",
            settings=wandb.Settings(console="off"),  # the console is ours
        )

    def config(self, values: Mapping[str, Any]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        # Their own step must grow, but an evaluation comes after the figures of the same step.
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """A run of $MLFLOW_EXPERIMENT_NAME at $MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path) -> None:
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._id = _kept_id(
            folder / "mlflow_run_id",
            lambda: str(self._client.create_run(experiment, run_name=folder.name).info.run_id),
        )

    def config(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            # A parameter is written once; an earlier attempt may have, with other --steps.
            with contextlib.suppress(Exception):
                self._client.log_param(self._id, name, str(value)[:500])

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        unix_ms = int(time.time() * 1000)
        metrics = [Metric(tag, value, unix_ms, step) for tag, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


BOARDS: dict[str, Callable[[Path], Board]] = {
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
            writer.put((step, finite))

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


class _Writer:
    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.name = name
        self._folder = folder
        self._config = config
        self._failure: str | None = None
        self._left: queue.SimpleQueue[tuple[int, Mapping[str, float]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name=f"board-{name}", daemon=True)
        self._thread.start()

    def put(self, figures: tuple[int, Mapping[str, float]] | None) -> None:
        if self._thread.is_alive():  # it ends when it fails
            self._left.put(figures)

    def wait(self, seconds: float) -> None:
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._failure = f"did not end within {CLOSE_WAIT_S:.0f} s"

    def take_failure(self) -> str | None:
        failure, self._failure = self._failure, None
        return failure

    def _write(self) -> None:
        try:
            figures = self._left.get()
            if figures is None:
                return  # nobody had anything to show
            board = BOARDS[self.name](self._folder)
            board.config(self._config)
            while figures is not None:
                board.scalars(*figures)
                figures = self._left.get()
            board.close()
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines() or [""]
            self._failure = f"{type(error).__name__}: {lines[0]:.200}"
