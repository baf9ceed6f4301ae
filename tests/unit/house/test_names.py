"""Names that others have, too: a folder `model` where the user works, the package index."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import check_run_folder, resolve
from launcher.run.run_folder import (
    RunFolder,
    default_run_folder,
    release_run_folder,
    reserve_run_folder,
)
from launcher.tools.exchange import import_cli
from launcher.util.errors import UserError
from launcher.util.packages import how_to_install

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("theirs", ["model.py", "model/__init__.py"])
def test_the_decoder_is_ours_where_the_working_folder_has_a_model(
    tmp_path: Path, theirs: str
) -> None:
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("raise SystemExit('the model of the user')\n")
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import launcher.model.gpt as g, os; print(os.path.realpath(g.__file__))",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == str(ROOT / "model" / "gpt.py"), done.stderr


def test_what_is_installed_comes_from_this_source_tree() -> None:
    assert how_to_install("hf") == f"pip install -e '{ROOT}[hf]'"


def test_the_old_script_name_still_works_and_says_the_new_one() -> None:
    script = Path(sys.executable).with_name("memscale")
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "shardscale VERB" in done.stdout
    assert "memscale is its old name" in done.stderr


def test_a_name_that_is_too_long_for_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert import_cli.main([str(tmp_path / ("x" * 300)), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "is too long: give a shorter one" in error


def test_a_run_folder_is_named_after_the_longest_model(tmp_path: Path) -> None:
    resolved = resolve(parse_run_config([]), world_size=1, device_type="cpu")
    config = resolved.config.replace(model="custom", init_from=tmp_path / ("\u00e9" * 127))
    name = default_run_folder(replace(resolved, config=config)).name
    assert len(name.encode()) <= 255
    assert "\u00e9" * 75 in name


def test_runs_that_start_together_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One on each GPU, or tasks of an array: agents choose names seconds before ranks start."""
    monkeypatch.chdir(tmp_path)
    resolved = resolve(parse_run_config([]), world_size=1, device_type="cpu")
    folders = [reserve_run_folder(resolved) for _ in range(3)]
    assert len({*folders}) == 3
    for folder in folders:
        check_run_folder(folder, may_be_empty=True)
        with pytest.raises(UserError, match="already exists"):
            check_run_folder(folder)
    run, other = RunFolder(folders[0]), RunFolder(folders[0])
    run.begin({}, reopens=False)
    with pytest.raises(FileExistsError):
        other.begin({}, reopens=False)
    for folder in folders:
        release_run_folder(folder)
    assert [*(tmp_path / "runs").iterdir()] == [tmp_path / folders[0]]
