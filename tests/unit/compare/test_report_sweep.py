"""`report` on a sweep: every cell is a row, and what the sweep knows of its end is believed."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from report_folder import write_run

from launcher.compare.report.report_cli import main, report_sweep
from launcher.compare.sweep.sweep_folder import SweepFolder
from launcher.measure.records import Sweep, SweepRow, SweepState
from launcher.util.errors import UserError

LOSSES = [8 - 0.1 * step for step in range(20)]
STATES: dict[str, tuple[SweepState, str | None]] = {
    "good": ("completed", None),
    "hungry": ("oom", "no memory"),
    "slow": ("timeout", "stopped after 60.0 minutes"),
    "stopped": ("interrupted", "stopped by SIGINT"),
    "killed": ("failed", "exit code -9"),
    "now": ("running", None),
    "stuck": ("timeout", "stopped before it had a folder"),
    "refused": ("refused", "--offload-optimizer cpu needs sharding"),
    "rocket": ("unavailable", "needs a rocket"),
    "next": ("pending", None),
}
WITHOUT_FOLDER = ("stuck", "refused", "rocket", "next")
KNOWN_OF_ALL = {"run", "state", "reason", "reference", "loss_note"}


def write_sweep(path: Path, states: dict[str, tuple[SweepState, str | None]]) -> SweepFolder:
    folder = SweepFolder(path)
    folder.create()
    rows = [
        SweepRow(name=name, flags={"strategy": "ddp"}, state=state, reason=reason)
        for name, (state, reason) in states.items()
    ]
    folder.write(Sweep(nproc=2, arguments=["--nproc=2"], cells=rows))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    folder = write_sweep(tmp_path / "sweep", STATES)
    write_run(folder.run_folder("good"), losses=LOSSES)
    write_run(folder.run_folder("hungry"), state="oom", reason="no memory")
    for name in ("slow", "stopped", "killed", "now"):
        write_run(folder.run_folder(name), losses=LOSSES[:5], state="running")
    return folder.path


def reported(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((path / "report.json").read_text())
    return data


def rows_in(path: Path) -> dict[str, dict[str, Any]]:
    return {row["run"]: row for row in reported(path)["runs"]}


def test_every_cell_is_a_row_in_the_state_the_sweep_knows(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(sweep)]) == 0
    rows = rows_in(sweep)
    assert {name: (row["state"], row["reason"]) for name, row in rows.items()} == STATES
    assert rows["slow"]["steps"] == 5
    assert rows["slow"]["where"] == "backward of step 1, rank 1"
    printed = capsys.readouterr().out
    assert "refused: refused: --offload-optimizer cpu needs sharding" in printed
    assert "slow: timeout in backward of step 1, rank 1: stopped after" in printed
    assert "- rocket: unavailable: needs a rocket" in (sweep / "report.md").read_text()
    assert '"needs a rocket"' in (sweep / "report.html").read_text()


def test_cells_without_a_folder_say_nothing_else_and_change_nothing_else(sweep: Path) -> None:
    assert main([str(sweep)]) == 0
    with open(sweep / "report.csv", newline="") as file:
        table = {row["run"]: row for row in csv.DictReader(file)}
    for name in WITHOUT_FOLDER:
        known = {key for key, value in table[name].items() if value != "n/a"}
        assert known <= KNOWN_OF_ALL
    with_them = reported(sweep)
    assert len(with_them["settings"]) == 1
    assert "setting" not in with_them["columns"]
    assert [row["run"] for row in with_them["runs"][-4:]] == list(WITHOUT_FOLDER)
    assert {row["differs"] for row in with_them["runs"]} == {None}


def test_a_sweep_of_which_nothing_started_is_a_report(tmp_path: Path) -> None:
    states = {name: STATES[name] for name in WITHOUT_FOLDER}
    write_sweep(tmp_path / "sweep", states)
    assert main([str(tmp_path / "sweep")]) == 0
    assert {name: row["state"] for name, row in rows_in(tmp_path / "sweep").items()} == {
        name: state for name, (state, _) in states.items()
    }


def test_an_empty_cell_folder_is_the_cells_row(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, {"ddp": ("failed", "no port")})
    folder.run_folder("ddp").mkdir()
    assert main([str(tmp_path)]) == 0
    row = rows_in(tmp_path)["ddp"]
    assert (row["state"], row["reason"], row["steps"]) == ("failed", "no port", 0)


def test_earlier_attempts_are_said_and_no_rows(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, {"ddp": ("completed", None)})
    write_run(folder.run_folder("ddp"), losses=LOSSES, state="running")
    folder.move_aside("ddp")
    write_run(folder.run_folder("ddp"), losses=LOSSES)
    write_run(folder.run_folder("other.attempt1"), losses=LOSSES)
    assert main([str(tmp_path)]) == 0
    rows = rows_in(tmp_path)
    assert sorted(rows) == ["ddp", "other.attempt1"]
    assert rows["ddp"]["notes"] == ["ddp.attempt1 holds an earlier attempt, not shown"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"cells": [{"name": "ddp"}]}', '{"cells": "a"}'])
def test_a_damaged_sweep_file_is_noted_and_drops_no_run(tmp_path: Path, text: str) -> None:
    write_run(tmp_path / "cells" / "ddp", losses=LOSSES)
    write_run(tmp_path / "cells" / "zero2", strategy="zero2", losses=LOSSES)
    (tmp_path / "sweep.json").write_text(text)
    assert main([str(tmp_path)]) == 0
    rows = rows_in(tmp_path)
    assert {name: row["state"] for name, row in rows.items()} == {
        "ddp": "completed",
        "zero2": "completed",
    }
    assert rows["ddp"]["notes"] == ["sweep.json: damaged, left out"]


def test_cells_of_two_sweeps_are_told_apart(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_sweep(tmp_path / name, {"ddp": ("pending", None), name: ("pending", None)})
    # A cell that is also given on its own is still the sweep's.
    write_run(tmp_path / "a" / "cells" / "a", state="running")
    write_sweep(tmp_path / "a", {"ddp": ("pending", None), "a": ("timeout", "too slow")})
    given = [tmp_path, tmp_path / "a" / "cells" / "a"]
    assert main([*map(str, given), "--out", str(tmp_path / "out")]) == 0
    states = {name: row["state"] for name, row in rows_in(tmp_path / "out").items()}
    assert states == {
        "a/cells/ddp": "pending",
        "b/cells/ddp": "pending",
        "a": "timeout",
        "b": "pending",
    }


def test_a_sweep_ends_with_its_table_and_page(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report_sweep(sweep)
    assert {path.name for path in (sweep / "report").iterdir()} == {
        *("report.html", "report.csv", "report.md", "report.json")
    }
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == f"report: {sweep / 'report' / 'report.html'}"
    assert "rocket" in printed
    assert "needs a rocket" not in printed


def test_a_report_folder_that_cannot_be_made_is_one_sentence(sweep: Path) -> None:
    (sweep / "report").write_text("in the way")
    with pytest.raises(UserError, match="the folder cannot be created"):
        report_sweep(sweep)


def test_a_report_needs_no_completed_run(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, {"ddp": ("timeout", "slow"), "gpt2": ("completed", None)})
    write_run(folder.run_folder("ddp"), losses=LOSSES, state="running")
    write_run(folder.run_folder("gpt2"), losses=LOSSES, model="gpt2")
    assert main([str(tmp_path)]) == 0
    assert {row["state"] for row in rows_in(tmp_path).values()} == {"timeout", "completed"}


def test_paths_that_differ_are_shown_by_what_tells_them_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "a", losses=LOSSES, data="/data/books/README.md", lr=1e-3)
    write_run(tmp_path / "runs" / "b", losses=LOSSES, data="/data/books/text.txt", lr=2e-3)
    write_run(tmp_path / "runs" / "c", losses=LOSSES, data="hf:org/text:small", lr=2e-3)
    write_run(tmp_path / "runs" / "d", losses=LOSSES, data="/data/films/text.txt", lr=2e-3)
    assert main([str(tmp_path / "runs")]) == 0
    brief = {name: row["differs_brief"] for name, row in rows_in(tmp_path / "runs").items()}
    assert {name: text.split(", ")[0] for name, text in brief.items()} == {
        "a": "data README.md",
        "b": "data books/text.txt",
        "c": "data hf:org/text:small",
        "d": "data films/text.txt",
    }
    printed = capsys.readouterr().out
    page = (tmp_path / "runs" / "report.html").read_text()
    for text in (printed, (tmp_path / "runs" / "report.md").read_text()):
        assert "README.md" in text
        assert "/data/books" not in text
    assert '"differs":"data README.md, lr 0.001"' in page
    assert "/data/books" in (tmp_path / "runs" / "report.csv").read_text()
