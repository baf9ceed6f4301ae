"""Packages, their description, the citation and the forms of issues."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from launcher.strategies import STRATEGIES

ROOT = Path(__file__).parents[3]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WHEEL = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return what a wheel is made of, at times that are not the checkout's."""
    for name in ("launcher", "shardscale", "model", "ds_configs", "slurm"):
        shutil.copytree(
            ROOT / name,
            tmp_path / "tree" / name,
            symlinks=True,
            copy_function=shutil.copyfile,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    return tmp_path / "tree"


def test_a_checkout_without_links_builds_no_wheel(tree: Path, tmp_path: Path) -> None:
    (tree / "launcher/model").unlink()
    (tree / "launcher/model").write_text("../model")
    done = subprocess.run([*WHEEL, "-w", tmp_path, tree], capture_output=True, text=True)
    assert done.returncode != 0
    assert "launcher/model" in done.stderr
    assert "git config core.symlinks true" in done.stderr
    assert not list(tmp_path.glob("*.whl"))


def test_a_wheel_is_complete_and_the_same_bytes_each_time(tree: Path, tmp_path: Path) -> None:
    built = []
    for number in (1, 2):
        out = tmp_path / str(number)
        subprocess.run([*WHEEL, "-w", out, tree], check=True, timeout=120)
        built.append(next(out.glob("shardscale-*.whl")))
        os.utime(tree / "launcher/train.py", (1.6e9, 1.6e9))
    assert built[0].read_bytes() == built[1].read_bytes()
    wheel = zipfile.ZipFile(built[0])
    names = wheel.namelist()
    for carried in ("model/attention/flex.py", "tools/submit/scripts/train.sbatch", "py.typed"):
        assert f"launcher/{carried}" in names
    assert {"shardscale/planning.py", "shardscale/py.typed"} <= set(names)
    assert "launcher/strategies/zero/ds_configs/zero2.json" in names
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {
        "launcher",
        "shardscale",
    }
    described = wheel.read(next(name for name in names if name.endswith("METADATA"))).decode()
    assert "Description-Content-Type: text/markdown" in described
    assert "`docs/rehearse.md`" in described
    assert not re.search(r"\]\((?!https:)|<picture|<img", described), "leads nowhere on an index"


def test_what_is_installed_is_what_the_planner_knows() -> None:
    required = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
    for library, known in STRATEGIES["zero"].follows.items():
        assert all(f"{version}.0" in required[library].specifier for version in known)
        between = {f"{int(v.split('.')[0])}.{int(v.split('.')[1]) + 1}" for v in known}
        unknown = between - {*known}
        assert not any(f"{version}.0" in required[library].specifier for version in unknown)


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert (cited["version"], cited["license"]) == (PROJECT["version"], PROJECT["license"])


def test_forms_of_issues_ask_for_doctors_output() -> None:
    assert len(FORMS) >= 3
    for path in FORMS:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name == "config.yml":
            continue
        assert {"name", "description", "body"} <= form.keys(), path
        fields = [part for part in form["body"] if part["type"] != "markdown"]
        assert len({part["id"] for part in fields}) == len(fields), path
        assert all(part["attributes"]["label"] for part in fields), path
        assert any("shardscale doctor" in part["attributes"]["label"] for part in fields), path
        assert any(part.get("validations", {}).get("required") for part in fields), path
