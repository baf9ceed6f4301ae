"""A watched program ends as it ends alone, whatever ends it and whatever fails in the observer."""

import signal
import sys
from pathlib import Path

import pytest
from watched_runs import PROGRAM, records, start, status, watched


@pytest.mark.parametrize(
    ("how", "code"),
    [
        *(("fork and penalty", 0), ("spawn and closure", 0), ("broken", 0)),
        *(("os._exit", 9), ("error", 1), ("memory", 1)),
        *(("mp.spawn: error", 1), ("mp.spawn: memory", 1), ("Process: error", 1)),
        *(("own hook: error", 1), ("own hook: memory", 1)),
        *(("small first", 0), ("inside backward", 0)),
    ],
)
def test_exit_code_and_output_are_the_programs(how: str, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    found, output, errors = watched(folder, how)
    assert found == code, errors
    assert output == alone()
    faults = [e for e in records(folder, "event") if e["name"] == "observer_fault"]
    if how == "broken":
        assert {fault["detail"]["where"] for fault in faults} >= {"enters", "begins"}
        return
    assert faults == []
    assert [step["step"] for step in records(folder, "step")] == [1, 2, 3, 4, 5]
    printed = [float(line.split()[2]) for line in output.splitlines()]
    earlier = int(how == "small first")  # whose loss is of the first step, too
    assert [step["loss"] for step in records(folder, "step")][earlier:] == printed[earlier:]
    phases = {record["phase"] for record in records(folder, "phase")}
    assert phases >= {"forward", "backward", *(() if how == "inside backward" else ("step",))}
    assert all(step["duration_s"] > 0 for step in records(folder, "step"))
    assert [path.name for path in folder.glob("rank*.jsonl")] == ["rank0.jsonl"]
    described = records(folder, "run")[-1]
    assert (described["model"], described["parameters"]) == ("Sequential", 49)
    ending = how.rpartition(": ")[2]
    expected = {"os._exit": "failed", "error": "failed", "memory": "oom"}
    assert status(folder)["state"] == expected.get(ending, "completed")
    if ending in ("error", "memory"):
        place = status(folder)["detail"]["place"]
        assert place["file"] == PROGRAM
        assert place["code"] in ('raise ValueError("of the program")', "torch.empty(2**60)")


_ALONE: list[str] = []


def alone() -> str:
    """Return the output of the program without an observer; the same for all ends."""
    if not _ALONE:
        output, errors = start(sys.executable, PROGRAM, "alone").communicate(timeout=120)
        assert len(output.splitlines()) == 5, errors
        _ALONE.append(output)
    return _ALONE[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_ends_the_program(number: signal.Signals, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output, errors = watched(folder, number.name, sends=number)
    # Python ends itself by SIGINT after its traceback.
    assert code == -number, errors
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)
    assert "path []" in output
    assert len(records(folder, "step")) >= 4  # SIGTERM leaves no time for the last one
    assert status(folder)["state"] == "failed"
    assert number.name in status(folder)["reason"] or number == signal.SIGINT


def test_a_signal_that_the_program_handles(tmp_path: Path) -> None:
    code, _, errors = watched(tmp_path / "run", "handles", sends=signal.SIGUSR1)
    assert code == 11, errors
