"""Loggers: their figures, resumed runs in the same log, and failures that end no run."""

import importlib.util
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from test_journal import Run

import launcher.measure.loggers
from launcher.measure import loggers
from launcher.measure.loggers import LOGGERS, Loggers, TensorBoard, require_loggers
from launcher.measure.records import EvalRecord, GpuRecord, SampleRecord
from launcher.util.errors import UserError
from launcher.util.sizes import GIB


def test_an_id_is_kept_and_an_empty_one_replaced(tmp_path: Path) -> None:
    """A start that was killed while it wrote one could leave an empty file for good."""
    path = tmp_path / "wandb_run_id"
    path.touch()
    assert loggers._kept_id(path, lambda: "first") == "first"
    assert loggers._kept_id(path, lambda: "second") == path.read_text() == "first"
    assert [*tmp_path.iterdir()] == [path]


ONE_STEP = {
    *("loss/train", "grad_norm", "lr", "tokens_per_s", "step_s", "skipped_steps"),
    *("phase/data_s", "phase/forward_s", "phase/backward_s", "phase/step_s"),
    "memory/resident_set_gib",
}


def points(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, as TensorBoard itself reads its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder / "tb"))
    read.Reload()
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for tag in read.Tags()["scalars"]:
        found[tag] |= {event.step: event.value for event in read.Scalars(tag)}
    assert any("lr: 0.1" in str(text) for text in read.Tensors("config/text_summary"))
    return found


def evaluation(step: int, split: str) -> EvalRecord:
    return EvalRecord(step=step, split=split, loss=2.0, perplexity=7.4, tokens=9, duration_s=0.1)


def test_tensorboard_has_a_point_of_every_figure(tmp_path: Path) -> None:
    run = Run(tmp_path, log_every=1, loggers=("tensorboard",))
    for step in (1, 2, 3):
        run.step(
            step, loss=4.0 / step, applied=step != 2, grad_norm=0.5 if step != 2 else torch.nan
        )
    run.journal.evaluated(evaluation(3, "validation"))
    run.journal.evaluated(evaluation(3, "test"))
    run.journal.close()
    found = points(tmp_path)
    splits = ("loss/validation", "perplexity/validation", "loss/test", "perplexity/test")
    assert set(found) == {*ONE_STEP, *splits}
    assert found["loss/train"] == pytest.approx({1: 4.0, 2: 2.0, 3: 4 / 3})
    assert found["skipped_steps"] == {1: 0, 2: 1, 3: 1}
    assert found["grad_norm"] == {1: 0.5, 3: 0.5}, "what is no number is no point"
    assert found["perplexity/test"] == pytest.approx({3: 7.4})


def test_tensorboard_has_the_texts_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(tmp_path, log_every=1, shown=True, loggers=("tensorboard",))
    run.step(1)
    sample = SampleRecord(step=1, prompt="# To", text=" be\n\x1b[31mnot", tokens=9, duration_s=0.1)
    run.journal.sampled(sample, shown=True)
    run.journal.close()
    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    (event,) = read.Tensors("sample/text_summary")
    assert event.step == 1
    assert event.tensor_proto.string_val == [b"    # To be\n    \x1b[31mnot"]
    assert run.records()[-1] == {
        **{"kind": "sample", "step": 1, "prompt": "# To", "text": " be\n\x1b[31mnot"},
        **{"tokens": 9, "duration_s": 0.1},
    }
    shown = capsys.readouterr().out
    assert r"sample: # To be\n\x1b[31mnot" in shown
    assert "\x1b" not in shown


def test_a_resumed_run_replaces_the_points_it_rolls_back(tmp_path: Path) -> None:
    for first in (1, 3):
        run = Run(tmp_path, log_every=1, loggers=("tensorboard",), reopens=first > 1)
        for step in range(first, 6):
            run.step(step, loss=first)
        run.journal.close()
    assert points(tmp_path)["loss/train"] == {1: 1.0, 2: 1.0, 3: 3.0, 4: 3.0, 5: 3.0}


def test_a_gpu_has_its_readings() -> None:
    sample = GpuRecord(
        t_s=1.0, source="nvml", memory_used_bytes=3 * GIB, power_w=300.0, host_rss_bytes=GIB
    )
    assert loggers.gpu_scalars(sample) == {
        "gpu/power_w": 300.0,
        "gpu/memory_used_gib": 3.0,
        "memory/resident_set_gib": 1.0,
    }
    assert loggers.gpu_scalars(None) == {}
    assert loggers.memory_scalars([None, GIB, 5], 2 * GIB, 3 * GIB) == {
        "memory/allocated_peak_gib": 1.0,
        "memory/reserved_peak_gib": 2.0,
        "memory/device_used_gib": 3.0,
    }
    assert loggers.flops_scalars(5e13, 1e14) == {"tflops_per_device": 50.0, "mfu": 0.5}
    assert loggers.flops_scalars(5e13, None) == {}


