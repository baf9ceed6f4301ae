"""`report --write-baseline` and `--against`: memory that grows and speed that falls are said."""

import json
from pathlib import Path

import pytest
from report_folder import GIB, write_run

from launcher.compare.report.report_cli import main

LOSSES = [8 - 0.1 * step for step in range(20)]


def runs_of(folder: Path, *, peak: float = 1.0, step_s: float = 0.5, zero_s: float = 0.6) -> Path:
    """Two runs on a GPU, with a factor of their memory and their seconds per step."""
    size = int(peak * GIB)
    write_run(folder / "ddp", losses=LOSSES, gpu=True, step_s=step_s, peak_bytes=size)
    write_run(
        folder / "zero2", losses=LOSSES, gpu=True, step_s=zero_s, peak_bytes=GIB, strategy="zero2"
    )
    return folder


def compare(folder: Path, baseline: Path, out: Path) -> int:
    return main([str(folder), "--out", str(out), "--against", str(baseline)])


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    first = runs_of(tmp_path / "first")
    assert main([str(first), "--out", str(tmp_path / "out"), "--write-baseline", str(path)]) == 0
    return path


def test_the_same_runs_are_no_worse(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path / "first", baseline, tmp_path / "again") == 0
    assert f"no worse than {baseline}" in capsys.readouterr().out
    entry = json.loads(baseline.read_text())["runs"]["ddp"]
    assert entry["allocated_peak_bytes"] == GIB
    assert entry["tokens_per_s_p25"] <= entry["tokens_per_s_median"] <= entry["tokens_per_s_p75"]


@pytest.mark.parametrize(
    ("factors", "sentence"),
    [
        ({"peak": 1.02}, "ddp: allocated peak grew by 2.0%, from 1.00GiB to 1.02GiB"),
        ({"step_s": 0.6}, "ddp is 16.7% slower, beyond the noise of its steps"),
    ],
)
def test_what_is_worse_fails_with_a_sentence(
    tmp_path: Path,
    baseline: Path,
    capsys: pytest.CaptureFixture[str],
    factors: dict[str, float],
    sentence: str,
) -> None:
    second = runs_of(tmp_path / "second", **factors)
    assert compare(second, baseline, tmp_path / "again") == 1
    error = capsys.readouterr().err
    assert f"shardscale: worse than {baseline}: {sentence}" in error
    assert error.count("worse than") == 1


def test_less_memory_and_half_a_percent_more_are_fine(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(runs_of(tmp_path / "more", peak=1.005), baseline, tmp_path / "a") == 0
    assert compare(runs_of(tmp_path / "less", peak=0.9), baseline, tmp_path / "b") == 0
    assert "allocated peak fell by 10.0%: --write-baseline keeps it" in capsys.readouterr().out


def test_on_another_machine_speeds_are_relative(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(baseline.read_text())
    for entry in content["runs"].values():
        entry["machine"] = "another"
    baseline.write_text(json.dumps(content))
    twice = runs_of(tmp_path / "twice", step_s=1.0, zero_s=1.2)
    assert compare(twice, baseline, tmp_path / "a") == 0
    assert "another machine: speeds are compared relative to ddp" in capsys.readouterr().out
    worse = runs_of(tmp_path / "worse", step_s=1.0, zero_s=1.5)
    assert compare(worse, baseline, tmp_path / "b") == 1
    assert "zero2 is 20.0% slower" in capsys.readouterr().err


def test_a_run_that_is_missing_or_failed_is_worse(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "second"
    write_run(folder / "ddp", losses=LOSSES, gpu=True, state="failed", reason="x")
    write_run(folder / "other", losses=LOSSES, gpu=True)
    assert compare(folder, baseline, tmp_path / "again") == 1
    said = capsys.readouterr()
    assert "ddp was completed, and is failed now" in said.err
    assert "zero2 is in the baseline and not among these runs" in said.err
    assert "other is new and not in the baseline" in said.out


@pytest.mark.parametrize(
    "content",
    ["{", '{"version": 2, "runs": {"a": {}}}', '{"version": 1, "runs": {}}',
     '{"version": 1, "runs": {"a": {"allocated_peak_bytes": "1"}}}',
     '{"version": 1, "runs": {"a": 3}}'],
)  # fmt: skip
def test_a_damaged_baseline_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(content)
    assert compare(write_run(tmp_path / "ddp", losses=LOSSES), path, tmp_path / "out") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_files_of_others_are_not_overwritten(
    tmp_path: Path, baseline: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by a baseline nor by a report; an older one of either is replaced."""
    first, out = tmp_path / "first", tmp_path / "out"
    asked = [str(first), "--out", str(out), "--write-baseline"]
    assert main([*asked, str(baseline)]) == 0
    notes = tmp_path / "notes.json"
    notes.write_text('{"mine": 1}')
    assert main([*asked, str(notes)]) == 2
    assert f"{notes}: exists and is no baseline" in capsys.readouterr().err
    assert notes.read_text() == '{"mine": 1}'
    (tmp_path / "thesis").mkdir()
    written = tmp_path / "thesis" / "report.md"
    written.write_text("# My report\n")
    assert main([str(first), "--out", str(written.parent)]) == 2
    assert "has a report.md that no report has written" in capsys.readouterr().err
    assert [*written.parent.iterdir()] == [written]


def test_a_gpu_that_nothing_was_allocated_on_is_no_damage(tmp_path: Path) -> None:
    write_run(tmp_path / "run", losses=LOSSES, gpu=True, peak_bytes=0)
    path = tmp_path / "baseline.json"
    run = [str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    assert main([*run, "--write-baseline", str(path)]) == 0
    assert main([*run, "--against", str(path)]) == 0
