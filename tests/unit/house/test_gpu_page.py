"""Tables of docs/on-a-gpu.md where parts are missing, have failed, or were refused."""

import json
from pathlib import Path
from typing import Any

import gpu_page
import gpu_results
import pytest
from gpu_headline import headline

RUN: dict[str, Any] = {
    **{"flags": ["--model", "seed-134m", "--micro-batch", "4", "--precision", "bf16"]},
    **{"micro_batch": 4, "seq_len": 256, "losses": [2.0, 1.0], "tokens_per_s": 1000.0},
    **{"step_s": 0.5, "reserved_peak_bytes": 2**30, "plan": {"predicted_step_s": 0.4}},
    "ledger": {"peak": {"planned": 2**30, "measured": 2**30}},
}
FAILED = {**RUN, "step_s": None, "losses": [], "ledger": None, "reserved_peak_bytes": None}
REHEARSED = {
    "loop": {
        "rehearsed": {"error": "no such program"},
        "measured": {"allocated_peak_bytes": 2**30, "reserved_peak_bytes": 2**31, "step_s": 0.5},
    },
    "trainer": {"rehearsed": {"error": "..."}, "measured": {"error": "..."}},
}
PEERS = [
    {"peer": "zero9", "case": "zero3", "flags": "selective", "error": "ended with exit code 1"}
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_results, "FOLDER", tmp_path)
    return tmp_path


def write(folder: Path, **figures: dict[str, Any]) -> None:
    """A record for each part, whose name has `_` for `/`."""
    for name, found in figures.items():
        section, _, part = name.partition("_")
        record = {"part": f"{section}/{part}", "figures": found, "last_lines": ["2 failed in 1s"]}
        (folder / f"{name}.json").write_text(json.dumps([record]))


def rows(kind: str) -> list[str]:
    return [line for line in gpu_page.TABLES[kind]([]).splitlines() if line.startswith("|")][2:]


def test_without_results_tables_are_empty(folder: Path) -> None:
    assert headline(["x.md"]).strip() == "One run each on [one NVIDIA H200](x.md):"
    assert all(rows(kind) == [] for kind in gpu_page.TABLES if kind != "gpu-headline")


def test_a_failed_run_says_so_and_is_compared_with_nothing(folder: Path) -> None:
    flags = [*RUN["flags"], "--zero", "3"]
    write(folder, default_run={"run": RUN}, strategies_zero3={"run": {**FAILED, "flags": flags}})
    good, failed = rows("gpu-runs")
    assert good.startswith("| seed-134m, 4 x 256 | defaults | 1.000 | 1.000 | 0 | 1.000 | ")
    assert good.endswith(" | 296.0-448.0 | 500.0 | 1,000 |  |")
    assert failed == f"| seed-134m, 4 x 256 | `--zero 3` | failed |{' n/a |' * 7}"
    assert "planned peaks of 1 training runs" in headline(["x.md"])


def test_losses_are_compared_with_the_first_run_of_the_shape(folder: Path) -> None:
    other = {**RUN, "flags": [*RUN["flags"], "--strategy", "fsdp"], "losses": [2.0, 1.01]}
    window = {**other, "flags": [*RUN["flags"], "--window", "64"]}
    write(folder, default_run={"run": RUN}, strategies_fsdp={"run": other})
    write(folder, compile_window={"run": window})
    assert [row.split(" | ")[-1] for row in rows("gpu-runs")] == [" |", "1.0e-02 |", " |"]


def test_rehearsals_kernels_and_peers_that_failed_say_so(folder: Path) -> None:
    times = {"rows": {"attention, flash": {"error": "no kernel"}, "loss, ours": {"ms": 1.234}}}
    write(folder, peers_rehearsed={"rehearsed": REHEARSED}, kernels_times={"times": times})
    write(folder, peers_zero3={"peers": {"rows": PEERS}})
    loop, trainer = rows("gpu-programs")
    assert loop.endswith("| n/a | 1.000 | n/a | 2.000 | n/a | 0.500 |")
    assert trainer.endswith("|" + " n/a |" * 6)
    assert rows("gpu-kernels") == ["| attention | flash | failed |", "| loss | ours | 1.23 |"]
    assert rows("gpu-peers") == ["| zero9 | `selective` | failed | n/a | n/a | n/a | n/a |"]
    assert rows("gpu-tests")[0] == "| `kernels/times` | 2 failed |"
