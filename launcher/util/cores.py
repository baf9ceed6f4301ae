"""How many processor cores are ours."""

import os
import sys
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores by affinity and by the control group's quota, whichever is less; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota_us, period_us = _QUOTA.read_text(encoding="utf-8").split()
    except OSError:
        return allowed
    return allowed if quota_us == "max" else min(allowed, max(1, int(quota_us) // int(period_us)))
