"""`doctor` on a machine with a GPU."""

from pathlib import Path

from nullgpu.runs import command


def test_doctor_finds_the_gpu(tmp_path: Path) -> None:
    run = command(tmp_path, "launcher", "doctor", more={"COLUMNS": "200"})
    assert run.code == 0, run.output
    lines = {tuple(line.split()[:2]): line for line in run.output.splitlines()}
    assert "1 x NVIDIA H200 (139.80GiB, compute capability 9.0)" in lines["ok", "GPUs"]
    assert "bf16, flash attention, fp8" in lines["ok", "kernels"]
    assert ("ok", "NVML") in lines
