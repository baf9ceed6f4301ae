"""Where a run begins, from what is on disk."""

import json
from pathlib import Path

import pytest

from launcher.config.schema import LoopChoice
from launcher.errors import UserError
from launcher.measure.records import Status
from launcher.run.folder import RunFolder
from launcher.run.origin import AUTO, Origin, ended_out_of_memory, find_origin

RESTARTED = {"TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that nobody runs any more, without a checkpoint."""
    path = tmp_path / "run"
    RunFolder(path).begin({"steps": 10}, reopens=False)
    return path


def save(run: Path, step: int = 5) -> None:
    (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)


def test_auto_begins_where_there_is_nothing_yet(tmp_path: Path) -> None:
    loop = LoopChoice(out=tmp_path / "new", resume=AUTO)
    assert find_origin(loop, {}) == Origin(source=None, reopens=False)


def test_auto_goes_on_in_the_folder(run: Path) -> None:
    loop = LoopChoice(out=run, resume=AUTO)
    assert find_origin(loop, {}) == Origin(source=None, reopens=True)
    save(run)
    assert find_origin(loop, {}) == Origin(source=run, reopens=True)
    RunFolder(run).write_status(Status(state="completed", phase="end"))
    assert find_origin(loop, {}).over


def test_restarted_ranks_go_on_unasked(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other)
    loop = LoopChoice(out=run, resume=other)
    assert find_origin(loop, {}) == Origin(source=other, reopens=False)
    assert find_origin(loop, RESTARTED) == Origin(source=other, reopens=True)
    save(run)
    assert find_origin(loop, RESTARTED) == Origin(source=run, reopens=True)


def test_what_the_first_life_began_with_is_not_forgotten(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save(other)
    for resume in (str(other), "auto"):  # the second life is reopened before it saves anything
        RunFolder(run).begin({"resume": resume}, reopens=True)
    assert find_origin(LoopChoice(out=run, resume=AUTO), {}).source == other


def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(UserError, match="is not a run folder"):
        find_origin(LoopChoice(out=tmp_path, resume=AUTO), {})


def test_a_living_run_keeps_its_folder(tmp_path: Path) -> None:
    alive = RunFolder(tmp_path / "run")
    alive.begin({}, reopens=False)
    with pytest.raises(UserError, match="in use by a run that is alive"):
        find_origin(LoopChoice(out=alive.path, resume=AUTO), {})


def test_auto_needs_a_folder() -> None:
    with pytest.raises(UserError, match="name it with --out"):
        find_origin(LoopChoice(resume=AUTO), {})


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
        find_origin(elsewhere, {})
    if kind == "loop":
        with pytest.raises(UserError, match=f"--out {run}: its checkpoints cannot be read"):
            find_origin(LoopChoice(out=run, resume=AUTO), {})


def test_a_name_too_long_is_refused(tmp_path: Path) -> None:
    loop = LoopChoice(out=tmp_path / "new", resume=tmp_path / ("x" * 300))
    with pytest.raises(UserError, match="cannot be read"):
        find_origin(loop, {})
