"""`launcher.train` whose rank 0 begins a second after the others."""

import os
import time

from launcher import train


def main() -> None:
    if os.environ["RANK"] == "0":
        time.sleep(1)
    train.main()
