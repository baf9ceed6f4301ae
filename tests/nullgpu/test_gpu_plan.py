"""The plan of bench/gpu on the null GPU: parts that compare values are recorded as failed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from nullgpu.runs import ROOT, environment

REHEARSE = [sys.executable, "tests/nullgpu/rehearse.py"]


def rehearse(folder: Path, *only: str) -> tuple[int, dict[str, dict[str, Any]]]:
    command = [*REHEARSE, str(folder), "--again", "--only", *only]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    files = (folder / "out").glob("*.json")
    records = [record for file in files for record in json.loads(file.read_text())]
    return done.returncode, {r["part"]: r for r in records if r["part"] in only}


def test_a_failed_comparison_is_recorded_and_the_next_part_runs(tmp_path: Path) -> None:
    code, records = rehearse(tmp_path, "kernels/values", "strategies/fsdp")
    assert code == 1
    values, fsdp = records["kernels/values"], records["strategies/fsdp"]
    assert values["state"] == "failed"
    assert any("FAILED tests/gpu/" in line for line in values["last_lines"])
    assert fsdp["state"] == "done", fsdp["last_lines"]  # its ledger is held, line by line
    run = fsdp["figures"]["run"]
    assert run["ledger"]["peak"]["measured"] > 2**30
    assert "step_s" not in run  # nothing has computed
    for record in records.values():
        assert record["machine"]["name"] == "null GPU as NVIDIA H200"
        assert record["machine"]["figures"] == "real allocator, no kernels run"
    assert (tmp_path / "out" / "records.tar.gz").stat().st_size > 0


def test_its_results_are_not_published(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    variables.pop("OUT", None)
    command = [sys.executable, "bench/gpu/plan.py"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith(
        "results of the null GPU are no measurements: set OUT to another folder\n"
    )
    assert list((ROOT / "bench" / "results").glob("gpu-*null-gpu*")) == []
