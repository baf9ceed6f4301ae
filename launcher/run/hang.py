"""Who waited for whom, when a collective has taken longer than it may."""

import contextlib
import faulthandler
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

_PATIENCE_S = 2.0
_TIMEOUTS = ("timed out waiting", "application timeout")  # gloo's words, by where it waits
_THREAD = re.compile("(?i)thread 0x")  # the main one is written last
_FRAME = re.compile(r'  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


class StackOnRequest:
    """On SIGUSR2 this rank writes where it is, even when it hangs inside a collective."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = _hidden(folder, rank)
        self._file = self._path.open("w")
        faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True)

    def close(self) -> None:
        """Nobody will ask any more."""
        faulthandler.unregister(signal.SIGUSR2)
        self._file.close()
        self._path.unlink(missing_ok=True)


def is_timeout(error: BaseException) -> bool:
    """Whether a collective has waited too long for another rank."""
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in said for words in _TIMEOUTS)


def where_ranks_are(folder: Path, world: World) -> dict[int, str]:
    """Ask all ranks of this node for their stacks; rank -> its innermost own frame.

    Leaves `stack-rank<N>.txt` of each, and the last collectives as this rank has seen them in
    `flight-recorder-rank<N>.json`.
    """
    found = {}
    for rank, stopped in sorted(_ranks_of_this_node(world).items()):
        hidden = _hidden(folder, rank)
        with contextlib.suppress(FileNotFoundError):
            text = _stack(hidden)
            hidden.rename(folder / f"stack-rank{rank}.txt")
            found[rank] = stopped + _innermost(text)
    recorder: Any = torch._C._distributed_c10d
    content = json.loads(recorder._dump_fr_trace_json(True, False))
    (folder / f"flight-recorder-rank{world.rank}.json").write_text(json.dumps(content, indent=1))
    return found


def _ranks_of_this_node(world: World) -> dict[int, str]:
    """Their numbers, and of what was stopped that it was; all have been asked for their stacks."""
    ranks = {world.rank: ""}
    os.kill(os.getpid(), signal.SIGUSR2)
    for process in psutil.Process(os.getppid()).children():
        with contextlib.suppress(psutil.Error):
            rank = process.environ().get("RANK")
            if rank is not None and process.pid != os.getpid():
                stopped = process.status() == psutil.STATUS_STOPPED
                process.send_signal(signal.SIGUSR2)
                if stopped:  # it cannot answer, nor be ended in order, before it goes on
                    process.send_signal(signal.SIGCONT)
                ranks[int(rank)] = "a stop (SIGSTOP), inside " if stopped else ""
    return ranks


def _stack(path: Path) -> str:
    """The text, once it is there and grows no more."""
    until_s = time.monotonic() + _PATIENCE_S
    text = ""
    while time.monotonic() < until_s:
        before, text = text, path.read_text(errors="replace")
        if text and text == before:
            break
        time.sleep(0.1)
    return text


def _innermost(text: str) -> str:
    """The main thread's innermost frame, and the innermost of ours where that is another."""
    frames = [match.groupdict() for match in _FRAME.finditer(_THREAD.split(text)[-1])]
    if not frames:
        return "unknown"
    ours = [f for f in frames if "/launcher/" in f["file"] or "/model/" in f["file"]]
    shown = [frames[0], *(ours[:1] if ours[:1] != frames[:1] else [])]
    return ", called by ".join(
        f"{f['function']} ({Path(f['file']).name}:{f['line']})" for f in shown
    )


def _hidden(folder: Path, rank: int) -> Path:
    return folder / f".stack-rank{rank}"
