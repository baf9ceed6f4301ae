"""`launcher.train` as the one rank of each of several nodes, which are started by hand.

Its argument lists the nodes, as JSON: by rank, the folder, arguments and file for stderr of each;
and the port of their rendezvous.
"""

import json
import os
import sys

from launcher import train
from launcher.run import resume


def main() -> None:
    nodes, port = json.loads(sys.argv[1])
    folder, arguments, errors = nodes[int(os.environ["RANK"])]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_PORT=str(port))
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    os.chdir(folder)
    resume.SHARED_WITHIN_S = 1.0  # no file system here shows a folder late
    train.main(arguments)
