"""Where a run begins, from what is on disk."""

import errno
import fcntl
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.config.schema import LoopChoice
from launcher.measure.records import Status
from launcher.parallel.world import OWN_AGENT, choose_device
from launcher.run import run_folder
from launcher.run.resume import (
    AUTO,
    Resume,
    _copy_inputs,
    agent_id,
    check_launch,
    ended_out_of_memory,
    find_resume,
    has_our_run,
    launch_record,
)
from launcher.run.run_folder import RunFolder
from launcher.util.errors import UserError

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}
REQUEUED = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run that nobody runs any more, without a checkpoint: begun by this process
    in job 7."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = tmp_path / "run"
    launch = launch_record([agent_id(), "node2 5 9"])
    RunFolder(path).begin({"steps": 10}, reopens=False, launch=launch)
    monkeypatch.delenv("SLURM_JOB_ID")
    return path


def save(run: Path, step: int = 5) -> None:
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_auto_begins_where_there_is_nothing_yet(tmp_path: Path) -> None:
    loop = LoopChoice(out=tmp_path / "new", resume=AUTO)
    assert find_resume(loop, {}) == Resume(source=None, reopens=False)


def test_auto_goes_on_in_the_folder(run: Path) -> None:
    loop = LoopChoice(out=run, resume=AUTO)
    assert find_resume(loop, {}) == Resume(source=None, reopens=True)
    save(run)
    assert find_resume(loop, {}) == Resume(source=run, reopens=True)
    RunFolder(run).write_status(Status(state="completed", phase="end"))
    assert find_resume(loop, {}).completed


def test_restarted_ranks_go_on_unasked(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other)
    loop = LoopChoice(out=run, resume=other)
    assert find_resume(loop, {}) == Resume(source=other, reopens=False)
    assert find_resume(loop, RESTARTED) == Resume(source=other, reopens=True)
    save(run)
    assert find_resume(loop, RESTARTED) == Resume(source=run, reopens=True)


@pytest.mark.parametrize(
    ("environment", "goes_on"),
    [
        (RESTARTED, True),
        (REQUEUED, True),
        (REQUEUED | RESTARTED, True),  # killed before it could say that it goes on
        (REQUEUED | {"SLURM_JOB_ID": "8"}, False),
        ({"SLURM_RESTART_COUNT": "1"}, False),
        (RESTARTED | {"SLURM_JOB_ID": "7"}, True),
    ],
)
def test_a_restart_goes_on_with_what_its_launch_began(
    environment: dict[str, str], goes_on: bool, run: Path
) -> None:
    save(run)
    loop = LoopChoice(out=run)
    if goes_on:
        assert find_resume(loop, environment) == Resume(source=run, reopens=True)
    else:
        with pytest.raises(UserError, match="another start took this folder first"):
            find_resume(loop, environment)
    assert find_resume(LoopChoice(out=run, resume=AUTO), environment).reopens


