"""Start a script as two ranks, as torchrun would, without its imports; exit code of the worst."""

import os
import socket
import subprocess
import sys

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
ranks = [
    subprocess.Popen(
        [sys.executable, *sys.argv[1:]],
        env={**os.environ, **shared, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank},
    )
    for rank in ("0", "1")
]
sys.exit(max(rank.wait() for rank in ranks))
