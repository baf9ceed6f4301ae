"""Another program as a rank: its path and arguments are this one's arguments."""

import runpy
import sys


def main() -> None:
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
