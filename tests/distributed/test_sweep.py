"""Sweeps with real runs, real failures and real signals."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from harness import TIMEOUT_S, environment, python, write_text

from launcher.compare.report.find import read_sweep
from launcher.compare.sweep.cell import run_to_end
from launcher.compare.sweep.sweep_cli import main

SWEEP = (
    "import sys; from launcher.compare.sweep.sweep_cli import main; sys.exit(main(sys.argv[1:]))"
)
ENDLESS = 10_000_000


def base(folder: Path) -> dict[str, Any]:
    return {
        **{"layers": 1, "d_model": 32, "heads": 2, "context": 16, "vocab_size": 260},
        **{"tokenizer": "byte", "data": str(write_text(folder / "text.txt"))},
        **{"device": "cpu", "steps": 4, "log_every": 1, "report_to": "none"},
    }


def write_grid(folder: Path, *cells: dict[str, Any]) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump({"base": base(folder), "cells": list(cells)}))
    return path


def sweep(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    return python("-c", SWEEP, *arguments)


def rows(out: Path) -> dict[str, Any]:
    return {row["name"]: row for row in json.loads((out / "sweep.json").read_text())["cells"]}


def states(out: Path) -> dict[str, str]:
    return {name: row["state"] for name, row in rows(out).items()}


def processes_of(out: Path) -> list[list[str]]:
    """Command lines of the processes that name this sweep's folder."""
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if any(str(out) in part for part in command)]


def tree(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in sorted(folder.rglob("*")) if p.is_file()}


