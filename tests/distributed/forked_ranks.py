"""Groups of ranks, each forked from this process, which has imported what they need: torch and
DeepSpeed take longer to import than most cases take.

Reads a request per line of stdin, until its end, and answers each with a line on stdout: the exit
code of the group. As under torchrun, the first rank that fails ends its group.
"""

import gc
import importlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn, TypedDict

import torch

from launcher.parallel.rendezvous import LOOPBACK, listening_store
from launcher.strategies.zero.engine import import_deepspeed

GRACE_S = 30  # torchrun's
DIFFER = -100


class Request(TypedDict):
    """A group of ranks that is to run `main` of a module."""

    ranks: int
    """0: one process, started without torchrun."""
    module: str
    arguments: list[str]
    environment: dict[str, str]
    output: str
    """The file that gets what they print."""
    errors: str
    apart: bool
    """Without an agent, as on nodes that are started by hand: a rank that fails ends no other."""


def serve() -> None:
    import_deepspeed(torch.device("cpu"))
    importlib.import_module("torch._dynamo")
    for line in sys.stdin:
        request: Request = json.loads(line)
        main = importlib.import_module(request["module"]).main
        gc.freeze()  # no rank searches what is imported for garbage, which would copy its pages
        print(run_group(main, request), flush=True)


def run_group(main: Callable[[], Any], request: Request) -> int:
    """Run `main` on the ranks; return 0, or the exit code of the first that has failed, and of
    ranks apart one that they all have, or `DIFFER`."""
    reader, writer = os.pipe()
    ranks: set[int] = set()
    for rank in range(max(request["ranks"], 1)):
        if (child := os.fork()) == 0:
            become_process(request)
            if request["ranks"]:
                become_rank(rank, request["ranks"], port=int(os.read(reader, 5)))
            run(main)
        ranks.add(child)
    # After the forks, since it has threads.
    store = listening_store(LOOPBACK, 0, nodes=1, timeout=timedelta(seconds=60))
    os.write(writer, b"%5d" % store.port * len(ranks))
    os.close(reader)
    os.close(writer)
    codes: list[int] = []
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        if status and not any(codes) and not request["apart"]:
            end(ranks, signal.SIGTERM)
            signal.signal(signal.SIGALRM, lambda *_: end(ranks, signal.SIGKILL))
            signal.alarm(GRACE_S)
        codes.append(os.waitstatus_to_exitcode(status))
    signal.alarm(0)
    if request["apart"] and len(set(codes)) > 1:
        return DIFFER
    return next(filter(None, codes), 0)


def end(ranks: set[int], number: int) -> None:
    for rank in ranks:
        os.kill(rank, number)


def become_process(request: Request) -> None:
    """Be as if started anew, with this environment and these arguments."""
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None  # found in the environment
    sys.argv = [request["module"], *request["arguments"]]
    for number, path, mode in (
        (0, os.devnull, os.O_RDONLY),
        (1, request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
        (2, request["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        file = os.open(path, mode)
        os.dup2(file, number)
        os.close(file)


def become_rank(rank: int, size: int, *, port: int) -> None:
    """Set what torchrun would."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR=LOOPBACK, MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True")


def run(main: Callable[[], Any]) -> NoReturn:
    """Call `main` and end this process, whatever happens."""
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    finally:
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
