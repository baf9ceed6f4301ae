"""`launcher.train` as the one rank of each of several nodes, which are started by hand.

Its argument lists the nodes, as JSON: by rank, the folder, arguments and file for stderr of each;
and the port at which they meet.
"""

import json
import os
import sys

from launcher import train


def main() -> None:
    nodes, port = json.loads(sys.argv[1])
    folder, arguments, errors = nodes[int(os.environ["RANK"])]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT=str(port))
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.chdir(folder)
    train.main(arguments)
