"""A stop signal ends a rank wherever it comes."""

import os
import signal
import subprocess
import sys

from launcher.util.errors import ExitCode

STOPPED_IN_A_DESTRUCTOR = """
import os, signal, time
import torch
from launcher.parallel.world import World
from launcher.run.ending import ending

class Held:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)  # Python handles the signal here, and must ignore what the handler raises

world = World(rank=0, local_rank=0, size=1, local_size=1, device=torch.device("cpu"))
with ending(world):
    held = Held()
    del held
    time.sleep(60)
"""


def test_a_signal_inside_a_destructor_is_not_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_IN_A_DESTRUCTOR],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RANK"},
        timeout=50,
    )
    assert done.returncode == ExitCode.PREEMPTED, done.stderr
    name = signal.SIGTERM.name
    assert done.stderr == (
        f"shardscale: stopped by {name} before its first step: there was nothing to save\n"
    )
