"""This project's own baseline: bytes of small runs that no change may let grow by more than 1%."""

from pathlib import Path

from harness import python, verb

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
GRID = "strategy=ddp,fsdp,zero3"


def test_no_strategy_takes_more_than_its_baseline(tmp_path: Path) -> None:
    """After a change that is worth more bytes: the two commands, with --write-baseline."""
    config = ("--config", ROOT / "bench" / "small.yaml", "--data", ROOT / "bench/shakespeare.txt")
    flags = (*config, "--grid", GRID, "--steps=3", "--memory-trace", "--report-to=none")
    for attempt in range(3):  # on a busy machine a thread of Gloo's may let go of a message late
        out = tmp_path / f"sweep-{attempt}"
        swept = python("-m", "launcher", "sweep", "--nproc=2", *flags, "--out", out)
        assert swept.returncode == 0, swept.stderr
        compared = verb("report", out / "cells", "--against", BASELINE)
        if compared.returncode == 0:
            break
    assert compared.returncode == 0, compared.stderr
    assert f"no worse than {BASELINE}" in compared.stdout
