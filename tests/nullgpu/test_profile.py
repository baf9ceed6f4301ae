"""`profile` on a device that computes nothing."""

from pathlib import Path

from nullgpu.runs import command


def test_profile_does_not_believe_it(tmp_path: Path) -> None:
    out = tmp_path / "machine.json"
    run = command(tmp_path, "launcher", "profile", "--out", str(out))
    assert run.code == 2, run.output
    assert "a product of ones on NVIDIA H200 sums to" in run.output
    assert not out.exists()
