"""What only a GPU can show. Skipped without one: `pytest tests/gpu` on a GPU machine."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]

TINY = ["--layers", "2", "--d-model", "128", "--heads", "4", "--context", "64", "--steps", "12"]
TINY += ["--tokenizer", "byte", "--vocab-size", "257", "--report-to=none", "--log-every", "1"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(Path(subprocess.__file__).read_text())
    return path


def train(corpus: Path, out: Path, *flags: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "launcher.torchrun", "--nproc", "1", "-m", "launcher.train"]
    command += [*TINY, "--data", str(corpus), "--out", str(out), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (out / "rank0.jsonl").read_text().splitlines()]


def losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["kind"] == "step"]


STRATEGIES = [
    ["--strategy", "ddp"],
    ["--strategy", "fsdp"],
    ["--strategy", "fsdp", "--no-reshard-after-forward"],
    ["--strategy", "fsdp", "--offload-param", "cpu"],
    ["--zero", "0"],
    ["--zero", "1"],
    ["--zero", "2"],
    ["--zero", "3"],
    ["--zero", "2", "--offload-optimizer", "cpu"],
]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", STRATEGIES, ids=" ".join)
def test_a_strategy_reproduces_single_on_nccl(
    corpus: Path, tmp_path: Path, flags: list[str], precision: str
) -> None:
    if "--zero" in flags and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed")
    single = losses(train(corpus, tmp_path / "single", "--precision", precision))
    other = losses(train(corpus, tmp_path / "other", "--precision", precision, *flags))
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    assert other == pytest.approx(single, rel=tolerance)


@pytest.mark.parametrize(
    "flags",
    [
        ["--precision", "fp32"],
        ["--precision", "bf16", "--global-batch", "24"],
        ["--precision", "bf16-pure", "--optimizer", "adamw8bit"],
    ],
    ids=" ".join,
)
def test_a_replayed_run_is_the_same_run(corpus: Path, tmp_path: Path, flags: list[str]) -> None:
    runs = {
        graphs: losses(train(corpus, tmp_path / graphs, *flags, "--cuda-graphs", graphs))
        for graphs in ("off", "on")
    }
    assert runs["on"] == pytest.approx(runs["off"], rel=1e-5)


def test_the_ledger_adds_up_to_what_the_device_uses(corpus: Path, tmp_path: Path) -> None:
    records = train(corpus, tmp_path / "run", "--precision", "bf16")
    peaks = [r for r in records if r["kind"] == "ledger" and r["moment"] == "peak"]
    assert [ledger["step"] for ledger in peaks] == [1, 3]
    for ledger in peaks:
        lines = dict(ledger["device"])
        used = lines.pop("used_bytes")
        assert sum(lines.values()) == used
        assert min(lines[name] for name in lines if name != "unexplained_bytes") >= 0


SEGMENTS = """
import json, sys
import torch
from launcher import train

def leave(code, **_):
    print(json.dumps([segment["is_expandable"] for segment in torch.cuda.memory_snapshot()]))
    sys.exit(code)

train.leave = leave
train.main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("variable", "expandable"),
    [(None, True), ("expandable_segments:False", False), ("expandable_segments:True", True)],
)
def test_segments_are_expandable_unless_the_users_variable_says_otherwise(
    corpus: Path, tmp_path: Path, variable: str | None, expandable: bool
) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.endswith("ALLOC_CONF")}
    if variable is not None:
        environment["PYTORCH_CUDA_ALLOC_CONF"] = variable
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-c", SEGMENTS, *TINY, "--data", str(corpus), "--out", str(out)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout.splitlines()[-1])) == {expandable}


def test_peaks_are_kept_apart_by_phase(corpus: Path, tmp_path: Path) -> None:
    records = train(corpus, tmp_path / "run", "--cuda-graphs", "off")  # of a replay none is seen
    phases = [record for record in records if record["kind"] == "phase"]
    peaks: dict[tuple[str, str], int]
    peaks = {(r["period"], r["phase"]): r.get("peak_bytes", 0) for r in phases}
    assert peaks["steady", "backward"] >= peaks["steady", "data"] > 0


def test_nvml_samples_this_gpu(corpus: Path, tmp_path: Path) -> None:
    records = train(corpus, tmp_path / "run")
    samples = [r for r in records if r["kind"] == "gpu" and r["source"] == "nvml"]
    assert samples
    assert samples[-1]["uuid"] == f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    assert 0 < samples[-1]["memory_used_bytes"] <= samples[-1]["memory_total_bytes"]


def test_a_small_limit_is_an_out_of_memory_with_its_own_exit_code(
    corpus: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "launcher.train", "--model", "gpt2", "--steps", "2"]
    command += ["--data", str(corpus), "--tokenizer", "byte", "--memory-limit", "1GiB"]
    command += ["--out", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 3, done.stderr[-3000:]
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "oom"
    assert Path(status["detail"]["snapshot"]).exists()
