"""The plan of a GPU's 25 minutes, on cheap commands: interrupted, resumed, out of time, failing."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from one_run import off_plan
from parts import LATER, parts
from plan import INSTALL_S, install, slug
from runner import Part

ROOT = Path(__file__).parents[3]
PLAN = ROOT / "bench" / "gpu" / "plan.py"
# In a process of its own, since the plan ends every child of its process.
DRIVER = """
import json, sys, time
from pathlib import Path
from processes import Stop
from runner import Part, Results, run_plan

task = json.loads(sys.argv[1])
folder = Path(task["folder"])
with Stop() as stop:
    failed = run_plan(
        [Part(**part) for part in task["parts"]],
        Results(task["machine"], task["code"], read=[folder], written=[folder]),
        folder / "work",
        environment={},
        ends_s=time.monotonic() + task["most_s"],
        patience=task["patience"],
        again=task["again"],
        stop=stop,
        kept=lambda: print("kept", flush=True),
    )
sys.exit(10 + failed)
"""
H200 = {"name": "NVIDIA H200", "figures": "none", "driver": "580", "torch": "2.11"}
LONG_S = 600
MIB = 2**20


def shell(name: str, text: str, *, section: str = "first", budget_s: int = LONG_S) -> Part:
    return Part(section=section, name=name, words=("/bin/sh", "-c", text), budget_s=budget_s)


def start(folder: Path, chosen: Sequence[Part], **more: Any) -> subprocess.Popen[str]:
    fields = ("section", "name", "words", "budget_s")
    task = {
        "folder": str(folder),
        "parts": [{field: getattr(part, field) for field in fields} for part in chosen],
        **{"machine": H200, "code": {"sources": "a", "commit": None}},
        **{"most_s": LONG_S, "patience": 1, "again": False, **more},
    }
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(task)],
        env={**os.environ, "PYTHONPATH": str(PLAN.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, chosen: Sequence[Part], **more: Any) -> tuple[int, list[str]]:
    """Run the parts, and return how many have failed and the lines that were printed."""
    process = start(folder, chosen, **more)
    output, _ = process.communicate(timeout=60)
    assert process.returncode >= 10, output
    return process.returncode - 10, output.splitlines()


def records(folder: Path, section: str = "first") -> dict[str, dict[str, Any]]:
    path = folder / f"{section}.json"
    return {r["part"]: r for r in json.loads(path.read_text())} if path.exists() else {}


def wait_for(path: Path) -> str:
    until = time.monotonic() + 30
    while not (path.exists() and path.read_text().endswith("\n")):
        assert time.monotonic() < until, f"no {path}"
        time.sleep(0.02)
    return path.read_text()


def counted(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_part_that_fails_is_recorded_with_its_last_lines_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    prints = r"printf 'bar 1\rbar 2\r\nsaid\n'"
    writes = """echo '{"ms": 3}' > {out}/found.json; echo '{' > {out}/half.json"""
    chosen = [
        shell("good", f"{prints}; {writes}"),
        shell("bad", "for i in $(seq 60); do echo line $i; done; exit 3"),
        Part(section="second", name="absent", words=("/no/such/command",), budget_s=LONG_S),
        shell("last", "true", section="second"),
    ]
    failed, printed = run(tmp_path, chosen)
    assert failed == 2
    first, second = records(tmp_path), records(tmp_path, "second")
    good, bad = first["first/good"], first["first/bad"]
    assert (good["state"], good["figures"], good["last_lines"]) == (
        "done",
        {"found": {"ms": 3}},
        ["bar 2", "said"],
    )
    assert good["machine"] == H200
    assert (bad["state"], bad["exit_code"], bad["why"]) == ("failed", 3, "exit code 3")
    assert bad["last_lines"] == [f"line {i}" for i in range(21, 61)]
    assert second["second/absent"]["state"] == "failed"
    assert "/no/such/command" in second["second/absent"]["why"]
    assert second["second/last"]["state"] == "done"
    (line,) = (line for line in printed if line.startswith("[2/4] first/bad: failed (exit code 3)"))
    assert "s to go" in line
    assert "    line 60" in printed
    assert list(tmp_path.glob("*.new")) == []


def test_a_result_is_there_before_the_next_part_begins(tmp_path: Path) -> None:
    look = f"grep -q first/one {tmp_path}/first.json"
    failed, printed = run(tmp_path, [shell("one", "true"), shell("two", look)])
    assert failed == 0, printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_running_part_and_the_same_command_goes_on(
    number: signal.Signals, tmp_path: Path
) -> None:
    ran, gate = tmp_path / "ran", tmp_path / "gate"
    waits = f"echo $$ > {tmp_path}/part; setsid sh -c 'echo $$ > {tmp_path}/rank; sleep 600' & wait"
    chosen = [
        shell("one", f"echo one >> {ran}"),
        shell("two", f"test -e {gate} && exit; {waits}"),
        shell("three", f"echo three >> {ran}"),
    ]
    process = start(tmp_path, chosen)
    ids = [int(wait_for(tmp_path / name)) for name in ("part", "rank")]
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 10, output
    # The second one is in a session of its own, as a rank is.
    assert not any(is_alive(process_id) for process_id in ids)
    assert list(records(tmp_path)) == ["first/one"]
    assert f"[2/3] first/two: cut ({number.name})" in output
    assert "1 of 3 parts left" in output

    gate.touch()
    failed, printed = run(tmp_path, chosen)
    assert failed == 0
    assert printed[0].startswith("[1/3] first/one: done before")
    assert [r["state"] for r in records(tmp_path).values()] == ["done"] * 3
    assert counted(ran) == "one\nthree\n"


def is_alive(process_id: int) -> bool:
    """Neither gone nor a zombie that whoever is process 1 has not collected yet."""
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{process_id}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"
    return False


def test_a_part_that_ignores_sigterm_is_killed_by_the_second_signal(tmp_path: Path) -> None:
    stubborn = f"trap '' TERM; echo $$ > {tmp_path}/part; while :; do sleep 1; done"
    process = start(tmp_path, [shell("stubborn", stubborn)])
    process_id = int(wait_for(tmp_path / "part"))
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not is_alive(process_id)


def test_what_the_plans_time_cuts_has_no_result_and_runs_next_time(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    chosen = [
        shell("one", "true"),
        shell("two", f"test -e {gate} || sleep 600"),
        shell("three", "true"),
    ]
    failed, printed = run(tmp_path, chosen, most_s=2)
    assert failed == 0
    assert any("first/two: cut (the plan's time is over)" in line for line in printed)
    assert list(records(tmp_path)) == ["first/one"]
    gate.touch()
    run(tmp_path, chosen)
    assert list(records(tmp_path)) == ["first/one", "first/two", "first/three"]


def test_a_part_ends_at_its_own_limit_as_failed(tmp_path: Path) -> None:
    chosen = [shell("slow", "echo begun; sleep 600", budget_s=1), shell("next", "true")]
    failed, _ = run(tmp_path, chosen)
    assert failed == 1
    slow = records(tmp_path)["first/slow"]
    assert (slow["state"], slow["why"]) == ("failed", "ended at its limit of 1 s")
    assert slow["last_lines"] == ["begun"]
    assert records(tmp_path)["first/next"]["state"] == "done"


def test_a_result_counts_for_its_gpu_its_code_and_its_command(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    part = shell("one", f"echo again >> {ran}")
    other = shell("one", f"true; echo again >> {ran}")
    asked: list[tuple[Part, dict[str, Any], int]] = [
        (part, {}, 1),
        (part, {}, 1),
        (part, {"code": {"sources": "a", "commit": "another name of it"}}, 1),
        (part, {"code": {"sources": "b", "commit": None}}, 2),
        (part, {"machine": {**H200, "name": "NVIDIA H100 80GB HBM3"}}, 3),
        (other, {}, 4),
        (other, {"again": True}, 5),
    ]
    for chosen, more, times in asked:
        run(tmp_path, [chosen], **more)
        assert counted(ran) == "again\n" * times, more


def test_a_failed_part_is_not_run_again_but_counted(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    part = shell("bad", f"echo once >> {ran}; exit 1")
    assert [run(tmp_path, [part])[0] for _ in range(2)] == [1, 1]
    assert counted(ran) == "once\n"


def test_results_of_another_run_in_the_same_file_are_kept(tmp_path: Path) -> None:
    run(tmp_path, [shell("one", "true")])
    run(tmp_path, [shell("two", "true")], code={"sources": "b", "commit": None})
    assert {r["code"]["sources"] for r in records(tmp_path).values()} == {"a", "b"}


@pytest.mark.parametrize("content", ["{", "{}x", "3", '["first/one"]', '[{"part": "first/one"}]'])
def test_a_file_that_is_none_of_results_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "first.json").write_text(content)
    process = start(tmp_path, [shell("one", "true")])
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == f"{tmp_path}/first.json is not a file of the plan's results: move it away\n"


def test_the_plan_is_25_minutes_in_the_order_of_what_it_tells() -> None:
    chosen = parts()
    first = [part.budget_s for part in chosen if part.section not in LATER]
    assert sum(first) + INSTALL_S <= 25 * 60
    assert len({part.label for part in chosen}) == len(chosen)
    sections = list(dict.fromkeys(part.section for part in chosen))
    assert sections == [
        *("default", "kernels", "strategies", "precision", "compile", "peers", *LATER)
    ]
    assert chosen[0].label == "default/run"
    files = {word for part in chosen for word in part.words if word.endswith(".py")}
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_its_page_has_the_seconds_of_each_section() -> None:
    page = (PLAN.parent / "README.md").read_text(encoding="utf-8")
    shown = {
        row[1]: int(row[2]) for row in re.finditer(r"^\| `(\w+)` \|.*\| (\d+) \|$", page, re.M)
    }
    budgets = Counter[str]()
    for part in parts():
        budgets[part.section] += part.budget_s
    assert shown == budgets


def plan(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PLAN), *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_list_shows_budgets_and_a_wrong_part_is_refused() -> None:
    done = plan("--list", "--only", "kernels")
    assert done.returncode == 0
    assert "kernels/values" in done.stdout
    assert "default/run" not in done.stdout
    done = plan("--only", "kernel")
    assert done.returncode == 2
    assert done.stderr == "--only kernel: no such part; --list shows all\n"


def test_without_a_gpu_it_says_so() -> None:
    done = plan()
    assert done.returncode == 2
    assert "finds no GPU" in done.stderr


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("null GPU as NVIDIA H200", "null-gpu-as-h200"),
    ],
)
def test_each_gpu_has_its_own_folder(name: str, folder: str) -> None:
    assert slug(name) == folder


def write_wheel(folder: Path, name: str) -> None:
    about = f"{name}-1.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


def test_wheels_are_installed_once_also_from_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plan.WHEELS_PYTHON", sys.version_info[:2])
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    write_wheel(wheels, "first")
    assert install(wheels, site) == site
    assert (site / "first.py").exists()
    (site / "first.py").unlink()  # tells whether it comes again
    copy = shutil.copytree(wheels, tmp_path / "copy")
    os.utime(copy)
    install(copy, site)
    assert not (site / "first.py").exists()
    write_wheel(copy, "second")
    install(copy, site)
    assert (site / "first.py").exists()
    assert (site / "second.py").exists()


def test_another_python_uses_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plan.WHEELS_PYTHON", (3, 0))
    assert install(tmp_path, tmp_path / "site") is None
    assert not (tmp_path / "site").exists()


def test_a_ledger_is_held_line_by_line() -> None:
    planned = {"params": 500 * MIB, "activations": 9_000 * MIB, "peak": 10_000 * MIB}
    measured = {"params": 507 * MIB, "activations": 8_990 * MIB, "peak": 10_001 * MIB}
    lines = {line: {"planned": planned[line], "measured": measured[line]} for line in planned}
    assert off_plan({"ledger": lines}) == ["activations 9,000.0 MiB planned, 8,990.0 measured"]
    lines["params"]["measured"] = 0
    assert [line.partition(" ")[0] for line in off_plan({"ledger": lines})] == [
        *("params", "activations")
    ]
    (why,) = off_plan({"plan": {"reason": "no GPU of that name"}})
    assert "no GPU of that name" in why