def test_of_several_nodes_one_agent_that_stays_is_enough(run: Path) -> None:
    many = RESTARTED | {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    loop = LoopChoice(out=run)
    assert find_resume(loop, many).reopens  # the others' agents are not known yet
    check_launch(run, ["node2 5 9", "node3 1 1"], many)
    for strangers in (["node3 1 1"], ["node2 5 10"], []):
        with pytest.raises(UserError, match="another start took this folder first"):
            check_launch(run, strangers, many)


@pytest.mark.parametrize("kept", [None, "", "{}", '{"launch": 3}', '{"launch": {"agents": "a"}}'])
def test_a_launch_that_is_not_known_is_anothers(kept: str | None, run: Path) -> None:
    path = run / "environment.json"
    path.unlink() if kept is None else path.write_text(kept)
    with pytest.raises(UserError, match="another start took this folder first"):
        find_resume(LoopChoice(out=run), RESTARTED)


def test_what_the_first_life_began_with_is_not_forgotten(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other)
    for resume in (str(other), "auto"):  # the second life is reopened before it saves anything
        RunFolder(run).begin({"resume": resume}, reopens=True)
    assert find_resume(LoopChoice(out=run, resume=AUTO), {}).source == other


def test_the_latest_start_that_named_weights_counts(tmp_path: Path) -> None:
    """Rejected starts have left their flags there, each with another --resume, or with none."""
    run = tmp_path / "run"
    for number, resume in enumerate([None, "a", "b", "c", "d", None, "e", "auto"]):
        config = {} if resume is None else {"resume": resume}  # as RunConfig leaves None out
        RunFolder(run).begin({"steps": 10} | config, reopens=number > 0)
    found = find_resume(LoopChoice(out=run, resume=AUTO), {})
    assert found == Resume(source=Path("e"), reopens=True)
    RunFolder(run).begin({"steps": 10}, reopens=True)
    assert find_resume(LoopChoice(out=run, resume=AUTO), {}).source is None


def test_a_start_that_ends_while_it_reopens_a_run_leaves_a_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with other flags does, killed while it asks for its GPUs, or on a full disk."""
    save(run)
    ends = {"replace_text": OSError("No space left on device"), "environment": KeyboardInterrupt()}
    for name, error in ends.items():
        folder = RunFolder(run)
        with monkeypatch.context() as patched:
            patched.setattr(run_folder, name, raising(error))
            with pytest.raises(type(error)):
                folder.begin({"steps": 20}, reopens=True)
        assert folder._lock._file is not None
        folder._lock._file.close()  # as its process ends
    assert find_resume(LoopChoice(out=run, resume=AUTO), {}).source == run
    RunFolder(run).begin({"steps": 20}, reopens=True)
    assert (run / "config.yaml").read_text() == "steps: 20\n"
    assert (run / "config-1.yaml").read_text() == "steps: 10\n"


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(UserError, match="is not a run folder"):
        find_resume(LoopChoice(out=tmp_path, resume=AUTO), {})


def test_a_living_run_keeps_its_folder(tmp_path: Path) -> None:
    alive = RunFolder(tmp_path / "run")
    alive.begin({}, reopens=False)
    with pytest.raises(UserError, match="in use by a run that is alive"):
        find_resume(LoopChoice(out=alive.path, resume=AUTO), {})


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_takes_runs(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", raising(OSError(number, os.strerror(number))))
    run = RunFolder(tmp_path / "run")
    run.begin({}, reopens=False)
    assert run.is_ours
    loop = LoopChoice(out=run.path, resume=AUTO)
    assert find_resume(loop, {}) == Resume(source=None, reopens=True)
    run.begin({}, reopens=True)


def test_auto_needs_a_folder() -> None:
    with pytest.raises(UserError, match="name it with --out"):
        find_resume(LoopChoice(resume=AUTO), {})


def test_only_a_restart_asks_how_the_run_ended(run: Path) -> None:
    assert not ended_out_of_memory(run, RESTARTED)
    (run / "status.json").write_text(json.dumps({"state": "oom", "exit_code": 3}))
    assert ended_out_of_memory(run, RESTARTED)
    assert not ended_out_of_memory(run, {})


@pytest.mark.parametrize("kind", ["loop", "file"])
def test_checkpoints_that_are_no_folder(run: Path, tmp_path: Path, kind: str) -> None:
    place = run / "checkpoints"
    place.symlink_to(place) if kind == "loop" else place.write_text("")
    elsewhere = LoopChoice(out=tmp_path / "new", resume=run)
    what = "cannot be read" if kind == "loop" else "holds no checkpoint"
    with pytest.raises(UserError, match=f"--resume {run}: {what}"):
        find_resume(elsewhere, {})
    if kind == "loop":
        with pytest.raises(UserError, match=f"--out {run}: its checkpoints cannot be read"):
            find_resume(LoopChoice(out=run, resume=AUTO), {})


def test_a_name_too_long_is_refused(tmp_path: Path) -> None:
    loop = LoopChoice(out=tmp_path / "new", resume=tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="cannot be read"):
        find_resume(loop, {})


def test_a_run_that_was_refused_before_it_saved_leaves_its_folder_to_the_next(run: Path) -> None:
    RunFolder(run).write_status(Status(state="failed", phase="build", exit_code=2))
    loop = LoopChoice(out=run)
    assert find_resume(loop, {}) == Resume(source=None, reopens=True)
    save(run)
    assert find_resume(loop, {}) == Resume(source=None, reopens=False)  # refused, as any other is


@pytest.mark.parametrize(
    ("environment", "own"),
    [
        ({"RANK": "1", "SLURM_GPUS_PER_TASK": "1"}, True),
        ({"RANK": "1", "SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=1"}, True),
        ({"RANK": "1", "SLURM_GPUS_PER_TASK": "a100:1"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_GPUS_PER_TASK": "1"}, False),  # torchrun's agent
        ({"RANK": "1", "SLURM_GPUS_PER_TASK": "1", "TORCHELASTIC_RUN_ID": "a"}, False),
    ],
)
def test_a_task_of_slurm_that_sees_its_own_gpu_only(
    environment: dict[str, str], own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    if own:
        assert choose_device("auto", 4) == "cuda"
    else:
        with pytest.raises(UserError, match="has 1 GPU for 4 ranks"):
            choose_device("auto", 4)


def test_an_earlier_run_on_a_nodes_own_disk_is_not_the_shared_folder(tmp_path: Path) -> None:
    assert not has_our_run(tmp_path / "none")
    for agent, seen in (("another 1 2", False), (agent_id(), True)):
        run = tmp_path / agent
        RunFolder(run).begin({}, reopens=False, launch=launch_record([agent]))
        assert has_our_run(run) == seen


def test_a_changing_number_of_nodes_needs_resume_auto(tmp_path: Path) -> None:
    """torch restarts the ranks then, and counts no restart."""
    environment = {OWN_AGENT: "1:2"}
    for out in (None, tmp_path / "run"):
        with pytest.raises(UserError, match="--nnodes 1:2: give --out and --resume auto"):
            find_resume(LoopChoice(out=out), environment)
    found = find_resume(LoopChoice(out=tmp_path / "run", resume=AUTO), environment)
    assert found == Resume(source=None, reopens=False)


def test_a_full_disk_leaves_the_tokenizer_of_a_resumed_run(tmp_path: Path) -> None:
    kept, given = tmp_path / "tokenizer.json", tmp_path / "given.json"
    kept.write_text("{}")
    given.write_text(json.dumps({"model": "a" * 100}))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            _copy_inputs(tmp_path, None, given, "bpe")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert kept.read_text() == "{}"
    _copy_inputs(tmp_path, None, given, "bpe")
    assert kept.read_text() == given.read_text()
