"""The command as people type it, from the shell to the run folder."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import MODEL_FLAGS, python, torchrun, train, write_text

STEPS = 20
FAMILIES = {"zero2": ("--zero", "2"), "single": ("--tensor-parallel", "2")}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def single(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process without torchrun."""
    out = tmp_path_factory.mktemp("single") / "run"
    done = train(1, *flags(text, micro_batch=8), f"--out={out}", "--eval-every=15")
    assert done.returncode == 0, done.stderr
    return out


def flags(text: Path, *, micro_batch: int = 2) -> list[str]:
    return [
        *MODEL_FLAGS,
        f"--data={text}",
        f"--steps={STEPS}",
        f"--micro-batch={micro_batch}",
        "--global-batch=8",
        "--lr=3e-3",
        "--test-batches=5",
    ]


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def records(folder: Path, kind: str, *, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def values(folder: Path, name: str, *, rank: int = 0) -> list[Any]:
    return [record[name] for record in records(folder, "step", rank=rank)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_and_its_repetition(family: str, text: Path, single: Path, tmp_path: Path) -> None:
    """Only ZeRO goes through torchrun, and runs twice: runs that continue from checkpoints hold
    that sharded matrices compute the same bits each time."""
    out = tmp_path / "run"
    flags_ = flags(text, micro_batch=4 if family == "single" else 2)  # accumulated twice
    asked = (*FAMILIES[family], *flags_, f"--out={out}")
    typed = family == "zero2"
    done = torchrun(2, "-m", "launcher.train", *asked) if typed else train(2, *asked)
    assert done.returncode == 0, done.stderr
    check_folder(out, family)
    check_steps(out, single)
    if family == "single":
        return

    again = tmp_path / "again"
    done = train(2, f"--config={out / 'config.yaml'}", f"--out={again}")
    assert done.returncode == 0, done.stderr
    assert values(again, "loss") == values(out, "loss")
    assert values(again, "grad_norm") == values(out, "grad_norm")
    assert (
        read_json(again / "summary.json")["test_loss"]
        == (read_json(out / "summary.json")["test_loss"])
    )
    first, second = (
        yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
        for folder in (out, again)
    )
    assert {**first, "out": None} == {**second, "out": None}


def check_folder(out: Path, family: str) -> None:
    names = {path.name for path in out.iterdir()}
    assert names == {
        ".lock",
        "tokenizer.json",
        "config.yaml",
        "environment.json",
        "status.json",
        "rank0.jsonl",
        "rank1.jsonl",
        "summary.json",
        "tb",
        "checkpoints",
    }
    assert {path.name for path in (out / "checkpoints").iterdir()} == {
        "latest",
        f"step-{STEPS:08d}",
    }
    assert any((out / "tb").iterdir())
    status = read_json(out / "status.json")
    assert (status["state"], status["exit_code"]) == ("completed", 0)
    assert {"torch", "numpy"} <= set(read_json(out / "environment.json")["packages"])
    run = records(out, "run")[0]
    assert (run["strategy"], run["world_size"], run["accumulation"]) == (family, 2, 2)


def check_steps(out: Path, single: Path) -> None:
    for rank in (0, 1):
        assert values(out, "step", rank=rank) == list(range(1, STEPS + 1))
        assert values(out, "loss", rank=rank) == pytest.approx(values(single, "loss"), rel=2e-5)
        assert values(out, "grad_norm", rank=rank) == pytest.approx(
            values(single, "grad_norm"), rel=1e-3
        )
        assert values(out, "lr", rank=rank) == values(single, "lr")
        assert values(out, "tokens", rank=rank) == [8 * 32] * STEPS
        assert all(duration > 0 for duration in values(out, "duration_s", rank=rank))
    summary, expected = read_json(out / "summary.json"), read_json(single / "summary.json")
    assert summary["test_loss"] == pytest.approx(expected["test_loss"], rel=2e-5)
    assert summary["perplexity"] == pytest.approx(expected["perplexity"], rel=2e-5)
    assert summary["test_tokens"] == expected["test_tokens"] == 5 * 8 * 32
    assert summary["tokens_per_s"] > 0
    assert summary["peak_bytes"] > 0


def test_the_validation_curve_ends_where_training_does(single: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    points = [(record["split"], record["step"]) for record in records(single, "eval")]
    assert points == [("validation", 15), ("validation", STEPS), ("test", STEPS)]
    board = EventAccumulator(str(single / "tb"))
    board.Reload()
    assert [point.step for point in board.Scalars("perplexity/validation")] == [15, STEPS]
    assert [point.step for point in board.Scalars("loss/test")] == [STEPS]


def test_bad_input_is_one_sentence_before_anything_starts(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = torchrun(2, "-m", "launcher.train", *flags(text), "--global-batch=7", f"--out={out}")
    assert done.returncode == 2
    assert done.stderr.startswith("shardscale: --global-batch 7")
    assert len(done.stderr.splitlines()) == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("sharding", "imported"),
    [(("--strategy=fsdp",), False), (("--zero=1",), True)],
)
def test_deepspeed_is_imported_only_for_zero_and_the_compiler_for_none(
    sharding: tuple[str, ...], imported: bool, text: Path, tmp_path: Path
) -> None:
    # Workers end without interpreter teardown, so an exit hook would never see sys.modules.
    program = """
import os, sys
import launcher.train
exit_now = os._exit
def tell(code):
    for name in ("deepspeed", "torch._inductor.lowering"):
        os.write(1, f"{name} imported: {name in sys.modules}\\n".encode())
    exit_now(code)
os._exit = tell
launcher.train.main(sys.argv[1:])
"""
    command = [*flags(text), "--steps=1", *sharding, f"--out={tmp_path / 'run'}"]
    done = python("-c", program, *command)
    assert done.returncode == 0, done.stderr
    assert f"deepspeed imported: {imported}" in done.stdout
    assert "torch._inductor.lowering imported: False" in done.stdout


def test_any_other_program_runs_as_under_torchs_own(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    # One write for a line: the two ranks share the output.
    program.write_text(
        "import os, sys\nos.write(1, f\"{os.environ['RANK']} {sys.argv[1:]}\\n\".encode())\n"
    )
    done: subprocess.CompletedProcess[str] = torchrun(2, program, "--start", "--nproc", "5")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 ['--start', '--nproc', '5']",
        "1 ['--start', '--nproc', '5']",
    ]
