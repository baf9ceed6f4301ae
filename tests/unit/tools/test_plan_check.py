"""`plan --check`, the GitHub Action and the pre-commit hook, on a repository with four configs."""

import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from pre_commit.clientlib import load_manifest
from strangers_configs import SAMPLES

from launcher.forecast.plan_cli import main as plan
from launcher.tools.plan_from.comment import MARK, table
from launcher.tools.plan_from.plan_from_cli import main

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "launcher" / "tools" / "plan_from" / "action.sh"
SMALL = "output_dir: out\nmodel_name_or_path: gpt2\nblock_size: 256\nlearning_rate: 1.0e-4\n"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a run that fits, one that does not, and one that lacks facts."""
    files = {
        "configs/small.yaml": f"{SMALL}per_device_train_batch_size: 1\n",
        "configs/large.yaml": f"{SMALL}per_device_train_batch_size: 512\n",
        "configs/launch.yaml": SAMPLES["acc_fsdp2.yaml"],
        ".github/workflows/ci.yml": "on: push\njobs: {}\n",
        "package.json": '{"name": "x"}\n',
        "broken.yaml": "a: [\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_codes_of_single_files(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["--check", "--gpu", "T4", "--from"]
    assert main([*check, "configs/small.yaml"]) == 0
    assert main([*check, "configs/large.yaml"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[:2] for line in out] == [
        ["configs/small.yaml", "fits"],
        ["configs/large.yaml", "does not fit"],
    ]
    assert main([*check, "configs/launch.yaml"]) == 2
    assert "does not say which model" in capsys.readouterr().err
    used = used_bytes("configs/small.yaml", capsys)
    close = f"{used / 0.98 / 2**30:.3f}GiB"
    assert main(["--check", "--gpu-memory", close, "--from", "configs/small.yaml"]) == 3
    assert "configs/small.yaml: tight: " in capsys.readouterr().out


def used_bytes(name: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Bytes at the peak, where there is room."""
    main(["--check", "--gpu", "T4", "--from", name, "--json"])
    return int(json.loads(capsys.readouterr().out)[0]["used_bytes"])


def test_flags_of_a_training_are_checked_too(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt2", "--precision", "bf16", "--micro-batch", "1", "--seq-len", "64"]
    assert main(["--check", "--gpu", "H100", *flags]) == 0
    assert capsys.readouterr().out.startswith("gpt2: fits: ")
    assert main(["--check", "--gpu-memory", "2GiB", *flags]) == 1


def test_a_check_of_flags_is_the_plan_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model=nano", "--micro-batch=4", "--precision=bf16", "--strategy=fsdp", "--json"]
    flags += ["--activation-checkpointing=none", "--gpus=2", "--gpu=H100", "--no-calibration"]
    found = []
    for run in (partial(main, ["--check", *flags]), partial(plan, flags)):
        assert run() == 0
        found.append(json.loads(capsys.readouterr().out)[0])
    assert found[0] == found[1]


def test_a_folder_is_searched(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--gpu", "T4", "--from", "."]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        f"configs/{name}.yaml" for name in ("large", "launch", "small")
    ]
    (repository / "configs" / "large.yaml").write_text("base_model: gpt2\nmicro_batch_size: two\n")
    assert main(["--check", "--gpu", "T4", "--from", "."]) == 2
    assert "large.yaml: micro_batch_size 'two' is no whole number" in capsys.readouterr().out
    (repository / "empty").mkdir()
    assert main(["--check", "--gpu", "T4", "--from", "empty"]) == 2
    assert "empty: no config of a known trainer in there" in capsys.readouterr().err


def test_the_action_writes_a_table_and_comments_it(repository: Path) -> None:
    commands = repository / "bin"
    commands.mkdir()
    # GitHub is not here: its command line leaves what it was given.
    (commands / "gh").write_text('#!/bin/sh\necho "$@" > said\ncat "$7" >> said\n')
    (commands / "gh").chmod(0o755)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    steps = action["runs"]["steps"]
    assert steps[-1]["run"].endswith(f'/{SCRIPT.relative_to(ROOT)}"')
    given = {"PLAN_PATHS": "configs", "PLAN_ARGUMENTS": "--gpu T4", "PLAN_COMMENT": "true"}
    assert {*given, "PLAN_PULL_REQUEST", "GH_TOKEN"} == steps[-1]["env"].keys()
    done = subprocess.run(
        ["bash", str(SCRIPT)],
        cwd=repository,
        capture_output=True,
        text=True,
        env={
            **os.environ,
            **given,
            "PLAN_PULL_REQUEST": "7",
            "PLAN_PYTHON": sys.executable,
            "GITHUB_STEP_SUMMARY": str(repository / "summary"),
            "PYTHONPATH": str(ROOT),
            "PATH": f"{commands}:{os.environ['PATH']}",
        },
    )
    assert done.returncode == 1, done.stderr
    summary = (repository / "summary").read_text()
    assert "| `configs/large.yaml` | ❌ does not fit |" in summary
    assert "| `configs/launch.yaml` | ❔ not known |" in summary
    said = (repository / "said").read_text()
    assert said.startswith("pr comment 7 --edit-last --create-if-none --body-file ")
    assert MARK in said


def test_the_hook_checks_the_repository(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hook,) = load_manifest(ROOT / ".pre-commit-hooks.yaml")
    assert hook["pass_filenames"] is False
    words = shlex.split(hook["entry"])
    assert words[:2] == ["shardscale", "plan"]
    assert main([*words[2:], "--gpu", "H100"]) == 1
    (repository / "configs" / "large.yaml").unlink()
    assert main([*words[2:], "--gpu", "H100"]) == 0


def test_a_strangers_name_is_code_in_a_comment() -> None:
    file = "a|b`@team <img src=x>\n.yaml"
    row = table([{"file": file, "verdict": "not known", "reason": "x | y"}]).splitlines()[-1]
    assert row == "| `a¦b'@team <img src=x>\\n.yaml` | ❔ not known |  |  | `x ¦ y` |"