def test_a_failing_logger_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tb").write_text("not a folder")
    run = Run(tmp_path, log_every=1, loggers=("tensorboard",), shown=True)
    for step in range(1, 6):
        run.step(step)
    run.journal.close()
    events = [r for r in run.records() if r["kind"] == "event"]
    assert [event["name"] for event in events] == ["logger_failed"]
    assert events[0]["detail"]["logger"] == "tensorboard"
    assert capsys.readouterr().out.count("tensorboard gets no more figures") == 1
    assert [r["step"] for r in run.records() if r["kind"] == "step"] == [1, 2, 3, 4, 5]


def test_a_hanging_logger_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()

    class Hanging(TensorBoard):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            answer.wait()

    monkeypatch.setitem(LOGGERS, "mlflow", Hanging)
    monkeypatch.setattr(launcher.measure.loggers, "CLOSE_WAIT_S", 0.2)
    run = Run(tmp_path, log_every=1, loggers=("mlflow", "tensorboard"))
    for step in (1, 2, 3):
        run.step(step, loss=1.0)
    run.journal.close()
    answer.set()
    events = [r["detail"] for r in run.records() if r["kind"] == "event"]
    assert {"logger": "mlflow", "error": "did not end within 0 s"} in events
    assert [r["step"] for r in run.records() if r["kind"] == "step"] == [1, 2, 3]


def test_a_slow_logger_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, answer = threading.Event(), threading.Event()

    class Slow(TensorBoard):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            started.set()
            answer.wait()

    monkeypatch.setitem(LOGGERS, "mlflow", Slow)
    monkeypatch.setattr(launcher.measure.loggers, "MOST_WAITING", 2)
    logged = Loggers(tmp_path, ["mlflow"], {})
    logged.scalars(1, {"loss/train": 1.0})
    assert started.wait(60)
    for step in range(2, 9):
        logged.scalars(step, {"loss/train": 1.0})
    assert logged.failures() == {"mlflow": "2 entries wait to be sent"}
    logged.close()
    assert logged.failures() == {}
    answer.set()


def missing(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is None or spec.origin is None


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not missing(name):
        pytest.skip(f"{name} is installed")
    (tmp_path / name).mkdir()  # what these leave where they ran is not the package
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError) as refused:
        require_loggers(("tensorboard", name))
    assert f"--report-to {name}: {name} is not installed: pip install" in str(refused.value)
    assert f"[{name}]" in str(refused.value)
    assert len(str(refused.value)) < 300


def log_twice(folder: Path, name: str) -> None:
    assert name in LOGGERS
    folder.mkdir()
    for first in (1, 4):
        logged = Loggers(folder, [name], {"lr": 0.1})
        for step in range(first, first + 3):
            logged.scalars(step, {"loss/train": 1 / step, "gone": float("nan")})
        logged.close()
        assert logged.failures() == {}


@pytest.mark.skipif(missing("wandb"), reason="needs wandb: pip install -e '.[wandb]'")
def test_weights_and_biases_keeps_a_run_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_twice(tmp_path / "run", "wandb")
    kept = list((tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert kept
    assert {path.stem for path in kept} == {
        f"run-{(tmp_path / 'run' / 'wandb_run_id').read_text()}"
    }
    assert all(b"loss/train" in path.read_bytes() for path in kept)
    assert all(b"gone" not in path.read_bytes() for path in kept)


@pytest.mark.skipif(missing("mlflow"), reason="needs mlflow: pip install -e '.[mlflow]'")
def test_mlflow_continues_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    log_twice(tmp_path / "run", "mlflow")
    client = MlflowClient()
    experiment = client.get_experiment_by_name("shardscale")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.status, run.data.params) == ("FINISHED", {"lr": "0.1"})
    points = client.get_metric_history(run.info.run_id, "loss/train")
    assert {point.step: point.value for point in points} == {n: 1 / n for n in range(1, 7)}
    assert "gone" not in run.data.metrics


def test_a_folder_of_a_run_holds_nothing_before_there_are_figures(tmp_path: Path) -> None:
    Loggers(tmp_path, ["tensorboard"], {}).close()
    assert list(tmp_path.iterdir()) == []
