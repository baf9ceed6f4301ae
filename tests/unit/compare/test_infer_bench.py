"""`shardscale infer-bench` on tiny runs: figures beside each other, a page, and what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_exchange_families import saved_run
from test_lora import FLAGS, RUN, train

from launcher.checkpoint.pretrained.loading import build, open_source
from launcher.compare.report import report_cli as report
from launcher.model.config import ModelConfig
from launcher.model.decode import continuation
from launcher.tools.serve import infer_bench, infer_bench_cli
from launcher.tools.serve.choice import InferBenchOptions
from launcher.tools.serve.text import open_run, text_of

QUICK = ["--prompt-tokens", "6", "--new-tokens", "5", "--prompts", "2", "--repeats", "2"]
QUICK += ["--sequences", "3"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one text, and one of another."""
    folder = tmp_path_factory.mktemp("infer")
    for name, count in (("text", 4000), ("other", 4001)):
        lines = (f"{n} squared is {n * n}.\n" for n in range(count))
        (folder / f"{name}.txt").write_text("".join(lines))
    for name, text, steps in (("dense", "text", 6), ("small", "text", 2), ("other", "other", 2)):
        flags = [*FLAGS, *RUN, f"--data={folder / text}.txt", f"--steps={steps}"]
        train(*flags, "--report-to=none", f"--out={folder / 'runs' / name}")
    return folder / "runs"


def verb(*arguments: Any) -> int:
    return infer_bench_cli.main([str(argument) for argument in arguments])


