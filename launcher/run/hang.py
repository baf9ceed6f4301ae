"""Report of where every rank was when a collective timed out; imported when one has."""

import contextlib
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from launcher.parallel.world import World
from launcher.run.run_folder import stack_file

_PATIENCE_S = 2.0
_THREAD = re.compile("(?i)thread 0x")  # the main one is written last
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


def where_ranks_are(folder: Path, world: World) -> dict[int, str]:
    """Dump the stacks of all ranks of this node; returns rank -> its innermost frame of ours.

    Writes `stack-rank<N>.txt` for each, and the last collectives that this rank has seen to
    `flight-recorder-rank<N>.json`.
    """
    found = {}
    for rank, stopped in sorted(_ranks_of_this_node(world).items()):
        hidden = stack_file(folder, rank)
        with contextlib.suppress(FileNotFoundError):
            text = _stack(hidden)
            hidden.rename(folder / f"stack-rank{rank}.txt")
            found[rank] = stopped + _innermost(text)
    recorder: Any = torch._C._distributed_c10d
    content = json.loads(recorder._dump_fr_trace_json(True, False))
    (folder / f"flight-recorder-rank{world.rank}.json").write_text(json.dumps(content, indent=1))
    return found


def _ranks_of_this_node(world: World) -> dict[int, str]:
    """Request the stacks of this node's ranks; returns rank -> a note where it was stopped."""
    ranks = {world.rank: ""}
    os.kill(os.getpid(), signal.SIGUSR2)
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):
            rank = process.environ().get("RANK")
            if rank is not None and process.pid != os.getpid():
                stopped = process.status() == psutil.STATUS_STOPPED
                process.send_signal(signal.SIGUSR2)
                if stopped:  # it can neither answer nor be ended in order while stopped
                    process.send_signal(signal.SIGCONT)
                ranks[int(rank)] = "a stop (SIGSTOP), inside " if stopped else ""
    return ranks


def _stack(path: Path) -> str:
    """Return the text once it has stopped growing."""
    until_s = time.monotonic() + _PATIENCE_S
    text = ""
    while time.monotonic() < until_s:
        before, text = text, path.read_text(errors="replace")
        if text and text == before:
            break
        time.sleep(0.1)
    return text


def _innermost(text: str) -> str:
    """Return the main thread's innermost frame, and the innermost of ours where that differs."""
    frames = [match.groupdict() for match in _FRAME.finditer(_THREAD.split(text)[-1])]
    if not frames:
        return "unknown"
    ours = [f for f in frames if "/launcher/" in f["file"] or "/model/" in f["file"]]
    # faulthandler writes the innermost frame first
    shown = [frames[0], *(ours[:1] if ours[:1] != frames[:1] else [])]
    return ", called by ".join(
        f"{f['function']} ({Path(f['file']).name}:{f['line']})" for f in shown
    )
