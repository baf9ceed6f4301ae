"""Ranks that the agent ends at once cannot report each other's end as a failure."""

import os
import subprocess
import sys

import psutil

from launcher.run.agent_signals import _kill


def test_a_rank_that_is_ended_does_not_outlive_another_long_enough_to_say_so() -> None:
    """A rank whose peer is gone records a failure, over the reason why all were ended."""
    first_end, last_end = os.pipe()
    first = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[last_end]
    )
    last = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os; os.read({first_end}, 1); print('lost')"],
        stdout=subprocess.PIPE,
        pass_fds=[first_end],
    )
    os.close(last_end)
    try:
        while psutil.Process(last.pid).status() != psutil.STATUS_SLEEPING:
            pass
        between = psutil.Process(first.pid)
        _kill([between] * 500 + [psutil.Process(last.pid)])
        said = last.stdout
        assert said is not None
        assert said.read() == b""
    finally:
        os.close(first_end)
        for process in (first, last):
            with process:
                process.kill()
