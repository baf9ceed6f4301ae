"""First and last moments of a command: a working folder to be in, a terminal of some width, and
Ctrl-C at any time as one line and exit code 130.

While modules are imported there is nothing to tidy up, and an exception in the middle of an import
may come out as any other: SIGINT ends the process on the spot. `interruptible` is for what has
files or processes to remove.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

from launcher.util.errors import ExitCode

SCRIPTS = ("shardscale", "memscale", "torchrun")
_STOPPED = "shardscale: stopped by SIGINT\n"


def begin() -> None:
    """Prepare this process, if it is one of our commands and not a program that imports us."""
    if not _is_command():
        return
    if hears(signal.SIGINT):
        signal.signal(signal.SIGINT, _end_at_once)
    try:
        os.getcwd()
    except FileNotFoundError:
        print("shardscale: the working folder is deleted: cd to another one", file=sys.stderr)
        sys.exit(ExitCode.REFUSED)
    if os.environ.get("COLUMNS", "1").strip("0") == "":  # of which nothing could be shown
        del os.environ["COLUMNS"]


def hears(number: int) -> bool:
    """Whether the signal is not ignored: what a script starts with `&` ignores SIGINT, what nohup
    starts SIGHUP, and so do their children."""
    return signal.getsignal(number) is not signal.SIG_IGN


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Turn SIGINT into a KeyboardInterrupt within, then end with exit code 130; a second SIGINT
    ends the process at once.

    Raises:
        SystemExit: after a SIGINT, whatever has become of its KeyboardInterrupt on the way.
    """
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or not hears(signal.SIGINT):
        yield
        return
    heard = False

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        nonlocal heard
        heard = True
        signal.signal(signal.SIGINT, _end_at_once)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except BaseException:
        if not heard:
            raise
    finally:
        if not heard:
            signal.signal(signal.SIGINT, before)
    if heard:
        _say_stopped()
        raise SystemExit(ExitCode.INTERRUPTED)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """Start processes that never hear Ctrl-C, which a terminal sends to all: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:  # one that has come meanwhile arrives now
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_command() -> bool:
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # as long as Python looks for the module
        return any(word.partition(".")[0] == "launcher" for word in sys.orig_argv)
    return Path(program).name in SCRIPTS


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    for child in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    _say_stopped()
    os._exit(ExitCode.INTERRUPTED)


def _descendants(process_id: int) -> Iterator[int]:
    with contextlib.suppress(OSError):  # it has ended, or this is not Linux
        for path in Path(f"/proc/{process_id}/task").glob("*/children"):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield from _descendants(child)
                yield child


def _say_stopped() -> None:
    if os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(
            OSError
        ):  # not by sys.stderr, which may be in the middle of a line
            os.write(2, _STOPPED.encode())
