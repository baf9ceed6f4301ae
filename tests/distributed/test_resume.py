"""The command line's way of going on: another strategy, another number of processes."""

import json
import resource
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import harness
import psutil
import pytest
from harness import MODEL_FLAGS, TORCHRUN, environment, python, run, torchrun, write_text

STEPS = 12


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.txt")


@pytest.fixture(scope="module")
def saved(text: Path) -> Path:
    """A run of one process that has saved its steps 1 and 2; each test writes elsewhere."""
    out = text.parent / "saved"
    train(1, out, text, "--micro-batch=8", "--stop-after=2", "--save-every=1")
    return out


def train(ranks: int, out: Path, text: Path, *flags: str) -> list[dict[str, Any]]:
    common = [*MODEL_FLAGS, f"--data={text}", f"--steps={STEPS}", "--global-batch=8"]
    done = harness.train(ranks, *common, "--report-to=none", f"--out={out}", *flags)
    assert done.returncode == 0, done.stderr
    lines = (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == "step"]


def test_zero2_on_two_goes_on_as_fsdp_on_four(text: Path, tmp_path: Path) -> None:
    schedule = ("--schedule=wsd", "--decay-steps=4")
    whole = train(1, tmp_path / "whole", text, "--micro-batch=8", *schedule)
    shorter = ("--stop-after=5", "--save-every=2")
    first = train(2, tmp_path / "a", text, "--micro-batch=4", "--zero=2", *shorter, *schedule)
    assert [record["step"] for record in first] == [1, 2, 3, 4, 5]
    saved = sorted(path.name for path in (tmp_path / "a" / "checkpoints").glob("step-*"))
    assert saved == ["step-00000002", "step-00000004", "step-00000005"]
    then = train(
        4,
        tmp_path / "b",
        text,
        "--micro-batch=2",
        "--strategy=fsdp",
        f"--resume={tmp_path / 'a'}",
        *schedule,
    )
    rates = [record["lr"] for record in whole]
    assert rates[7] == max(rates) > rates[8] > rates[-1]  # it has begun to decay
    assert [record["step"] for record in then] == list(range(6, STEPS + 1))
    for expected, found in zip(whole, [*first, *then], strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert found["lr"] == expected["lr"]


def test_an_fp16_run_goes_on_at_its_loss_scale(text: Path, tmp_path: Path) -> None:
    """And with the number of steps that it has stood: after 2,000 it doubles."""
    flags = ["--strategy=single", "--precision=fp16", "--micro-batch=8", "--lr=0.001"]
    whole = train(1, tmp_path / "whole", text, *flags)
    train(1, tmp_path / "a", text, *flags, "--stop-after=8")
    train(1, tmp_path / "b", text, *flags, f"--resume={tmp_path / 'a'}")
    saved, resumed, undisturbed = (
        json.loads((tmp_path / run / f"checkpoints/step-{step:08d}/index.json").read_text())[
            "content"
        ]["extra"]["loss_scale"]
        for run, step in (("a", 8), ("b", STEPS), ("whole", STEPS))
    )
    assert resumed == undisturbed != saved
    lines = (tmp_path / "b" / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "step"]
    assert losses == [record["loss"] for record in whole[8:]]


def stopped_by_usr1(
    text: Path, out: Path, *more: str, file_size_bytes: int | None = None
) -> tuple[int, str]:
    """Exit code and console of a 2-process run that gets SIGUSR1 after its third step."""
    flags = [*MODEL_FLAGS, f"--data={text}", "--global-batch=8", "--micro-batch=4", "--zero=1"]
    flags += ["--log-every=1", "--report-to=none", "--steps=5000", "--keep=1", *more]
    command = [TORCHRUN, "--nproc", "2", "-m", "launcher.train", *flags, f"--out={out}"]

    def limit() -> None:
        if file_size_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_bytes, file_size_bytes))

    with subprocess.Popen(
        list(map(str, command)),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=limit,
    ) as agent:
        assert agent.stdout is not None
        for line in agent.stdout:
            if line.startswith("step: 3 "):
                break
        for worker in psutil.Process(agent.pid).children():
            worker.send_signal(signal.SIGUSR1)
        shown = agent.stdout.read()
        return agent.wait(), shown


