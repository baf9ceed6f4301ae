"""Names that others have, too: a folder `model` where the user works, the package index."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.packages import how_to_install

ROOT = Path(__file__).parents[2]


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


def test_the_wheel_has_what_it_needs_under_one_top_level_name(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", tmp_path, ROOT], check=True, timeout=120)
    names = zipfile.ZipFile(next(tmp_path.glob("shardscale-*.whl"))).namelist()
    for carried in ("model/attention/flex.py", "submit/scripts/train.sbatch", "py.typed"):
        assert f"launcher/{carried}" in names
    assert "launcher/strategies/zero/ds_configs/zero2.json" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "launcher",
        "shardscale",
    }
