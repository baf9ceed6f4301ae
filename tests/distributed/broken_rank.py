"""`launcher.train` with what `faults/` breaks, as `faults/` on PYTHONPATH does it for processes."""

import runpy
import sys
from pathlib import Path

from launcher import train

FAULTS = Path(__file__).with_name("faults")


def main() -> None:
    sys.path.insert(0, str(FAULTS))
    runpy.run_path(str(FAULTS / "sitecustomize.py"))
    train.main()
