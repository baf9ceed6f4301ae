"""Files that are replaced whole, and folders that their processes have locked."""

import fcntl
import tempfile
from pathlib import Path

import pytest

from launcher.util import files


def test_a_folder_stays_when_others_tidy_up_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lock = fcntl.flock

    def late(file: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        files._remove_abandoned()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with files.scratch_folder("test") as folder:
        assert folder.name.startswith("shardscale-test-")
        assert (folder / files._SCRATCH).is_file()
        files._remove_abandoned()
        assert files.FolderLock(folder, files._SCRATCH).holder() is not None
    assert not list(tmp_path.iterdir())


def test_a_dead_processes_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "shardscale-dead").mkdir()
    (tmp_path / "shardscale-dead" / files._SCRATCH).touch()
    with files.scratch_folder("test") as folder:
        assert list(tmp_path.iterdir()) == [folder]


def test_a_run_folder_in_the_temporary_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = tmp_path / "shardscale-first"
    (run / "checkpoints").mkdir(parents=True)
    with (run / ".lock").open("w"):  # as an ended run, or sweep, leaves it
        pass
    with files.scratch_folder("test"):
        assert (run / "checkpoints").is_dir()


def test_a_files_text_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "config.yaml", []

    def sync(file: Path) -> None:
        synced.append((file.read_text(), path.exists()))

    monkeypatch.setattr(files, "sync", sync)
    files.replace_text(path, "steps: 10")
    assert synced == [("steps: 10", False)]
    assert path.read_text() == "steps: 10"
