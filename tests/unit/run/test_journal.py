"""What a run leaves behind: lines that plain JSON reads, and small files that are never half."""

import contextlib
import json
import math
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from launcher.config.schema import RunConfig
from launcher.measure import PHASES
from launcher.measure.loggers import Loggers
from launcher.measure.phases import PhaseClock, StepTimes
from launcher.measure.records import SCHEMA_VERSION, EvalRecord, State, Status, Summary
from launcher.parallel.world import World
from launcher.run import record_file
from launcher.run.agreement import Agreement
from launcher.run.console import RunConsole
from launcher.run.journal import Journal
from launcher.run.record_file import rank_files, rewind
from launcher.run.run_folder import RunFolder
from launcher.run.steps import EndedStep, SkippedSteps
from launcher.run.training_record import TrainingRecord
from launcher.util.errors import ExitCode, Failure, UserError

CPU = torch.device("cpu")
STEPS = 5


def run_record() -> TrainingRecord:
    return TrainingRecord(
        run="run",
        rank=0,
        world_size=1,
        hostname="host",
        device="cpu",
        device_name=None,
        strategy="single",
        strategy_also_called="one device",
        precision="fp32",
        model="nano",
        parameters=10,
        matmul_parameters=8,
        flops_per_token=48,
        micro_batch=2,
        accumulation=3,
        global_batch=6,
        seq_len=7,
        steps=STEPS,
        started_unix_s=1.0,
    )


class Run:
    """A journal in a folder, and a way to take steps."""

    def __init__(
        self,
        folder: Path,
        *,
        log_every: int = 2,
        shown: bool = False,
        reopens: bool = False,
        loggers: tuple[str, ...] = (),
    ) -> None:
        self.file = folder / "rank0.jsonl"
        self.clock = PhaseClock(CPU)
        world = World(rank=0, local_rank=0, size=1, local_size=1, device=CPU)
        self.skipped = SkippedSteps(most_in_a_row=3)
        self.journal = Journal(
            folder,
            run_record(),
            world,
            self.clock,
            RunConsole(enabled=shown),
            agreement=Agreement(world, log_every=log_every),
            skipped=self.skipped,
            loggers=Loggers(folder, loggers, {"lr": 0.1}),
            reopens=reopens,
        )

    def step(
        self,
        number: int,
        *,
        loss: float | None = None,
        grad_norm: torch.Tensor | float = 1.5,
        applied: torch.Tensor | bool = True,
    ) -> None:
        for phase in PHASES:
            with self.clock.phase(phase):
                pass
        value = torch.tensor(float(number if loss is None else loss))
        self.journal.step(
            EndedStep(step=number, loss=value, grad_norm=grad_norm, applied=applied, lr=0.1)
        )

    def records(self) -> list[dict[str, Any]]:
        return [strict_json(line) for line in self.file.read_text().splitlines()]


