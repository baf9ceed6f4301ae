"""This project's own baseline: bytes of small runs that no change may let grow by more than 1%."""

from pathlib import Path

from harness import train, verb

ROOT = Path(__file__).parents[2]
BASELINE = Path(__file__).with_name("baseline.json")
SHARDING = {"ddp": "--strategy=ddp", "fsdp": "--strategy=fsdp", "zero3": "--zero=3"}


def test_no_strategy_takes_more_than_its_baseline(tmp_path: Path) -> None:
    """After a change that is worth more bytes: a sweep of the same, and its report with
    --write-baseline."""
    config = ("--config", ROOT / "bench" / "small.yaml", "--data", ROOT / "bench/shakespeare.txt")
    flags = (*map(str, config), "--steps=3", "--memory-trace", "--report-to=none")
    for attempt in range(3):  # on a busy machine a thread of Gloo's may let go of a message late
        out = tmp_path / f"runs-{attempt}"
        for name, sharding in SHARDING.items():
            done = train(2, *flags, sharding, f"--out={out / name}")
            assert done.returncode == 0, done.stderr
        compared = verb("report", out, "--against", BASELINE)
        if compared.returncode == 0:
            break
    assert compared.returncode == 0, compared.stderr
    assert f"no worse than {BASELINE}" in compared.stdout
