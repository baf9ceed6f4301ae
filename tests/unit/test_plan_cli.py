"""`shardscale plan` as a user meets it."""

import json
import shlex
from pathlib import Path

import pytest
import yaml

from launcher.arguments import parse_run_config
from launcher.plan.cli import main
from launcher.torchrun import split_command

NARROW = ["--model", "nano", "--activation-checkpointing", "none", "--precision", "bf16"]
PLACE = ["--gpus", "4", "--gpu", "A100-40GB", "--global-batch", "32"]


def test_the_command_of_the_best_is_ready_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name for name in ("plan.json", "plan.html", "run.yaml")]
    written = [
        x
        for name, p in zip(("json", "page", "apply"), files, strict=True)
        for x in ("--" + name, str(p))
    ]
    assert main([*NARROW, *PLACE, *written, "--price-per-gpu-hour", "2"]) == 0
    shown = capsys.readouterr().out
    command = next(line for line in shown.splitlines() if line.startswith("  torchrun"))
    own, program, flags = split_command(shlex.split(command)[1:])
    assert (own, program) == (["--nproc-per-node", "4"], ["-m", "launcher.train"])
    config = parse_run_config(flags)
    records = json.loads(files[0].read_text())
    best = records[0]
    assert config.data.micro_batch == best["micro_batch"] == best["largest_micro_batch"] == 8
    assert config.optim.precision == "bf16"
    assert parse_run_config(["--config", str(files[2])]).sharding == config.sharding
    assert yaml.safe_load(files[2].read_text())["global_batch"] == 32
    # Every way of sharding is there once, each with a ledger whose lines add up.
    assert len({r["sharding"] for r in records}) == len(records) >= 10
    for record in records:
        lines = record["ledger"]["device"]
        parts = [v for k, v in lines.items() if k != "used_bytes" and v]
        assert sum(parts) == lines["used_bytes"]
        assert record["used_bytes"] >= lines["used_bytes"] + record["fixed_bytes"]
    page = files[1].read_text()
    assert page.count("<script") == 2
    assert "default-src 'none'" in page
    assert all(record["sharding"] in page for record in records)


def test_given_flags_are_not_varied(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*NARROW, *PLACE, "--zero", "3", "--micro-batch", "2", "--json", "-"]
    assert main(flags) == 0
    records = json.loads(capsys.readouterr().out)
    assert {r["config"]["zero"] for r in records} == {3}
    assert {r["micro_batch"] for r in records} == {2}


def test_what_fits_nowhere_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gpt2-xl", *NARROW[2:], "--gpus", "1", "--gpu-memory", "4GiB"]
    assert main([*flags, "--micro-batch", "1", "--global-batch", "1"]) == 0
    shown = capsys.readouterr().out
    assert "nothing fits: the smallest" in shown
    assert "torchrun" not in shown


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--gpu H9000", "GPU 'H9000' is not known: use one of"),
        ("", "which GPU? give --gpu NAME"),
        ("--gpu-memory 4MB", "before its first tensor: give more"),
        ("--gpu-memory lots", "--gpu-memory"),
        ("--gpus 0 --gpu H100", "--gpus 0 must be at least 1"),
        ("--gpu H100 --model gpt9", "model 'gpt9' is unknown"),
        ("--gpu H100 --goal cheapest", "cheapest"),
        ("--gpu H100 --layers 0", "layers"),
        ("--gpu T4 --precision bf16", "T4 has no rate for bf16: it has fp32"),
        ("--gpus 3 --gpu H100 --global-batch 32", "cannot be spread evenly over 3 ranks"),
        ("--gpu H100 --json .", "nothing is overwritten"),
    ],
)
def test_bad_input_is_one_sentence(
    argv: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert shown.err.count("\n") == 1
