"""The least memory that a run takes, beside what this machine has."""

import shutil
from pathlib import Path

import psutil
import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.run import capacity
from launcher.run.prepare import prepare
from launcher.run.run_folder import RunFolder
from launcher.util.errors import UserError


def test_a_host_that_is_short_is_not_said_to_lack_what_a_gpu_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capacity, "host_bytes", lambda: 2**25)
    monkeypatch.setattr(capacity, "_device_bytes", lambda: 80 * 2**30)
    monkeypatch.setattr(psutil, "swap_memory", lambda: type("Swap", (), {"total": 0})())
    config = parse_run_config(["--model=gpt2-xl", "--device=cuda", "--micro-batch=4"])
    resolved = resolve(config, world_size=1, device_type="cuda")
    with pytest.raises(UserError, match=r"^1 rank on this machine and the rest need .*host"):
        capacity.check_minimum_memory(resolved, ranks_per_node=1)


@pytest.mark.parametrize("resumes", [False, True])
def test_a_disk_without_room_for_a_checkpoint_is_refused_before_the_start(
    resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDSCALE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("A text that is read over and over. " * 300)
    model = ["--layers=1", "--d-model=48", "--heads=2", "--context=16", "--tokenizer=byte"]
    flags = [*model, "--vocab-size=257", "--steps=3", "--device=cpu", f"--out={tmp_path / 'run'}"]
    if resumes:
        RunFolder(tmp_path / "run").begin({"steps": 3}, reopens=False)
        flags.append("--resume=auto")
    full = shutil.disk_usage(tmp_path)._replace(free=10_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    with pytest.raises(UserError, match=r"a checkpoint takes .*: make room, choose another place"):
        prepare([*flags, f"--data={tmp_path / 'text.txt'}"], world_size=1, ranks_per_node=1)