def test_usr1_saves_before_it_evaluates_and_ends_as_preempted(text: Path, tmp_path: Path) -> None:
    """Once, though every step is saved anyway. An evaluation takes minutes on a large model, and a
    scheduler may give half of one."""
    out = tmp_path / "run"
    code, shown = stopped_by_usr1(text, out, "--save-every=1", "--eval-every=1")
    assert code == 5
    assert shown.count("preempted after step") == 1
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "preempted"
    lines = (out / "rank0.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    evaluated = [record["step"] for record in records if record["kind"] == "eval"]
    assert evaluated == steps
    saved = [path.name for path in (out / "checkpoints").glob("step-*")]
    assert saved == [f"step-{steps[-1]:08d}"]
    saves = [n for n, record in enumerate(records) if record.get("name") == "saved"]
    assert len(saves) == len(steps)
    assert [record["kind"] for record in records[saves[-1] :]].count("eval") == 1


def test_a_preemption_that_could_not_save_is_a_failure(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, shown = stopped_by_usr1(text, out, file_size_bytes=300_000)  # a share is larger than that
    assert code == 4
    assert "preempted" not in shown
    status = json.loads((out / "status.json").read_text())
    assert status["state"] == "failed"
    assert not list((out / "checkpoints").glob("step-*"))


def test_a_stop_that_is_passed_already_is_refused(text: Path, saved: Path, tmp_path: Path) -> None:
    """Rather than to end at once, as if steps had been made."""
    flags = [*MODEL_FLAGS, f"--data={text}", "--report-to=none", f"--steps={STEPS}"]
    flags += ["--stop-after=2", f"--resume={saved}", f"--out={tmp_path / 'b'}"]
    done = harness.train(1, *flags)
    assert done.returncode == 2
    assert "step 2 is already reached there, and --stop-after is 2" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "b").exists()


def test_another_model_is_refused_in_one_sentence(text: Path, saved: Path, tmp_path: Path) -> None:
    flags = [*MODEL_FLAGS, "--d-ff=96", f"--data={text}", f"--resume={saved}"]
    done = harness.train(1, *flags, f"--out={tmp_path / 'b'}")
    assert done.returncode == 2
    assert "model flags" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "b").exists()


def test_damage_is_found_before_anything_is_made(text: Path, saved: Path, tmp_path: Path) -> None:
    """By the agent, or by the one process that there is; a run that goes on takes the one before
    and says so."""
    shutil.copytree(saved, tmp_path / "a", symlinks=True)
    checkpoint = tmp_path / "a" / "checkpoints" / "step-00000002"
    flip_a_bit(checkpoint)
    flags = [*MODEL_FLAGS, f"--data={text}", "--report-to=none", f"--steps={STEPS}"]
    command = ["-m", "launcher.train", *flags, f"--resume={checkpoint}", f"--out={tmp_path / 'b'}"]
    for done in (torchrun(2, *command), python(*command)):
        assert done.returncode == 2
        assert done.stderr.startswith(f"shardscale: checkpoint {checkpoint} is damaged: rank-00000")
        assert done.stderr.count("\n") == 1
        assert "Traceback" not in done.stdout
        assert not (tmp_path / "b").exists()
    resumed = [f"--out={tmp_path / 'a'}", "--resume=auto", "--micro-batch=4", "--lr=0.01"]
    done = harness.train(2, *flags, *resumed)
    assert done.returncode == 0, done.stderr
    assert (
        f"skipped damaged checkpoint: checkpoint {checkpoint} is damaged: rank-00000" in done.stdout
    )
    assert "step-00000001 after step 1" in done.stdout
    assert "differs from the run that saved it: lr 0.001 -> 0.01" in done.stdout


def test_damage_that_only_ranks_can_find_is_one_sentence(
    text: Path, saved: Path, tmp_path: Path
) -> None:
    """No process reads all of it before where the number of nodes is open: every rank notices, one
    says so, and the run's status knows."""
    shutil.copytree(saved, tmp_path / "a", symlinks=True)
    for checkpoint in (tmp_path / "a" / "checkpoints").glob("step-*"):
        flip_a_bit(checkpoint)
    rendezvous = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    rendezvous += ["--rdzv-conf=last_call_timeout=1", "--nproc=2", "-m", "launcher.train"]
    flags = [*MODEL_FLAGS, f"--data={text}", "--resume=auto", f"--out={tmp_path / 'a'}"]
    done = run([TORCHRUN, *rendezvous, *flags, f"--steps={STEPS + 1}"])
    assert done.returncode == 2
    assert done.stderr.count("is damaged: rank-00000.safetensors") == 1
    assert "Traceback" not in done.stderr
    status = json.loads((tmp_path / "a" / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("failed", 2)


def flip_a_bit(checkpoint: Path) -> None:
    shard = checkpoint / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
