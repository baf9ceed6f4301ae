"""`shardscale submit` as far as it goes without Slurm: what it refuses, and the script it fills."""

import subprocess
from pathlib import Path

import pytest

from launcher.tools.submit.job import SCRIPTS
from launcher.tools.submit.submit_cli import main

SMALL = ("--model=nano", "--micro-batch=2")
CPU = ("--gpus-per-node=0", "--dry-run", "--")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def printed_script(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


def test_the_script_gets_the_options_and_an_interpreter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--nodes=2", "--gpus-per-node=4", "--partition", "a100", "--job-name", "a b")
    script = printed_script(capsys, *options, "--dry-run", "--", *SMALL, "--zero", "3")
    directives = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives[-1] == (
        "#SBATCH --output=slurm-%j.out --nodes=2 --gpus-per-node=4 --ntasks-per-node=1 "
        "--partition a100 --job-name 'a b'"
    )
    assert "python=python\n" not in script
    assert "srun" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_gpus_can_have_a_type(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--nodes=2", "--gpus-per-node=a100:4", "--dry-run")
    script = printed_script(capsys, *options, "--", *SMALL, "--zero", "3", "--global-batch=16")
    assert " --gpus-per-node=a100:4 --ntasks-per-node=1\n" in script


def test_a_log_folder_that_slurm_names_is_left_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    logs = "--output=/scratch/%u/slurm-%j.out"
    assert f"#SBATCH {logs} " in printed_script(capsys, logs, *CPU, *SMALL, "--device", "cpu")


def test_the_run_folder_of_a_config_is_that_of_the_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("model: nano\nmicro_batch: 2\nout: runs/mine\n")
    script = printed_script(capsys, *CPU, "--device", "cpu", "--config", str(config))
    assert f"set -- --device cpu --config {config} --out runs/mine\n" in script


def test_one_gpu_has_a_script_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    script = printed_script(capsys, "--dry-run", "--", *SMALL)
    template = (SCRIPTS / "single_gpu.sbatch").read_text(encoding="utf-8")
    assert script.splitlines()[-1] == template.splitlines()[-1]
    assert "srun" not in script


def test_flags_reach_the_script_untouched(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / 'it\'s "my" $HOME `file`.txt'
    data.write_text("text")
    flags = [*SMALL, "--device", "cpu", "--data", str(data)]
    script = printed_script(capsys, *CPU, *flags)
    (line,) = [line for line in script.splitlines() if line.startswith("set --")]
    shown = subprocess.run(
        ["bash", "-c", line + "\nprintf '%s\\0' \"$@\""], capture_output=True, check=True
    ).stdout.decode()
    assert shown.split("\0")[:-1] == flags


def test_a_sweep_is_an_array_of_the_cells_that_can_run_and_a_report(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / 'my "50%" sweep'
    grid = ("--grid", "strategy=ddp,single,fsdp", "--out", str(out))
    options = ("--sweep", "--gpus-per-node=2", "--partition", "a100", "--dry-run")
    printed = printed_script(capsys, *options, "--", *SMALL, *grid)
    array, report = printed.split("#!/bin/bash")[1:]
    logs = f'{tmp_path}/my "50%%" sweep/logs'
    # One process cannot be what two are asked for.
    assert (
        f"#SBATCH '--output={logs}/slurm-%A_%a.out' --nodes=1 --gpus-per-node=2 "
        "--ntasks-per-node=1 --partition a100 --array=0,2\n"
    ) in array
    assert f"set -- --out '{out}'\n" in array
    assert (
        f"#SBATCH --partition a100 --dependency=afterany:ARRAY '--output={logs}/slurm-%j-report.out"
    ) in report
    assert f"set -- '{out}' --out '{out}/report'\n" in report
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sweep", "--"), "nothing to compare: give --grid"),
        (("--sweep", "--", "--grid=strategy=ddp,zero5"), "--grid strategy=zero5: use one of"),
        (
            ("--sweep", "--nodes=2", "--", "--grid=zero=1,2"),
            "each cell of a sweep runs on one node",
        ),
        (("--sweep", "--", "--nproc=2", "--grid=zero=1,2"), "--nproc cannot come after --"),
        (("--sweep", "--", "--grid=seed=1,2", "--data=no.txt"), "seed1: --data no.txt does not"),
        (("--sweep", "--gpus-per-node=0", "--", "--grid=seed=1,2"), "add --device cpu after"),
        (("--sweep", "--", "--grid=seed=1,2", "--device=cpu"), "--gpus-per-node 1 idle"),
        (("--sweep", "--", "--grid=seed=1,2", "--context=0"), "seed1: context 0 is not positive"),
        (("--nodes", "2", "--zero", "3"), "write -- before the flags of launcher.train"),
        (("--nodes=0", "--"), "--nodes 0 must be 1 or more"),
        (("--gpus-per-node=many", "--"), "--gpus-per-node many must be a number of GPUs"),
        (("--nodes=many", "--"), "-N/--nodes: invalid int value: 'many'"),
        (("--gpus-per-node=-1", "--"), "--gpus-per-node -1 must be 0 or more"),
        (("--ranks-per-node=2", "--"), "--ranks-per-node 2 is for jobs without GPUs"),
        (("--gpus-per-node=a100", "--"), "--gpus-per-node a100 must be a number of GPUs, or a"),
        (("--gpus-per-node=a100:", "--"), "--gpus-per-node a100: must be a number of GPUs, or a"),
        (("--gpus-per-node=:4", "--"), "--gpus-per-node :4 must be a number of GPUs, or a type"),
        (("--gpus-per-node=a100:-1", "--"), "--gpus-per-node -1 must be 0 or more"),
        (("--gres=gpu:2", "--"), "--gres=gpu:2 is set by the batch script"),
        (("--gres=gpu:h100:8", "--"), "give --nodes, --gpus-per-node ([TYPE:]N, as a100:4) or"),
        # however sbatch lets one write it
        (("-n4", "--"), "-n4 is set by the batch script"),
        (("-HN4", "--"), "-HN4 is set by the batch script"),
        (
            ("-a0-3", "--"),
            "-a0-3 is set by the batch script: give --sweep, whose cells are the tasks",
        ),
        (("--array=0-3", "--"), "--array=0-3 is set by the batch script: give --sweep"),
        (("-G", "2", "--"), "-G is set by the batch script"),
        (("--ntask=7", "--"), "--ntask=7 abbreviates --ntask"),
        (("--arr=0-3", "--"), "--arr=0-3 abbreviates --array"),
        (("--node=3", "--"), "--node=3 abbreviates --nodes"),
        (("--wrap=id", "--"), "--wrap=id is set by the batch script: leave it out"),
        # a line of the script
        (("--job-name", "a\ntouch made", "--"), "cannot be written into a batch script"),
        (("--comment=a\rb", "--"), "cannot be written into a batch script"),
        (("--output=a\nb", "--"), "cannot be written into a batch script"),
        (("--gpus-per-node=0", "--"), "add --device cpu after the --"),
        (("--", "--device=cpu"), "would leave the GPUs of --gpus-per-node 1 idle"),
        (("--", "--zreo=3"), "unknown flag --zreo: did you mean --zero?"),
        (("--", "--data=no.txt"), "--data no.txt does not exist"),
        (("--", "--out=."), "--out .: already exists"),
        (("--output=no/log.txt", "--"), "--output no/log.txt: no cannot be written to"),
        (
            ("--nodes=3", "--gpus-per-node=2", "--", "--micro-batch=2", "--global-batch=16"),
            "--global-batch 16 is not a multiple of micro-batch 2 x 6 ranks = 12",
        ),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("shardscale: ")
    assert said in printed.err
    assert len(printed.err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_without_sbatch_nothing_is_submitted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert main(("--", *SMALL)) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err


def test_a_script_that_is_only_tested_is_no_job(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = "sbatch: Job 7 to start at 2026-11-24T02:00:00 using 1 processors"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ncat > /dev/null\necho '{said}' >&2\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(("--test-only", "--", *SMALL)) == 0
    shown = capsys.readouterr().out
    assert shown == f"not submitted, only tested: {said.removeprefix('sbatch: ')}\n"


@pytest.mark.parametrize("name", sorted(path.name for path in SCRIPTS.iterdir()))
def test_a_script_started_by_hand_says_what_it_is(name: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPTS / name)],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "shardscale: this is a batch script: start it with sbatch\n"


@pytest.mark.parametrize("name", ["SBATCH_GPUS_PER_NODE", "SBATCH_GRES", "SBATCH_SIGNAL"])
def test_variables_that_sbatch_prefers_to_the_script_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "2")
    assert main(["--gpus-per-node=4", "--dry-run", "--", *SMALL]) == 2
    assert f"the environment variable {name}='2' would override" in capsys.readouterr().err
