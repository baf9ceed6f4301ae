"""Groups of ranks, one group after the other, forked from one process that has imported what they
need: torch and DeepSpeed take longer to import than most cases take.

    python forked_ranks.py '[[2, "X_rank", "ARGUMENT", ...], ...]'

As under torchrun, the first rank that fails ends its group. Exit code 1 if one has failed.
"""

import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch

from launcher.parallel.rendezvous import LOOPBACK, listening_store
from launcher.strategies.zero.engine import import_deepspeed


def main() -> None:
    groups = json.loads(sys.argv[1])
    import_deepspeed(torch.device("cpu"))
    importlib.import_module("torch._dynamo")
    mains = [importlib.import_module(program).main for _, program, *_ in groups]
    gc.freeze()  # no rank searches what is imported for garbage, which would copy its pages
    ended = [run_group(main, *group) for main, group in zip(mains, groups, strict=True)]
    sys.exit(not all(ended))


def run_group(main: Callable[[], Any], size: int, program: str, *arguments: str) -> bool:
    """Run `main` of PROGRAM on `size` ranks; return whether all have ended well."""
    reader, writer = os.pipe()
    ranks = {}
    for rank in range(size):
        if (child := os.fork()) == 0:
            become_rank(rank, size, port=int(os.read(reader, 5)))
            sys.argv = [program, *arguments]
            run(main)
        ranks[child] = rank
    # After the forks, since it has threads.
    store = listening_store(LOOPBACK, 0, nodes=1, timeout=timedelta(seconds=60))
    os.write(writer, b"%5d" % store.port * size)
    os.close(reader)
    os.close(writer)
    well = True
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status and well:
            well = False
            code = os.waitstatus_to_exitcode(status)
            print(f"{program}: rank {rank} ended with {code}", file=sys.stderr)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return well


def become_rank(rank: int, size: int, *, port: int) -> None:
    """Set what torchrun would."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")


def run(main: Callable[[], Any]) -> NoReturn:
    """Call `main` and end this process, whatever happens."""
    try:
        main()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