def test_five_cells_of_which_most_go_wrong(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    grid = write_grid(
        tmp_path,
        {"name": "good", "strategy": "single"},
        {"name": "hungry", "strategy": "single", "memory_limit": "300MiB", "micro_batch": 20_000},
        {"name": "broken", "strategy": "fsdp", "lr": 1e9, "clip": 0.0},
        {"name": "contradictory", "strategy": "ddp", "offload_optimizer": "cpu"},
        {"name": "later", "attention": "rocket", "unavailable": "needs a rocket"},
    )
    asked = ("--nproc=1", "--grid-file", grid, "--out", out)
    done = sweep(*asked)
    assert done.returncode == 0, done.stderr
    assert processes_of(out) == []
    assert states(out) == {
        "good": "completed",
        "hungry": "oom",
        "broken": "failed",
        "contradictory": "refused",
        "later": "unavailable",
    }
    check_rows(out)
    last = done.stdout.splitlines()[-1]
    assert last.startswith("5 cells: 1 completed, 1 oom, 1 failed, 1 refused, 1 unavailable")

    # Again: only what is not done, with its earlier attempt kept. Nobody gets far in 3 s.
    kept = {name: tree(out / "cells" / name) for name in ("good", "hungry")}
    done = sweep(*asked, "--timeout-minutes=0.05")
    assert done.returncode == 0, done.stderr
    assert processes_of(out) == []
    assert kept == {name: tree(out / "cells" / name) for name in kept}
    assert sorted(path.name for path in (out / "logs").iterdir()) == [
        *("broken.attempt1.txt", "broken.txt", "good.txt", "hungry.txt"),
    ]
    assert "good: completed" in done.stdout
    assert "(kept)" in done.stdout


def check_rows(out: Path) -> None:
    found = rows(out)
    figures = found["good"]["figures"]
    summary = json.loads((out / found["good"]["folder"] / "summary.json").read_text())
    assert figures == {key: summary[key] for key in figures}
    assert figures["tokens_per_s"] > 0
    assert figures["peak_bytes"] > 0
    assert found["hungry"]["figures"] is None
    assert "--lr" in found["broken"]["reason"]
    assert found["contradictory"]["reason"].startswith("--offload-optimizer cpu needs")
    assert found["later"]["reason"] == "needs a rocket"
    for row in found.values():
        ran = row["state"] not in ("refused", "unavailable")
        assert (row["duration_s"] is not None) == ran
        assert (out / row["log"]).exists() == ran


def test_ctrl_c_ends_the_ranks_and_the_same_command_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    endless = {"name": "endless", "strategy": "ddp", "steps": ENDLESS, "save_every": 1, "keep": 1}
    grid = write_grid(tmp_path, endless)
    asked = [sys.executable, "-c", SWEEP, "--nproc=2", f"--grid-file={grid}", f"--out={out}"]
    process = subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        wait_for_checkpoint(process, out / "cells" / "endless")
        process.kill()  # which its cell does not survive, so that the next start is alone
        process.communicate(timeout=TIMEOUT_S)
        while processes_of(out):
            time.sleep(0.1)
        log = out / "logs" / "endless.txt"
        before = log.read_text()
        process = subprocess.Popen(asked, env=environment(), stdout=subprocess.PIPE, text=True)
        while "resumed from" not in log.read_text().removeprefix(before):
            assert process.poll() is None
            time.sleep(0.1)
        assert states(out) == {"endless": "running"}
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert processes_of(out) == []
    assert states(out) == {"endless": "interrupted"}
    assert f"continue with: python -m launcher sweep --out {out}" in output

    assert main([f"--out={out}", f"--grid-file={grid}", "--nproc=2", "--seed=4"]) == 2
    assert "endless has seed not set there and 4 here" in capsys.readouterr().err
    assert main([f"--out={out}", f"--grid-file={grid}", "--nproc=1"]) == 2
    assert "has --nproc 2, not 1" in capsys.readouterr().err

    done = sweep(f"--out={out}", "--timeout-minutes=0.02")
    assert done.returncode == 4, done.stderr  # no cell has completed
    assert states(out) == {"endless": "timeout"}
    assert "--timeout-minutes" in rows(out)["endless"]["reason"]
    assert rows(out)["endless"]["flags"]["steps"] == ENDLESS
    # What was stopped goes on in its folder; only what has failed starts in a new one.
    assert not (out / "cells" / "endless.attempt1").exists()


def wait_for_checkpoint(process: "subprocess.Popen[str]", run: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not list((run / "checkpoints").glob("step-*")):
        assert process.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_cells_that_run_apart_lose_nothing_and_one_that_is_killed_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    steps = 300
    grid = write_grid(
        tmp_path,
        {"name": "long", "strategy": "ddp", "steps": steps, "save_every": 10},
        {"name": "short", "strategy": "single"},
        {"name": "contradictory", "strategy": "ddp", "offload_optimizer": "cpu"},
    )
    assert main(["--prepare", "--nproc=1", f"--grid-file={grid}", f"--out={out}"]) == 0
    assert "run each of 0,1 with" in capsys.readouterr().out
    assert states(out) == {"long": "pending", "short": "pending", "contradictory": "refused"}

    asked = [sys.executable, "-c", SWEEP, f"--out={out}", "--cell"]
    long, short = (
        subprocess.Popen([*asked, cell], env=environment(), stdout=subprocess.PIPE, text=True)
        for cell in "01"
    )
    wait_for_checkpoint(long, out / "cells" / "long")
    for member in [psutil.Process(long.pid), *psutil.Process(long.pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    long.communicate()
    output, _ = short.communicate(timeout=TIMEOUT_S)
    assert (short.returncode, "short: completed" in output) == (0, True), output
    now = {row.name: row.state for row in read_sweep(out).cells}
    assert now == {"long": "running", "short": "completed", "contradictory": "refused"}

    done = sweep(f"--out={out}", "--cell=0")
    assert done.returncode == 0, done.stderr
    recorded = (out / "cells" / "long" / "rank0.jsonl").read_text().splitlines()
    records = list(map(json.loads, recorded))
    assert [r["step"] for r in records if r["kind"] == "step"] == list(range(1, steps + 1))
    assert "resumed" in [r["name"] for r in records if r["kind"] == "event"]
    assert sorted(path.name for path in (out / "cells").iterdir()) == ["long", "short"]

    # The same sweep, continued on one machine, has nothing left to do.
    assert main([f"--out={out}"]) == 0
    assert capsys.readouterr().out.count("(kept)") == 2
    assert states(out) == {"long": "completed", "short": "completed", "contradictory": "refused"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--prepare", "--grid=seed=1,2"), "processes per cell is missing: give --nproc 4"),
        (("--prepare", "--nproc=1"), "nothing to compare: give --grid"),
        (("--cell=0",), "holds no sweep: prepare one with sweep --prepare"),
        (("--cell=0", "--seed=1"), "--cell runs a cell as it was prepared: give only --out"),
    ],
)
def test_what_cannot_be_prepared_or_run_apart(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, f"--out={tmp_path / 'sweep'}"]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert len(printed.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_bad_input_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "sweep"
    done = sweep("--nproc=2", "--grid", "strategy=ddp,zero5", f"--out={out}")
    assert done.returncode == 2
    assert done.stderr.startswith("shardscale: --grid strategy=zero5: use one of")
    assert len(done.stderr.splitlines()) == 1
    missing = ("--grid=strategy=ddp", "--data=gone.txt", "--device=cpu", f"--out={out}")
    assert main(["--nproc=1", *missing]) == 2
    assert capsys.readouterr().err.startswith("shardscale: --data gone.txt")
    assert not out.exists()


def test_somebody_elses_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["--nproc=1", "--grid=strategy=ddp", "--device=cpu", f"--out={tmp_path}"]) == 2
    assert "is not a sweep's folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_lock_that_is_a_folder_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path / "text.txt"), tmp_path / "sweep"
    (out / ".lock").mkdir(parents=True)
    flags = ["--nproc=1", "--grid=strategy=single", "--device=cpu", "--tokenizer=byte"]
    assert main([*flags, "--model=nano", f"--data={text}", f"--out={out}"]) == 2
    assert f"{out}/.lock cannot be locked: Is a directory" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX sessions")
def test_a_grandchild_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1); "
    stubborn += "time.sleep(600)"
    parent = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-uc', {stubborn!r}, {str(tmp_path)!r}],"
        " start_new_session=True, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    log = tmp_path / "log.txt"
    log.touch()
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(run_to_end, [sys.executable, "-c", parent], log=log, timeout_s=5)
        while not log.read_text() and not ended.done():
            time.sleep(0.1)
        running = processes_of(tmp_path)
    assert ended.result() is None
    assert len(running) >= 1
    assert processes_of(tmp_path) == []
