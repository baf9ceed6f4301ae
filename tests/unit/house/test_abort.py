"""A process that a library aborts, as NCCL does with a collective that takes too long."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ABORTS = """
import os
from launcher import train

train.prepare = lambda *_, **__: os.abort()
train.main([])
"""


def test_an_abort_says_where_every_thread_was() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABORTS], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == -6
    assert "Fatal Python error: Aborted" in done.stderr
    assert "launcher/train.py" in done.stderr