def test_runs_and_engines_stand_in_one_table(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = (runs / "dense", runs / "small")
    alone = ("--engines", "pytorch", "--weights", "fp32", "--out", runs / "alone")
    assert verb(*both, *QUICK, *alone, "--device", "cpu") == 0
    assert (
        "[1/2] dense, pytorch, fp32\n[2/2] small, pytorch, fp32, about" in capsys.readouterr().err
    )
    beside = json.loads((runs / "alone" / "inference.json").read_text())["rows"]
    assert [row["run"] for row in beside] == ["dense", "small"]
    assert beside[0]["perplexity"] < beside[1]["perplexity"]  # after more steps

    engines = ("--engines", "pytorch", "onnxruntime", "tensorrt", "--weights", "fp32", "int8")
    assert verb(both[0], *engines, *QUICK, "--device", "cpu") == 0
    assert "tensorrt, fp32" in capsys.readouterr().out
    found = json.loads((runs / "inference" / "inference.json").read_text())
    rows = {(row["run"], row["engine"], row["weights"]): row for row in found["rows"]}
    assert len(rows) == 6
    for (name, engine, weights), row in rows.items():
        if engine == "tensorrt":
            assert row["reason"]
            assert row["token_s"] is None
            continue
        assert row["reason"] is None
        assert 0 < row["before_model_bytes"] < row["peak_bytes"]
        assert 0 < row["token_s"] <= row["token_p90_s"]
        assert row["cpu_s"] > 0
        if weights == "fp32":
            first = rows[name, "pytorch", "fp32"]
            assert row["same_tokens"] == 5
            assert row["perplexity"] == pytest.approx(first["perplexity"], rel=1e-5)
    assert rows["dense", "pytorch", "fp32"]["tokens_per_s_ratio"] == 1
    # int8 was int8: its figures are near those in fp32, and not the same.
    for engine in ("pytorch", "onnxruntime"):
        near, exact = (rows["dense", engine, w]["perplexity"] for w in ("int8", "fp32"))
        assert near == pytest.approx(exact, rel=0.1)
        assert near != pytest.approx(exact, rel=1e-6)
    assert "| dense | pytorch | fp32 |" in (runs / "inference" / "inference.md").read_text()
    assert "infer-bench" in (runs / "inference" / "inference.html").read_text()

    # The figures are those of the model: by hand, from the same text.
    dense = open_run(runs / "dense")
    options = InferBenchOptions(runs=(dense.path,), prompts=2, prompt_tokens=6, sequences=3, seed=0)
    prompts, text = text_of([dense], options)
    with open_source(runs / "dense") as source:
        model = build(source, device=torch.device("cpu"), dtype=torch.float32)
    expected = [
        list(continuation(model, prompt, lambda logits: int(logits.argmax()), most=5))
        for prompt in prompts
    ]
    assert rows["dense", "pytorch", "fp32"]["tokens"] == expected
    logits = model(torch.from_numpy(text["tokens"])).flatten(0, 1)
    loss = F.cross_entropy(logits, torch.from_numpy(text["targets"]).flatten())
    by_hand = math.exp(float(loss))
    assert rows["dense", "pytorch", "fp32"]["perplexity"] == pytest.approx(by_hand, rel=1e-5)

    # Nothing is overwritten, and the report of these runs shows it.
    assert verb(*both, *QUICK) == 2
    assert "inference" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
    assert report.main([str(runs)]) == 0
    assert '"inference":{"titles"' in (runs / "report.html").read_text()


def test_a_decoder_that_no_engine_knows_is_rejected(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each engine said so in its row, which was n/a."""
    flags = ["--decoder=examples.decoder:build", "--layers=1", "--seq-len=16", "--micro-batch=2"]
    flags += [f"--data={runs.parent / 'text.txt'}", "--steps=1", "--device=cpu"]
    train(*flags, "--report-to=none", f"--out={tmp_path / 'own'}")
    assert verb(tmp_path / "own", *QUICK) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "own: shardscale infer-bench knows shardscale's own decoder only, and examples" in said


def test_the_reference_may_be_measured_last(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = dict.fromkeys(("prefill_s", "token_s", "token_p90_s", "cpu_s", "perplexity"), 1.0)
    monkeypatch.setattr(
        infer_bench,
        "_outcome",
        lambda case: {
            **figures,
            "tokens": [[1, 2, 3, 4, 5 if case.weights == "fp32" else 6]],
            "tokens_per_s": 2.0 if case.weights == "fp32" else 3.0,
        },
    )
    flags = ("--engines", "pytorch", "--weights", "bf16", "fp32", "--out", tmp_path / "out")
    assert verb(runs / "dense", *QUICK, *flags) == 0
    rows = json.loads((tmp_path / "out" / "inference.json").read_text())["rows"]
    assert [(row["weights"], row["tokens_per_s_ratio"], row["same_tokens"]) for row in rows] == [
        ("bf16", 1.5, 4),
        ("fp32", 1.0, 5),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "infer-bench needs runs"),
        (("dense", "other"), "has another text or tokenizer than"),
        (("dense", "--prompt-tokens", "30"), "--prompt-tokens 30 and --new-tokens 5 are 35 tokens"),
        (("dense", "--new-tokens", "1"), "--new-tokens 1 must be 2 or more"),
        (("dense", "--repeats", "0"), "--repeats 0 must be 1 or more"),
        (("dense", "--weights", "int3"), "int3"),
        (("dense", "--engines", "tvm"), "tvm"),
        (("nowhere",), "nowhere"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(
    arguments: tuple[str, ...],
    said: str,
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(runs)
    flags = (*(QUICK[:2] if "--prompt-tokens" not in arguments else ()), "--new-tokens", "5")
    flags = flags if "--new-tokens" not in arguments else flags[:-2]
    assert verb(*arguments, *flags, "--out", tmp_path / "out") == 2
    *progress, error = capsys.readouterr().err.splitlines()
    assert error.startswith("shardscale: ")
    assert said in error
    assert all(line.startswith("data: ") for line in progress)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verb(runs / "dense", "--device", "cuda") == 2
    assert "this machine has no GPU" in capsys.readouterr().err


def test_a_run_that_says_nothing_of_its_text_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModelConfig(vocab_size=257, context=64, layers=1, heads=2, d_model=16)
    saved_run(tmp_path / "run", config)
    assert verb(tmp_path / "run", *QUICK) == 2
    assert "does not record its training text" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "run"]


def test_a_run_whose_text_is_gone_is_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} cubed is {n**3}.\n" for n in range(4000)))
    flags = [*FLAGS, *RUN, f"--data={text}", "--steps=1", "--report-to=none"]
    train(*flags, f"--out={tmp_path / 'run'}")
    text.unlink()
    assert verb(tmp_path / "run", *QUICK) == 2
    assert "text.txt" in (said := capsys.readouterr().err)
    assert said.count("\n") == 1
