"""The least memory that a run takes, beside what this machine has."""

import psutil
import pytest

from launcher.config.arguments import parse_run_config
from launcher.config.resolve import resolve
from launcher.run import capacity
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
        capacity.check_minimum_memory(resolved, world_size=1, ranks_per_node=1)