def strict_json(text: str) -> dict[str, Any]:
    """NaN and Infinity are not JSON, though Python reads and writes them."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    record: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return record


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.journal.close()


def test_the_first_line_says_what_the_run_is(run: Run) -> None:
    run.journal.close()
    (first,) = run.records()
    assert first["kind"] == "run"
    assert first["schema_version"] == SCHEMA_VERSION
    assert first["device_name"] is None


def test_each_step_is_a_line_with_what_other_tools_need(run: Run) -> None:
    for number in range(1, STEPS + 1):
        run.step(number)
    steps = [record for record in run.records() if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5]
    assert [record["loss"] for record in steps] == [1.0, 2.0, 3.0, 4.0, 5.0]
    for record in steps:
        assert next(iter(record)) == "kind"
        assert (record["grad_norm"], record["lr"], record["tokens"]) == (1.5, 0.1, 6 * 7)
        assert record["duration_s"] >= sum(record[f"{phase}_s"] for phase in PHASES) > 0
        assert "allocated_peak_bytes" not in record, "a CPU has no allocator to ask"
        assert record["device_used_bytes"] > 0


def test_steps_are_on_disk_at_every_logged_step(run: Run) -> None:
    written = []
    for number in range(1, STEPS + 1):
        run.step(number)
        written.append(sum(record["kind"] == "step" for record in run.records()))
    assert written == [1, 2, 2, 4, 5]  # the first, each second, and the last of the schedule


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_norm_that_is_no_number_is_null(run: Run, norm: torch.Tensor | float) -> None:
    run.step(1, grad_norm=norm)
    assert run.records()[-1]["grad_norm"] is None


def test_a_loss_that_is_no_number_is_null(run: Run) -> None:
    run.step(1, loss=math.nan)
    assert run.records()[-1]["loss"] is None


def test_events_and_evaluations(run: Run) -> None:
    run.journal.event("straggler", 3, rank=1)
    run.journal.evaluated(
        EvalRecord(step=3, split="test", loss=1.0, perplexity=2.7, tokens=99, duration_s=0.5)
    )
    run.journal.close()
    _, event, evaluation = run.records()
    assert (event["kind"], event["name"], event["step"]) == ("event", "straggler", 3)
    assert event["detail"] == {"rank": 1}
    assert (evaluation["kind"], evaluation["split"]) == ("eval", "test")
    assert evaluation["tokens"] == 99


def test_a_journal_does_not_write_into_somebody_elses(run: Run, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        Run(tmp_path)


def test_the_console_line_is_the_one_that_people_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, shown=True)
    run.step(1, grad_norm=math.nan)
    run.journal.close()
    assert re.fullmatch(
        rf"step: 1 of {STEPS}  loss: 1\.0000  grad_norm: nan  lr: 1\.0e-01  "
        r"memory: [\d.]+[MG]iB\([\d.]+%\)  tps: [\d,]+  elapsed: \d+ s\n",
        capsys.readouterr().out,
    )


def test_pandas_reads_the_file(run: Run) -> None:
    pandas = pytest.importorskip("pandas")
    for number in range(1, STEPS + 1):
        run.step(number, grad_norm=math.nan if number == 2 else 1.0)
    table = pandas.read_json(run.file, lines=True)
    steps = table[table["kind"] == "step"]
    assert steps["loss"].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert steps["grad_norm"].isna().tolist() == [False, True, False, False, False]


# The run folder


def test_a_new_folder_says_what_runs_and_where(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "first")
    folder.begin(RunConfig().flat(), reopens=False)
    assert sorted(os.listdir(folder.path)) == [
        *(".lock", "config.yaml", "environment.json", "status.json")
    ]
    assert yaml.safe_load((folder.path / "config.yaml").read_text()) == RunConfig().flat()
    environment = strict_json((folder.path / "environment.json").read_text())
    assert environment["packages"]["torch"] == version("torch")
    assert "environ" not in environment, "variables may hold secrets"
    status = folder.read_status()
    assert status is not None
    assert (status["state"], status["phase"], status["exit_code"]) == ("running", "start", None)


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        RunFolder(tmp_path).begin({}, reopens=False)
    assert os.listdir(tmp_path) == ["note.txt"]


def test_no_status_is_an_empty_one(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).read_status() == {}


def test_a_reader_never_sees_half_of_a_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(Status(state="running", phase="start"))
    done = threading.Event()

    def write() -> None:
        for number in range(200):
            folder.write_status(Status(state="running", phase="train", reason="long " * number))
        folder.write_status(Status(state="completed", phase="end", exit_code=0))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    read = 0
    while not done.is_set():
        status = folder.read_status()  # raises where the file is missing or cut short
        assert status is not None
        assert status["state"] in ("running", "completed")
        read += 1
    writer.join()
    assert read > 0
    assert os.listdir(tmp_path) == ["status.json"], "no temporary file stays"


def claim(folder: RunFolder, error: Exception, *, rank: int, phase: str, code: int) -> bool:
    reason = f"{type(error).__name__}: {error}"
    state: State = "oom" if code == ExitCode.OUT_OF_MEMORY else "failed"
    failed = Status(state=state, phase=phase, reason=reason, rank=rank, exit_code=code)
    return folder.claim_failure(failed, error)


def test_the_first_failure_is_the_one_that_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert claim(folder, ValueError("the cause"), rank=3, phase="forward", code=4)
    later = RuntimeError("a consequence")
    assert not claim(folder, later, rank=0, phase="backward", code=4)
    failure = strict_json((tmp_path / "failure.json").read_text())
    assert (failure["rank"], failure["phase"]) == (3, "forward")
    assert failure["reason"] == "ValueError: the cause"


def test_a_failure_stands_against_a_main_rank_that_has_not_noticed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(Status(state="running", phase="build"))
    assert claim(folder, MemoryError("none left"), rank=1, phase="forward", code=3)
    folder.write_status(Status(state="running", phase="train"))
    status = folder.settle("rank 0 ended with exit code 4", 0)
    assert (status["state"], status["rank"], status["exit_code"]) == ("oom", 1, 3)
    assert status["reason"] == "MemoryError: none left"


def test_a_killed_rank_leaves_the_reason_to_the_agent(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(Status(state="running", phase="train"))
    status = folder.settle("rank 1 ended with killed by SIGKILL", 1)
    assert (status["state"], status["phase"], status["exit_code"]) == ("failed", "train", 4)
    assert "SIGKILL" in status["reason"]


def test_a_second_life_takes_back_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    first = Run(tmp_path, log_every=1)
    for number in (1, 2, 3):
        first.step(number)
    first.journal.close()
    with first.file.open("a") as file:
        file.write('{"kind": "step", "step": 4, "lo')  # killed while writing
    second = Run(tmp_path, log_every=1, reopens=True)
    second.journal.file.rewind(2)
    second.step(3, loss=30.0)
    second.journal.close()
    records = second.records()
    steps = [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]
    assert steps == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [record["kind"] for record in records].count("run") == 2


def test_a_rewind_without_room_is_one_sentence_and_keeps_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text("".join(f'{{"kind": "step", "step": {n}}}\n' for n in range(1, 6)))
    before = path.read_bytes()
    with limited_files(20), pytest.raises(Failure, match=r"back to step 3 \(File too large\)"):
        rewind(path, 3)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewind_that_is_stopped_leaves_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n')
    file = record_file.RecordFile(path, reopens=True)

    def stopped(path: Path, step: int) -> None:
        raise KeyboardInterrupt  # a signal may arrive anywhere in it

    monkeypatch.setattr(record_file, "rewind", stopped)
    with pytest.raises(KeyboardInterrupt):
        file.rewind(1)
    file.add(EvalRecord(step=1, loss=1.0, perplexity=1.0, tokens=1, split="val", duration_s=0.1))
    file.close()
    assert json.loads(path.read_text().splitlines()[-1])["kind"] == "eval"


def test_what_closes_a_run_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    kept = ['{"kind": "eval", "step": 5, "split": "validation"}', '{"kind": "gpu", "t_s": 1.0}']
    gone = ['{"kind": "eval", "step": 5, "split": "test"}', '{"kind": "phase", "period": "steady"}']
    path.write_text("\n".join([*kept, *gone, '{"kind": "ledger", "step": 6}', "", "[1]"]) + "\n")
    rewind(path, 5)
    assert path.read_text().splitlines() == kept


def test_skipped_steps_are_counted_and_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, log_every=1)
    steps: list[torch.Tensor | bool] = [False, False, True, False, torch.tensor(False)]
    for number, applied in enumerate(steps, start=1):
        run.step(number, applied=applied)
    assert run.skipped.total == 4
    with pytest.raises(Failure, match="3 steps in a row were skipped, up to step 6"):
        run.step(6, applied=False)
    run.journal.close()
    written = [record["applied"] for record in run.records() if record["kind"] == "step"]
    assert written == [False, False, True, False, False, False]


@pytest.mark.parametrize("loss", [math.nan, math.inf, 1e9])
def test_a_loss_that_is_of_no_use_counts_though_its_step_was_applied(
    loss: float, tmp_path: Path
) -> None:
    run = Run(tmp_path, log_every=1)
    run.step(1, loss=loss)
    run.step(2)
    run.skipped.refuse_lost()  # it has come back
    run.step(3, loss=loss)
    run.step(4, loss=loss)
    with pytest.raises(Failure, match=r"the loss is \S+ from step 3 on"):
        run.step(5, loss=loss)
    assert run.skipped.total == 0
    run.journal.close()


def test_what_a_checkpoint_speaks_of_is_on_disk_before_it(tmp_path: Path) -> None:
    run = Run(tmp_path, log_every=100)
    for number in range(1, 4):
        run.step(number, applied=number != 3)
    run.journal.secure()
    assert [record["step"] for record in run.records() if record["kind"] == "step"] == [1, 2, 3]
    assert run.skipped.total == 1
    run.journal.close()


def test_only_exact_names_are_files_of_ranks(tmp_path: Path) -> None:
    names = ("rank0.jsonl", "rank12.jsonl", "rank0 (copy).jsonl", "rank.jsonl", "rankx.jsonl")
    for name in names:
        (tmp_path / name).touch()
    assert rank_files(tmp_path) == {n: tmp_path / f"rank{n}.jsonl" for n in (0, 12)}


def test_records_wait_while_the_disk_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, log_every=1)
    run.step(1)
    with limited_files(run.file.stat().st_size + 10):  # ten bytes of a record, then no more
        run.step(2)
        run.step(3)
        trouble = run.journal.file.trouble
        assert trouble == f"{run.file} cannot be written (File too large)"
    run.step(4)
    assert run.journal.file.trouble is None
    assert [record["step"] for record in run.records() if record["kind"] == "step"] == [1, 2, 3, 4]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert "records wait in memory" in said[0]
    with limited_files(run.file.stat().st_size):
        monkeypatch.setattr(record_file, "_MOST_WAITING_BYTES", 100)
        with pytest.raises(Failure, match="no more records can wait"):
            run.step(5)
    run.journal.close()


@contextlib.contextmanager
def limited_files(size_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond that."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_failure_that_could_not_be_written_is_told_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status(Status(state="running", phase="train"))
    with limited_files(0):
        assert claim(folder, ValueError("the cause"), rank=1, phase="forward", code=4)
        folder.write_status(Status(state="failed", phase="forward", reason="ValueError: the cause"))
    assert (tmp_path / "failure.json").read_text() == ""
    said = capsys.readouterr().err
    assert "status.json cannot be written (File too large): the run is failed (ValueError" in said
    status = folder.settle("rank 1 ended with exit code 4", 1)
    assert (status["state"], status["exit_code"]) == ("failed", 4)
    written = folder.read_status()
    assert written is not None
    assert written["state"] == "failed"
    assert not list(tmp_path.glob(".status.json*"))


def test_a_closed_file_of_records_can_be_secured(tmp_path: Path) -> None:
    # A run that a signal stops before its first step has closed it when it records its end.
    file = record_file.RecordFile(tmp_path / "rank0.jsonl", reopens=False)
    file.add(EvalRecord(step=1, loss=1.0, perplexity=1.0, tokens=1, split="val", duration_s=0.1))
    file.close()
    file.flush(durably=True)
    assert '"eval"' in (tmp_path / "rank0.jsonl").read_text()


def test_two_living_runs_never_share_a_folder(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RunFolder(path)
    first.begin({"steps": 1}, reopens=False)
    with pytest.raises(UserError, match=f"in use by a run that is alive .process {os.getpid()} on"):
        RunFolder(path).begin({"steps": 1}, reopens=True)
    with pytest.raises(FileExistsError):
        RunFolder(path).begin({"steps": 1}, reopens=False)


def test_a_reopened_folder_keeps_what_the_first_life_left(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = RunFolder(path)
    first.begin({"steps": 1}, reopens=False)
    claim(first, RuntimeError("broken"), rank=0, phase="step", code=4)
    first.write_summary(Summary(steps=1))
    del first  # its end gives the lock back
    second = RunFolder(path)
    second.begin({"steps": 2}, reopens=True)
    assert not second.has_failed
    assert json.loads((path / "failure-1.json").read_text())["reason"] == "RuntimeError: broken"
    assert json.loads((path / "summary-1.json").read_text())["steps"] == 1
    assert yaml.safe_load((path / "config-1.yaml").read_text()) == {"steps": 1}
    assert yaml.safe_load((path / "config.yaml").read_text()) == {"steps": 2}


def test_times_of_steps_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.measure.phases.LATEST_STEPS", 4)
    times = StepTimes()
    for step in range(1, 11):
        times.add({"data_s": 1, "forward_s": 2, "backward_s": 3, "step_s": 4, "duration_s": step})
    assert (times.count, times.steady) == (10, 8)
    assert times.first_s is not None
    assert (times.first_s["step_s"], times.first_s["duration_s"]) == (4, 1)
    assert times.steady_s["forward_s"] == 16
    assert times.steady_s["duration_s"] == sum(range(3, 11))
    assert list(times.durations_s) == [7, 8, 9, 10]
