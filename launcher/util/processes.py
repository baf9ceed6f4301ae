"""Processor cores of this process, and children that never outlive their parent (Linux only).

A program that starts one of ours adds `for_children()` to its environment. The child arranges its
end first of all (see launcher/__init__.py), before seconds of imports.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return our cores by affinity or the control group's quota, whichever is less; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota_us, period_us = _QUOTA.read_text(encoding="utf-8").split()
    except OSError:
        return allowed
    return allowed if quota_us == "max" else min(allowed, max(1, int(quota_us) // int(period_us)))


PARENT = "SHARDSCALE_PARENT"
BY_ANY_TORCHRUN = "TORCHELASTIC_RUN_ID"
_PR_SET_PDEATHSIG = 1


def for_children() -> dict[str, str]:
    """Return the environment that ties a child's life to this process. Call it from the main
    thread: the kernel follows the thread."""
    return {PARENT: str(os.getpid())}


def signal_name(number: int) -> str:
    """Return a signal's name; real-time ones between the first and the last have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def die_with_parent() -> None:
    """Arrange this process's end by its environment: our child, or a rank of torch's torchrun."""
    parent = os.environ.pop(PARENT, None)  # not for children of this process
    if parent is not None or BY_ANY_TORCHRUN in os.environ:
        die_with(None if parent is None else int(parent))
    if parent is not None:
        _die_before_parent()


def die_with(parent: int | None) -> None:
    """Have the kernel kill this process when its parent ends, or now if that has ended."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Not getppid alone: a profiler may stand between the two.
    if parent is not None and parent not in _ancestors():
        os.kill(os.getpid(), signal.SIGKILL)


def _die_before_parent() -> None:
    """Raise the OOM score: the kernel then kills a child rather than the process that can report
    it."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):  # no Linux, or somebody has forbidden it
        # in thousandths of the memory, at most 1000 (proc_pid_oom_score_adj)
        score.write_text(str(min(1000, int(score.read_text()) + 300)))


def _ancestors() -> Iterator[int]:
    process_id = os.getppid()
    with contextlib.suppress(OSError):  # one that has just ended: the search is over
        while process_id > 0:
            yield process_id
            stat = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8", errors="replace")
            process_id = int(stat.rpartition(")")[2].split()[1])  # field 4, ppid (proc_pid_stat)
